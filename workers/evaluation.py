"""The evaluation of released parameters: scores of examples, and a worker's part in evaluating on a split.

The split is sealed, or it is public and the model is too large for the driver. A worker answers with the exact sum of
scores and number of examples of each slice that it hosts. Of a public split it also states what its slices hold, and
counts by class. A sealed split is confidential and its results are not: nothing else about its examples leaves.

Guarantee: a worker evaluates only parameters that its orchestrator ordered to be evaluated
(`raycloak.attestation.orchestrator.evaluation_order`). Slices of a sealed split need the evaluation keys that it was
given; a split in the clear is declared public, and is not read from where its private training data lies.
The score of a slice depends only on model, parameters and slice, so it has the same bits on every host.
Not guaranteed: differential privacy. Results are exact, and reveal as much about the examples as exact results can.
"""

import struct
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.messages import Envelope, Message, open_envelope, seal
from raycloak.attestation.core.roster import Member
from raycloak.attestation.orchestrator.evaluation_order import open_order
from raycloak.metrics.errors import DatasetError, ProtocolError
from raycloak.workers.gradients.gradient_parts import named_operations
from raycloak.workers.gradients.placement import on_device
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.row_memory import scored_rows
from raycloak.workers.gradients.vocabulary_loss import ModelLosses
from raycloak.workers.inputs.datasets import Dataset, DatasetForm, dataset_form, slice_digest, slice_ids
from raycloak.workers.inputs.descriptor import DatasetDescriptor, OpenedDataset, require_public_split, split_is_private
from raycloak.workers.inputs.sealed import SealedDataset, Slices
from raycloak.workers.models.losses import predicted, share_predicted
from raycloak.workers.models.models import LossFn, ModelRuntime, device_of, load_flat
from raycloak.workers.models.text_model import check_public_text
from raycloak.workers.terms.loss import has_accuracy
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import macro_f1
from raycloak.workers.terms.model_digest import model_digest, own_copy, tensor_digests
from raycloak.workers.vectors.threads import WordThreads

Metric = Literal["accuracy", "loss"]
Classes = tuple[tuple[int, int, int], ...]
"""Class, rows predicted rightly, and how often it is a label or a prediction; ascending."""

# A score travels as the eight bytes of a float64: every bit arrives, also of a loss that is not finite.
_FLOAT = struct.Struct(">d")


def metric_of(loss: str) -> Metric:
    """Return the metric of a model that is trained with the loss of this name."""
    return "accuracy" if has_accuracy(loss) else "loss"


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of some examples.

    Attributes:
        total: their sum.
        classes: by class that is a label or predicted, the rows that are predicted rightly, and how often it is either.
            Of several labels an example, each is a class. Empty where none are predicted.
    """

    total: float
    classes: Classes

    @property
    def f1(self) -> float | None:
        """Macro F1 over all labels and predictions, as scikit-learn's; None without classes.

        A label that the model has no output for is a class of F1 0. Of several labels an example, each 0 or 1, it is
        the mean of the F1 of each.
        """
        return macro_f1(*np.array([[right, either] for _, right, either in self.classes], np.int64).reshape(-1, 2).T)

    @classmethod
    def added(cls, slices: Mapping[int, Self]) -> Self:
        """Return the scores of all ``slices``, added in their order, not of the answers: it decides float64's bits."""
        total, right, either = 0.0, Counter[int](), Counter[int]()
        for v in sorted(slices):
            total += slices[v].total
            for each, rightly, found in slices[v].classes:
                right[each] += rightly
                either[each] += found
        return cls(total, _classes(right, either))


def _classes(right: Counter[int], either: Counter[int]) -> Classes:
    return tuple((each, right[each], either[each]) for each in sorted(either))


