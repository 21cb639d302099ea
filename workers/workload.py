"""The workload of a worker: data, model, loss and mechanisms, which it opens, checks and tries by itself.

The workload takes nothing from a manifest: a manifest is compared with it.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from torch import nn

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.messages import checked
from raycloak.attestation.core.roster import Query
from raycloak.metrics.errors import ProtocolError, RefusedError
from raycloak.workers.device.words import words_on
from raycloak.workers.evaluation import HostedSplit, open_split
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.gpus import free_bytes, spare_bytes, take_gpus
from raycloak.workers.gradients.model_checks import (
    check_briefly,
    check_liger,
    check_released,
    check_rows,
    check_trainable,
)
from raycloak.workers.gradients.numerics import current_numerics, pin_numerics, slow_products
from raycloak.workers.gradients.placement import check_placed, place
from raycloak.workers.gradients.products import check_products
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.row_memory import MICRO_BATCH_BYTES, largest_rows
from raycloak.workers.gradients.spare_rows import CANDIDATES, spare_rows
from raycloak.workers.gradients.streaming import streams_of
from raycloak.workers.gradients.sum_engines import check_measurable, measurement_engine
from raycloak.workers.inputs.augmentation import Versions
from raycloak.workers.inputs.datasets import Dataset
from raycloak.workers.inputs.descriptor import DatasetDescriptor, OpenedDataset, require_nobody_in_both
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.sealed import Slices
from raycloak.workers.inputs.sent_rows import SentForm, SentSlots
from raycloak.workers.known_answer import check_classes, found_classes, known_answer
from raycloak.workers.listed_code import admit_code
from raycloak.workers.messages import WorkerFacts, WorkerSetup
from raycloak.workers.models.fed_by_name import fed_by_name
from raycloak.workers.models.liger import use_liger
from raycloak.workers.models.models import (
    ModelRuntime,
    build_noted,
    held_bytes,
    is_left_to_workers,
    load_flat,
    loss_function,
    read_flat,
    tensor_contents,
    trainable_tensors,
    twin_of,
)
from raycloak.workers.models.text_model import check_text, libraries
from raycloak.workers.terms.loss import SEVERAL
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.terms.mechanism import EXAMPLE, Mechanism, check_together
from raycloak.workers.terms.model_digest import check_same_tensors, frozen_digest, model_digest, tensor_digests
from raycloak.workers.vectors.threads import ONE_THREAD, WordThreads
from raycloak.workers.virtual_worker import VirtualWorkerComputer

# Marks the known answer of a loss that does not run under vmap: its last bits may be others.
_ROW_BY_ROW = digest(b"raycloak/loss/row-by-row/v1")


class Workload:
    """Opens the dataset, builds the model, pins the numerics of this process.

    Args:
        admit_split: raises where this process may not measure on a split, before it is opened.

    Attributes:
        dataset: all examples that this process may open.
        slices, evaluation_slices: where keys of training and evaluation slices go.
        form: the public outline of the dataset.
        units: whose rows the examples are; None where each is a unit of its own.
        versions: that a step computes of each row; None where it computes the row itself.
        vocabulary: public number of ids that integer features are; None for other features.
        sent_form: form of the examples that a client sends; None where data is registered.
        runtime: how its model is built and run.
        loss: the run's loss, one example at a time; the one in ``runtime``.
        module: the model whose gradients are computed.
        split: the split that it is to measure on; None where the driver measures, or nobody.
        word_threads: that share the work on words in the host's memory.
        words: of all vectors, on the device that the run uses.
        facts: its contribution to the manifest.

    Raises:
        DatasetError, ModelError, ConfigError: what cannot be trained on, with the layer or array named.
        ProtocolError: ``model_mismatch`` if the model is not that of ``setup.contents``, with the tensor named.
        EvidenceError: ``code_unlisted``, with the code named.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        admit_split: Callable[[DatasetDescriptor], None],
        word_threads: WordThreads = ONE_THREAD,
    ) -> None:
        devices = take_gpus(setup.gpus) if setup.device == "cuda" else (torch.device(setup.device),)
        self.setup, deterministic, classes = setup, not setup.allow_nondeterministic, setup.dataset.classes
        hub = setup.model.hub
        self.word_threads = word_threads
        self.words = words_on(devices, word_threads)
        # Before data is opened and any code runs.
        code = admit_code(setup)
        # First of all: what was computed before it may have other last bits.
        pin_numerics(deterministic, setup.threads)
        opened = setup.dataset.open_slices(setup.base)
        self.dataset: Dataset = opened.examples
        self.slices: Slices = opened.slices
        # Before any code of the model or loss runs.
        marks = data_marks(setup.dataset, opened, setup.base)
        self.module, notes = build_noted(setup.model, setup.base, setup.seed, setup.mode)
        loss_fn, loss_code = loss_function(setup.loss, setup.base)
        # Once more: modules of a user may set torch up as they are imported.
        pin_numerics(deterministic, setup.threads)
        for device in devices:
            check_products(device)
        contents = tensor_contents(self.module, loss_fn)
        if setup.contents is not None:
            check_same_tensors(setup.contents, contents)
        # One for all engines, so that all of them compute as the known answer says.
        self.loss = RowLoss(loss_fn)
        self.runtime = ModelRuntime(lambda: twin_of(self.module), self.loss, setup.device, deterministic)
        self.form, self.units, augment = opened.form, opened.units, setup.dataset.augment
        self.versions = None if augment is None else Versions(augment, self.form, setup.base)
        # After its contents were read: what hands the inputs over is not the model's.
        fed_by_name(self.module, self.form.inputs)
        if hub is not None:
            hub.check_tokenizer(setup.dataset.tokenizer, setup.base)
        self.vocabulary = check_text(self.module, self.form, setup.loss.name, opened.vocabulary, classes)
        is_sent = isinstance(self.dataset, SentSlots)
        self.sent_form = SentForm(self.form, self.vocabulary, classes, padded=hub is not None) if is_sent else None
        with opened.naming_features(self.form):
            if setup.device != "cpu":
                check_briefly(self.module, self.form, loss_fn, deterministic, self.vocabulary)
            # All checks run where the model will: only there do they meet the kernels that it will.
            most = _most_bytes(setup, self.module)
            place(self.module, devices, free_bytes, most)
            if len(devices) > 1:
                check_placed(self.module, self.form, self.vocabulary)
            if hub is not None and hub.use_liger_kernels:
                check_liger(self.module, self.form, loss_fn, deterministic, self.vocabulary)
                use_liger(self.module)
            check_trainable(self.module, self.form, loss_fn, deterministic, self.vocabulary)
        check_classes(self.module, setup.loss.name, self.dataset, classes, self.vocabulary, deterministic)
        # Before the parameters are copied: it takes as much memory as a step.
        rows = largest_rows(self.module, self.form, loss_fn, deterministic, self.vocabulary, setup.device, most)
        self.split = self._split(opened, most, admit_split)
        self.evaluation_slices = Slices() if self.split is None else self.split.slices
        tensors = trainable_tensors(self.module)
        computed = {"model_libraries": libraries(self.module), **asdict(setup.mode)}
        self.facts = WorkerFacts(
            num_examples=self.form.population,
            tensors=tensors,
            initial_parameters=model_digest(tensors, tensor_digests(read_flat(self.module), tensors, word_threads)),
            contents=contents,
            model_code=setup.model.code_digest(setup.base),
            loss_code=loss_code,
            augment_code=b"" if self.versions is None else self.versions.code,
            numerics=current_numerics(setup.device).model_copy(update=computed),
            data=marks,
            largest_rows=rows,
            tokenizer=opened.tokenizer,
            left_out=opened.left_out,
            code=code,
            measures=self.split is not None,
            model_notes=(
                *notes,
                *slow_products(self.module, setup.device, torch.backends.cpu.get_cpu_capability()),
                *(f"{each.device} has frozen blocks in turn: it does not hold all" for each in streams_of(self.module)),
            ),
        )

    def _split(
        self, opened: OpenedDataset, most_bytes: int, admit: Callable[[DatasetDescriptor], None]
    ) -> HostedSplit | None:
        """Open the split that this worker is to measure on; None where the driver measures, or nobody."""
        split, setup = self.setup.evaluation, self.setup
        if split is None:
            return None
        is_hosted = split.kind == "sealed" or is_left_to_workers(self.module)
        # Here too where the driver measures, which opens no training data.
        is_compared = split.kind != "sealed" and split.unit is not None and opened.units is not None
        if not is_hosted and not is_compared:
            return None
        admit(split)
        if is_compared:
            require_nobody_in_both(opened.units, split.open_slices(setup.base).units, split.unit)
        if not is_hosted:
            # A function of the user's may have read it, and set torch up.
            pin_numerics(not setup.allow_nondeterministic, setup.threads)
            return None
        private = None if setup.dataset.public else opened
        of_run = setup.loss.name, self.form, self.runtime, self.vocabulary, most_bytes
        found = open_split(split, setup.base, private, *of_run)
        # A function of the user's may have read it, and set torch up.
        pin_numerics(not setup.allow_nondeterministic, setup.threads)
        return found


