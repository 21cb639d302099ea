"""Measuring released parameters: per-example scores, and a worker's part in evaluating on a sealed split.

The split is confidential and its results are not: a worker opens the slices that it hosts, and answers with the sum of
scores and the number of examples of each slice, exactly.

Guarantee: a worker measures only parameters that its orchestrator ordered to be measured
(`attestation.evaluation_order`), on slices whose evaluation keys it was given; nothing else of an example leaves. The
score of a slice depends on model, parameters and slice alone, so it has the same bits whoever hosts it.
Not guaranteed: anything like differential privacy. The results tell about the examples whatever they tell.
"""

import struct
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attestation.attester import Attester
from attestation.evaluation_order import open_order
from attestation.keys import Secret
from attestation.messages import Envelope, Message, open_envelope, seal
from attestation.roster import Member
from metrics.errors import DatasetError, ProtocolError
from workers.clipping import named_operations
from workers.datasets import Dataset, DatasetForm, dataset_form, slice_ids
from workers.guard import answer_code, guarded
from workers.manifest import Manifest
from workers.models import LossFn, build_model, load_flat
from workers.parameters import own_copy, parameter_digest, tensor_digests
from workers.sealed_dataset import SealedDataset
from workers.worker_messages import WorkerSetup

Metric = Literal["accuracy", "loss"]
_BATCH = 256
_FLOAT = struct.Struct(">d")


def metric_of(loss: str) -> Metric:
    """What is measured of a model that is trained with the loss of this name."""
    return "accuracy" if loss == "cross_entropy" else "loss"


class Scorer:
    """Sums the scores of examples, in eval mode: 1 for a label that is the largest output, or the loss.

    Args:
        module: becomes this object's own.
        loss_fn: one loss per example.
        device: ``cpu`` or ``cuda``.
        deterministic: see :func:`workers.clipping.named_operations`.
    """

    def __init__(
        self, module: nn.Module, loss_fn: LossFn, metric: Metric, device: str = "cpu", deterministic: bool = False
    ) -> None:
        self._device = torch.device(device)
        self._module = module.to(self._device).eval()
        self._loss_fn = loss_fn
        self._metric = metric
        self._deterministic = deterministic

    def load(self, parameters: NDArray[np.float32]) -> None:
        """Measure float32 [d] parameters in canonical order from now on."""
        load_flat(self._module, parameters)

    def total(self, dataset: Dataset, ids: NDArray[np.int64]) -> float:
        """Sum over the examples ``ids`` in float64, in batches of a fixed size from the first.

        No warning is shown, since one could depend on an example.

        Raises:
            ModelError: ``nondeterministic_op`` naming the operation.
        """
        total = 0.0
        with warnings.catch_warnings(), torch.no_grad(), named_operations(self._deterministic):
            warnings.simplefilter("ignore")
            for start in range(0, len(ids), _BATCH):
                batch = dataset.batch(ids[start : start + _BATCH])
                features, labels = (torch.tensor(part, device=self._device) for part in batch)
                total += float(self._scores(features, labels).double().sum())
        return total

    def _scores(self, features: Tensor, labels: Tensor) -> Tensor:
        """One score per example, [n]."""
        output: Tensor = self._module(features)
        if self._metric == "loss":
            return self._loss_fn(output, labels)
        return (output.argmax(1) == labels).double().reshape(len(labels), -1).mean(1)


class SliceScore(Message):
    """The result on one slice: its ``total`` is the sum of scores, an IEEE 754 binary64, big-endian."""

    DOMAIN: ClassVar[str] = "raycloak/slice-score/v1"

    virtual_worker: int
    total: bytes
    count: int

    @property
    def value(self) -> float:
        """The sum; ProtocolError ``malformed`` if it has another length."""
        if len(self.total) != _FLOAT.size:
            raise ProtocolError("malformed", "a score is no float64")
        value: float = _FLOAT.unpack(self.total)[0]
        return value


class EvaluationAnswer(Message):
    """What a worker says of the slices that it hosts.

    Attributes:
        order: digest of the order that it answers, so of run, steps, parameters and hosts.
        scores: in the order of its virtual workers.
    """

    DOMAIN: ClassVar[str] = "raycloak/evaluation-answer/v1"

    member_id: str
    order: bytes
    scores: tuple[SliceScore, ...]


@dataclass(frozen=True, slots=True)
class EvaluationReply:
    """A worker's answer: ``code`` is ``ok`` or says why there is no signed :class:`EvaluationAnswer`."""

    member_id: str
    code: str
    answer: Envelope | None = None


def check_evaluation_form(evaluation: DatasetForm, training: DatasetForm) -> None:
    """Require a split whose examples are like those that the model was checked on; DatasetError ``evaluation_form``."""
    if evaluation.model_copy(update={"num_examples": training.num_examples}) != training:
        raise DatasetError(
            "evaluation_form",
            f"the sealed evaluation split has features {evaluation.feature_dtype} {list(evaluation.feature_shape)} and "
            f"labels {evaluation.label_dtype} {list(evaluation.label_shape)}; those of the training examples are "
            f"{training.feature_dtype} {list(training.feature_shape)} and {training.label_dtype} "
            f"{list(training.label_shape)}.",
            "Seal examples of the same shapes and types.",
        )


