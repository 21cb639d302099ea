"""What a worker computes with: data, model, loss and mechanisms, which it opens, checks and tries by itself.

Nothing of it is taken from a manifest: a manifest is compared with it.
"""

from pathlib import Path

import torch

from attestation.canonical import digest
from attestation.roster import Query
from metrics.errors import ConfigError, ProtocolError, RefusedError
from workers.clipping import GradientEngine
from workers.datasets import Dataset, DatasetForm, dataset_form
from workers.fingerprint import dataset_fingerprint
from workers.known_answer import known_answer
from workers.manifest import Manifest
from workers.measurement import Measurement
from workers.measuring import ClassCounts, PrivateEvaluation, SumEngine, check_measurable
from workers.mechanism import Mechanism
from workers.model_checks import check_trainable
from workers.models import build_model, loss_function, read_flat, trainable_tensors
from workers.numerics import current_numerics, pin_numerics
from workers.parameters import parameter_digest, tensor_digests
from workers.virtual_worker import VirtualWorkerComputer
from workers.worker_messages import WorkerFacts, WorkerSetup


class Workload:
    """Opens the dataset, builds the model, pins the numerics of this process.

    Attributes:
        dataset: all examples that this process may open.
        facts: what the manifest needs to know.
        computers: per query of the run, what computes the vector of a virtual worker; see :meth:`take`.
        known_answer: 32 bytes; see :meth:`take`.

    Raises:
        DatasetError, ModelError, ConfigError: what cannot be trained on, with the layer or array named.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        if setup.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "no_cuda",
                "this worker was given a GPU, but torch sees none.",
                "Install a CUDA build of torch on the nodes, or set use_gpu: false.",
            )
        self._setup, self._deterministic = setup, not setup.allow_nondeterministic
        pin_numerics(self._deterministic)
        self.dataset: Dataset = setup.dataset.open(Path(setup.base))
        self.module = build_model(setup.model, setup.base, setup.seed)
        self.loss, loss_code = loss_function(setup.loss, setup.base)
        check_trainable(self.module, self.form, self.loss, self._deterministic)
        self.facts = WorkerFacts(
            num_examples=len(self.dataset),
            tensors=trainable_tensors(self.module),
            initial_parameters=read_flat(self.module),
            model_code=setup.model.code_digest(setup.base),
            loss_code=loss_code,
            numerics=current_numerics(setup.device),
            dataset_fingerprint=dataset_fingerprint(setup.dataset, self.dataset, setup.base),
        )

    @property
    def form(self) -> DatasetForm:
        """The public outline of the dataset."""
        return dataset_form(self.dataset)

    def take(self, mechanism: Mechanism, measurements: tuple[Measurement, ...]) -> bytes:
        """Compute with these mechanisms from now on; returns the digest of the public synthetic batch's vectors.

        Raises:
            ConfigError: ``measurement_labels`` or ``measurement_too_large``.
            RefusedError: ``not_public`` if there is to be no noise on data that is not declared public.
            ModelError: ``nondeterministic_op``, with the operation's name: no example is in reach of it yet.
        """
        setup, start = self._setup, self.facts.initial_parameters
        if not mechanism.private and not setup.dataset.public:
            raise RefusedError("not_public", "this worker's data is not declared public, so it trains only with noise")
        self.mechanism, self.measurements = mechanism, measurements
        engine = GradientEngine(self.module, self.loss, mechanism, setup.device, self._deterministic)
        gradient = VirtualWorkerComputer(mechanism, engine, self.dataset)
        self.computers: dict[Query, VirtualWorkerComputer] = {mechanism.query: gradient}
        answers = [known_answer(mechanism, engine, self.dataset, start)]
        for measurement in measurements:
            check_measurable(measurement, self.form)
            measuring = self._measuring(measurement)
            self.computers[measurement.query] = gradient.beside(measurement.mechanism, measuring)
            # One batch tells what the code computes; a whole slice would take as long as an evaluation.
            small = measurement.mechanism.model_copy(update={"micro_batches": 1})
            answers.append(known_answer(small, measuring, self.dataset, start))
        self.known_answer = answers[0] if len(answers) == 1 else digest(b"".join(answers))
        return self.known_answer

    def _measuring(self, measurement: Measurement) -> SumEngine:
        if measurement.query == "class_counts":
            return ClassCounts(measurement)
        setup = self._setup
        module = build_model(setup.model, setup.base, setup.seed)
        return PrivateEvaluation(measurement, module, self.loss, setup.device, self._deterministic)

    def check(self, manifest: Manifest) -> None:
        """Require that ``manifest`` states what this is; ProtocolError ``manifest_mismatch`` names the field."""
        computation, facts = manifest.computation, self.facts
        start = parameter_digest(facts.tensors, tensor_digests(facts.initial_parameters, facts.tensors))
        checks = {
            "numerics": (computation.numerics, facts.numerics),
            "num_examples": (computation.mechanism.num_examples, facts.num_examples),
            "mechanism": (computation.mechanism, self.mechanism),
            "measurements": (computation.measurements, self.measurements),
            "loss": (computation.loss, self._setup.loss),
            "tensors": (computation.tensors, facts.tensors),
            "model_code": (computation.model_code, facts.model_code),
            "loss_code": (computation.loss_code, facts.loss_code),
            "initial_parameters": (computation.initial_parameters, start),
            "dataset": (computation.dataset, self._setup.dataset.identity_digest()),
            "known_answer": (manifest.known_answer, self.known_answer),
            "dataset_fingerprint": (manifest.dataset_fingerprint, facts.dataset_fingerprint),
        }
        for field, (stated, found) in checks.items():
            if stated != found:
                raise ProtocolError("manifest_mismatch", f"the manifest's {field} is not what this worker has")