def _most_bytes(setup: WorkerSetup, module: nn.Module) -> int:
    """Return the memory that one micro-batch may take, in bytes."""
    if setup.micro_batch_bytes is not None:
        return setup.micro_batch_bytes
    usual = MICRO_BATCH_BYTES[setup.device]
    return min(usual, spare_bytes(setup.gpus, held_bytes(module))) if setup.device == "cuda" else usual


class PlannedWorkload:
    """A workload with the mechanisms of a run, each tried on public synthetic data.

    Args:
        workload: its model becomes that of the gradient's engine.
        mechanism, measurements: of the run.

    Attributes:
        computers: per query of the run, the computer of a virtual worker's vector.
        known_answer: digest of the public synthetic batch's vectors, 32 bytes; see `workers/known_answer.py`.

    Raises:
        ProtocolError: ``mechanism_bounds`` or ``malformed`` if no proof covers one of them, or all of them together.
        ConfigError: ``batch_too_large``, ``measurement_labels`` or ``measurement_too_large``.
        RefusedError: ``not_public`` if anything is to be released without noise, of data that is sealed or is not
            declared public.
        ModelError: ``nondeterministic_op``, with the operation's name: no example is in reach of it yet; or what
            `raycloak.workers.gradients.model_checks.check_rows` refuses.
    """

    def __init__(self, workload: Workload, mechanism: Mechanism, measurements: tuple[Measurement, ...]) -> None:
        # They came as objects, which nothing has checked.
        mechanism = checked(Mechanism, mechanism)
        measurements = tuple(checked(Measurement, each) for each in measurements)
        mechanisms = (mechanism, *(measurement.mechanism for measurement in measurements))
        check_together(mechanisms)
        noised = all(each.private for each in mechanisms)
        if not noised and workload.slices.demand is not None:
            raise RefusedError("not_public", "this worker's data is sealed, so nothing leaves it without noise")
        if not noised and not workload.setup.dataset.public:
            raise RefusedError("not_public", "this worker's data is not declared public, so it trains only with noise")
        self.workload, self.mechanism, self.measurements = workload, mechanism, measurements
        self._mechanisms = mechanisms
        dataset, runtime = workload.dataset, workload.runtime
        vocabulary = workload.vocabulary
        check_rows(workload.module, workload.form, runtime.loss_fn, mechanisms, runtime.deterministic, vocabulary)
        counted = (each.mechanism.dimension for each in measurements if each.query == "class_counts")
        classes = next(counted, None) or workload.setup.dataset.classes
        # Columns of several losses have no number of classes together.
        if classes is None or workload.setup.loss.name == SEVERAL:
            classes = found_classes(workload.module, workload.loss, dataset, vocabulary, runtime.deterministic)
        rows = min(CANDIDATES, mechanism.micro_batch_rows)
        spare = spare_rows(workload.module.train(), workload.form, runtime.deterministic, vocabulary, candidates=rows)
        of_run, clock = (runtime.device, runtime.deterministic), workload.words.clock
        engine = GradientEngine(workload.module, runtime.loss_fn, mechanism, *of_run, clock)
        of_data = dataset, spare, workload.units, workload.versions
        gradient = VirtualWorkerComputer(mechanism, engine, *of_data, words=workload.words)
        self.computers: dict[Query, VirtualWorkerComputer] = {mechanism.query: gradient}
        # The module has not seen a step yet. Copied late: the checks before take as much memory as a step.
        start = read_flat(workload.module)
        answering = partial(known_answer, classes=classes, words=workload.words)
        answers = [answering(mechanism, engine, dataset, start, vocabulary, versions=workload.versions)]
        for measurement in measurements:
            check_measurable(measurement, workload.form)
            counting = measurement_engine(measurement, runtime)
            self.computers[measurement.query] = gradient.beside(measurement.mechanism, counting)
            # One batch shows how the code computes; a whole slice would take as long as an evaluation.
            small = measurement.mechanism.model_copy(update={"micro_batches": 1})
            answers.append(answering(small, counting, dataset, start, vocabulary))
        if workload.loss.row_by_row:
            answers.append(_ROW_BY_ROW)
        self.known_answer = answers[0] if len(answers) == 1 else digest(b"".join(answers))

    def check_released(self, step: int, parameters: np.ndarray) -> None:
        """Check on synthetic rows, at public steps 1, 2, 4, 8 and so on, that the model still keeps examples apart.

        A model may come to mix them as its parameters grow. Step 0 has the parameters that the run was checked with.

        Args:
            parameters: float32[d], of the step; released, so a refusal says nothing of the data.

        Raises:
            ModelError: as `raycloak.workers.gradients.model_checks.check_released`.
        """
        # The powers of two.
        if step & (step - 1) or not step:
            return
        workload, runtime = self.workload, self.workload.runtime
        load_flat(workload.module, parameters)
        to_check = workload.module, workload.form, runtime.loss_fn, self._mechanisms
        check_released(*to_check, runtime.deterministic, workload.vocabulary)

    def check(self, manifest: Manifest) -> None:
        """Require that ``manifest`` states this workload, and meets the demand that sealed data comes with.

        Raises:
            ProtocolError: ``manifest_mismatch``, with the field named; ``mechanism_bounds`` or ``malformed`` for a rule
                of its own that it breaks.
            EvidenceError: ``sealed_demand``, with what differs.
        """
        manifest = checked(Manifest, manifest)
        computation, facts, setup = manifest.computation, self.workload.facts, self.workload.setup
        bounded, sent = computation.mechanism.max_participations is not None, setup.dataset.sent is not None
        checks = {
            "numerics": (computation.numerics, facts.numerics),
            "num_examples": (computation.mechanism.num_examples, facts.num_examples),
            "unit": (computation.mechanism.unit, setup.dataset.unit or EXAMPLE),
            "rows_per_unit": (computation.mechanism.rows_chosen, setup.dataset.rows_per_unit),
            # A dataset may take part in every step, so it must be charged for every step.
            "max_participations": (bounded, sent),
            "mechanism": (computation.mechanism, self.mechanism),
            "measurements": (computation.measurements, self.measurements),
            "loss": (computation.loss, setup.loss),
            "tensors": (computation.tensors, facts.tensors),
            "model_code": (computation.model_code, facts.model_code),
            "loss_code": (computation.loss_code, facts.loss_code),
            "augment_code": (computation.augment_code, facts.augment_code),
            "initial_parameters": (computation.initial_parameters, facts.initial_parameters),
            "frozen": (computation.frozen, frozen_digest(facts.contents)),
            "dataset": (computation.dataset, setup.dataset.identity_digest()),
            "tokenizer": (computation.tokenizer, facts.tokenizer),
            "known_answer": (manifest.known_answer, self.known_answer),
            "dataset_fingerprint": (manifest.dataset_fingerprint, facts.data.fingerprint),
        }
        for field, (stated, found) in checks.items():
            if stated != found:
                raise ProtocolError("manifest_mismatch", f"the manifest's {field} is not what this worker has")
        if self.workload.slices.demand is not None:
            self.workload.slices.demand.require(manifest.stated)