class Scorer:
    """Sums the scores of examples, in eval mode: the share of an example's labels that are predicted, or the loss.

    Args:
        module: becomes this object's own.
        loss_fn: one loss per example.
        rows: as many are scored at once; not a setting, since it may decide how a kernel rounds. See
            :func:`raycloak.workers.gradients.row_memory.scored_rows`.
        device: ``cpu`` or ``cuda``.
        deterministic: see :func:`raycloak.workers.gradients.clipping.named_operations`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFn,
        metric: Metric,
        rows: int,
        device: str = "cpu",
        deterministic: bool = False,
    ) -> None:
        self._module = on_device(module, device).eval()
        self._device = device_of(module)
        self._loss = RowLoss.of(loss_fn)
        self._losses = ModelLosses(self._module, self._loss)
        self._metric, self._rows = metric, rows
        self._deterministic = deterministic

    def load(self, parameters: NDArray[np.float32]) -> None:
        """Score float32 [d] parameters in canonical order from now on."""
        load_flat(self._module, parameters)

    def scores(
        self, dataset: Dataset, ids: NDArray[np.int64], each: Callable[[Tensor, Tensor], None] | None = None
    ) -> Scores:
        """Return the scores of the examples ``ids``: a sum in float64, in batches of a fixed size from the first.

        No warning is shown, since one could depend on an example.

        Args:
            each: gets the outputs and labels of every batch; for a public dataset alone.

        Raises:
            ModelError: ``nondeterministic_op`` naming the operation.
        """
        total = 0.0
        right, either = Counter[int](), Counter[int]()
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), named_operations(self._deterministic):
            for start in range(0, len(ids), self._rows):
                batch = dataset.batch(ids[start : start + self._rows])
                features, labels = (torch.tensor(part, device=self._device) for part in batch)
                if self._metric == "loss" and each is None:
                    total += float(self._losses(features, labels).double().sum())
                    continue
                output: Tensor = self._module(features)
                labels = labels.to(output.device)
                if each is not None:
                    each(output, labels)
                if self._metric == "loss":
                    scores = self._loss(output, labels)
                else:
                    scores = share_predicted(output, labels)
                    _count(output, labels, right, either)
                total += float(scores.double().sum())
        return Scores(total, _classes(right, either))


def _count(output: Tensor, labels: Tensor, right: Counter[int], either: Counter[int]) -> None:
    """Count for F1: predictions of one class an example [n], or the positives of each of several labels [n, k]."""
    found = predicted(output, labels)
    if labels.ndim == 1:
        right.update(found[found == labels].tolist())
        either.update([*labels.long().tolist(), *found.tolist()])
    elif labels.ndim == 2 and output.numel() == labels.numel():
        right.update(dict(enumerate(((found == 1) & (labels == 1)).sum(0).tolist())))
        either.update(dict(enumerate(((found == 1).long() + (labels == 1).long()).sum(0).tolist())))


class SliceScore(Message):
    """The result on one slice.

    Attributes:
        total: the sum of scores, an IEEE 754 binary64, big-endian.
        content: of a public split, the digest of the slice; see `raycloak.workers.inputs.datasets.slice_digest`.
        classes: of a public split, as of :class:`Scores`.

    The last two are left out of the bytes where they are empty.
    """

    DOMAIN: ClassVar[str] = "raycloak/slice-score/v1"

    virtual_worker: int
    total: bytes
    count: int
    content: bytes = Field(default=b"", exclude_if=lambda content: not content)
    classes: Classes = Field(default=(), exclude_if=lambda classes: not classes)

    @property
    def scores(self) -> Scores:
        """The scores; ProtocolError ``malformed`` if ``total`` is not eight bytes long."""
        if len(self.total) != _FLOAT.size:
            raise ProtocolError("malformed", "a score is not a float64")
        return Scores(_FLOAT.unpack(self.total)[0], self.classes)


class EvaluationAnswer(Message):
    """A worker's signed scores of the slices that it hosts.

    Attributes:
        order: digest of the order that is answered, so of run, steps, parameters and hosts.
        scores: in the order of its virtual workers.
    """

    DOMAIN: ClassVar[str] = "raycloak/evaluation-answer/v1"

    member_id: str
    order: bytes
    scores: tuple[SliceScore, ...]


class EvaluationReply(Message):
    """A worker's answer: ``code`` is ``ok`` or says why there is no signed :class:`EvaluationAnswer`."""

    DOMAIN: ClassVar[str] = "raycloak/evaluation-reply/v1"

    member_id: str
    code: str
    answer: Envelope | None = None


def check_evaluation_form(evaluation: DatasetForm, training: DatasetForm) -> None:
    """Require a split of the shapes and types that the model was checked on; DatasetError ``evaluation_form``."""
    # Of a split every row is measured, whosever it is.
    if evaluation.model_copy(update={"num_examples": training.num_examples, "units": training.units}) != training:
        raise DatasetError(
            "evaluation_form",
            f"the evaluation split has features {evaluation.feature_dtype} {list(evaluation.feature_shape)} and "
            f"labels {evaluation.label_dtype} {list(evaluation.label_shape)}; the training examples have "
            f"{training.feature_dtype} {list(training.feature_shape)} and {training.label_dtype} "
            f"{list(training.label_shape)}.",
            "Give examples of the same shapes and types.",
        )