class Evaluating:
    """A worker's part in evaluations; it has none until :meth:`open`.

    Args:
        attester: in whose name, and with whose key, answers are signed.
    """

    def __init__(self, attester: Attester) -> None:
        self._attester = attester
        self._dataset: SealedDataset | None = None
        self._manifest: Manifest | None = None

    def open(self, setup: WorkerSetup, training: DatasetForm, loss_fn: LossFn) -> None:
        """Open the header of the sealed split, if there is one; no example is in reach yet.

        Args:
            training: what the model was checked on.

        Raises:
            ConfigError: ``sealed_data``.
            DatasetError: ``evaluation_form``.
        """
        if setup.evaluation is not None:
            self._dataset = SealedDataset(Path(setup.base) / setup.evaluation, "evaluation")
            check_evaluation_form(dataset_form(self._dataset), training)
            module = build_model(setup.model, setup.base, setup.seed)
            deterministic = not setup.allow_nondeterministic
            self._scorer = Scorer(module, loss_fn, metric_of(setup.loss), setup.device, deterministic)

    def bind(self, manifest: Manifest) -> None:
        """Take orders of the run of ``manifest``, which was checked."""
        self._manifest = manifest

    def take(self, keys: Mapping[int, Secret], hosted: Set[int]) -> None:
        """Open the slices of ``keys``, and forget those of virtual workers that are not ``hosted``.

        Raises:
            EvidenceError: ``key_not_committed``.
            DatasetError: ``sealed_changed``, ``dataset_unreadable``.
        """
        if self._dataset is not None:
            self._dataset.take(keys, hosted)

    def answer(self, envelope: Envelope, parameters: Sequence[np.ndarray]) -> EvaluationReply:
        """Measure the slices that the order in ``envelope`` gives to this worker.

        Guarantee: nothing is measured before the order was verified for exactly these parameters; every failure is
        answered by a code.

        Args:
            parameters: the float32 parameters of each range, in range order.
        """
        try:
            signed = self._answer(envelope, parameters)
        except Exception as error:  # noqa: BLE001 - only a code may leave
            return EvaluationReply(self._attester.member_id, answer_code(error))
        return EvaluationReply(self._attester.member_id, "ok", signed)

    @guarded
    def _answer(self, envelope: Envelope, parameters: Sequence[np.ndarray]) -> Envelope:
        manifest = self._manifest
        if self._dataset is None or manifest is None:
            raise ProtocolError("evaluation_unknown", "the run has no sealed evaluation split, or has not begun")
        order = open_order(
            envelope,
            orchestrator_key=manifest.orchestrator_key,
            run_id=manifest.run_id,
            manifest_digest=manifest.digest(),
            virtual_workers=manifest.computation.mechanism.virtual_workers,
        )
        own = order.member(self._attester.member_id)
        self._attester.require_own(own)
        tensors = manifest.computation.tensors
        flat = own_copy(parameters)
        if parameter_digest(tensors, tensor_digests(flat, tensors)) != order.parameter_digest:
            raise ProtocolError("parameters_mismatch", "the order is for other parameters than those that came with it")
        self._scorer.load(flat)
        body = EvaluationAnswer(
            member_id=own.member_id,
            order=order.digest(),
            scores=tuple(self._score(self._dataset, v) for v in own.virtual_workers),
        )
        return seal(body, self._attester.identity)

    def _score(self, dataset: SealedDataset, v: int) -> SliceScore:
        ids = slice_ids(v, dataset.header.virtual_workers, len(dataset))
        return SliceScore(virtual_worker=v, total=_FLOAT.pack(self._scorer.total(dataset, ids)), count=len(ids))


def open_answer(envelope: Envelope, order_digest: bytes, member: Member, counts: Mapping[int, int]) -> dict[int, float]:
    """Verify a worker's answer; returns the sum of scores of each of its slices.

    Guarantee: returns only what the holder of ``member``'s identity key signed in answer to that order, with exactly
    the slices that it gives to ``member``, each with all its examples.

    Args:
        counts: number of examples of each slice.

    Raises:
        ProtocolError: ``signature``, ``malformed`` or ``answer_mismatch``.
    """
    answer = open_envelope(EvaluationAnswer, envelope, member.identity_key)
    expected = [(v, counts[v]) for v in member.virtual_workers]
    stated = [(score.virtual_worker, score.count) for score in answer.scores]
    if (answer.member_id, answer.order, stated) != (member.member_id, order_digest, expected):
        raise ProtocolError("answer_mismatch", f"{member.member_id} answered another order, or other slices")
    return {score.virtual_worker: score.value for score in answer.scores}