@dataclass(frozen=True, slots=True)
class HostedSplit:
    """An evaluation split that a worker has opened; no example of a sealed one is in reach before a key of its slice.

    Attributes:
        dataset: its examples.
        slices: where keys of its slices go.
        scorer: scores them with its own model.
        is_public: whether its examples are.
    """

    dataset: Dataset
    slices: Slices
    scorer: Scorer
    is_public: bool

    def answer(
        self,
        envelope: Envelope,
        parameters: Sequence[np.ndarray],
        attester: Attester,
        manifest: Manifest,
        threads: WordThreads,
    ) -> Envelope:
        """Score the slices that the order in ``envelope`` gives to this worker; returns a signed answer.

        Guarantee: nothing is computed before the order was verified for exactly these parameters.

        Args:
            parameters: the float32 parameters of each range, in range order.
            attester: the worker's; the answer is signed in its name and with its key.
            manifest: of the run whose orders are taken; it was checked.
            threads: that share the copy of the parameters, and its digests.

        Raises:
            ProtocolError: ``parameters_mismatch``, ``roster_own_entry``, or why the order is refused.
            DatasetError: ``slice_sealed`` without the key of a slice.
        """
        order = open_order(
            envelope,
            orchestrator_key=manifest.orchestrator_key,
            run_id=manifest.run_id,
            manifest_digest=manifest.digest(),
            virtual_workers=manifest.computation.mechanism.virtual_workers,
        )
        own = order.member(attester.member_id)
        attester.require_own(own)
        tensors = manifest.computation.tensors
        flat = own_copy(parameters, threads)
        if model_digest(tensors, tensor_digests(flat, tensors, threads)) != order.model_digest:
            raise ProtocolError("parameters_mismatch", "the order is for other parameters than those that came with it")
        self.scorer.load(flat)
        count = manifest.computation.mechanism.virtual_workers
        scores = tuple(self._slice_score(v, slice_ids(v, count, len(self.dataset))) for v in own.virtual_workers)
        body = EvaluationAnswer(member_id=own.member_id, order=order.digest(), scores=scores)
        return seal(body, attester.identity)

    def _slice_score(self, v: int, ids: NDArray[np.int64]) -> SliceScore:
        scores = self.scorer.scores(self.dataset, ids)
        found = SliceScore(virtual_worker=v, total=_FLOAT.pack(scores.total), count=len(ids))
        if not self.is_public:
            return found
        # Read now, and not as the split was opened: what is scored may have changed since.
        told = {"content": slice_digest(self.dataset, ids), "classes": scores.classes}
        return found.model_copy(update=told)


def open_split(
    split: DatasetDescriptor,
    base: Path | str,
    private: OpenedDataset | None,
    loss: str,
    training: DatasetForm,
    runtime: ModelRuntime,
    vocabulary: int | None,
    most_bytes: int,
) -> HostedSplit:
    """Open a split to measure on, of a sealed one the header alone; a twin of the model will score it.

    Args:
        private: training data that no exact result may be of; None if it is public.
        loss: name of the run's loss, which decides what is scored.
        training, vocabulary: of the data that the model was checked on.
        most_bytes: that one micro-batch may take.

    Raises:
        ConfigError: ``sealed_data``, ``evaluation_not_public`` or ``evaluation_private``; of a public split also what
            it does not fit a text model by.
        DatasetError: ``evaluation_form``, or as `DatasetDescriptor.open_slices`.
    """
    # The training model cannot serve: it stays in train mode.
    module = runtime.twin().eval()
    examples: Dataset
    slices: Slices
    if split.kind == "sealed":
        assert split.path is not None, "a sealed dataset has a path"
        examples = slices = SealedDataset(Path(base) / split.path, "evaluation")
    else:
        require_public_split(split.kind, split.public)
        opened = split.open_slices(base)
        if private is not None and opened.places & private.places:
            raise split_is_private("both have files or functions in common")
        examples, slices = opened.examples, Slices()
        check_public_text(module, examples, loss, opened.vocabulary, split.classes)
    check_evaluation_form(dataset_form(examples), training)
    rows = scored_rows(module, training, runtime.loss_fn, vocabulary, most_bytes)
    scorer = Scorer(module, runtime.loss_fn, metric_of(loss), rows, runtime.device, runtime.deterministic)
    return HostedSplit(examples, slices, scorer, is_public=split.kind != "sealed")


def open_answer(
    envelope: Envelope,
    order_digest: bytes,
    member: Member,
    counts: Mapping[int, int],
    contents: Mapping[int, bytes] | None = None,
) -> dict[int, Scores]:
    """Verify a worker's answer, and return the scores of each of its slices.

    Guarantee: returns only scores that the holder of ``member``'s identity key signed in answer to that order. They
    cover exactly the slices that the order gives to ``member``, each with all its examples.

    Args:
        counts: number of examples of each slice.
        contents: digest of each slice of a public split; None for a sealed one, of which nothing but sums is taken.

    Raises:
        ProtocolError: ``signature``, ``malformed`` or ``answer_mismatch``.
    """
    answer = open_envelope(EvaluationAnswer, envelope, member.identity_key)
    expected = [(v, counts[v], contents[v] if contents else b"") for v in member.virtual_workers]
    stated = [(score.virtual_worker, score.count, score.content) for score in answer.scores]
    if (answer.member_id, answer.order, stated) != (member.member_id, order_digest, expected):
        raise ProtocolError("answer_mismatch", f"{member.member_id} answered another order, or other slices")
    if contents is None and any(score.classes for score in answer.scores):
        raise ProtocolError("answer_mismatch", f"{member.member_id} told more than sums of a sealed split")
    return {score.virtual_worker: score.scores for score in answer.scores}
