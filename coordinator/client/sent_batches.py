"""Examples that a data owner's client sends: checked here, then encrypted for attested workers, in their steps' order.

The keys are the owner's own: they derive from the secret of the owner's key service, which gives its half only to
workers that the owner's policy accepts. They derive from the run's manifest too. So the owner reads the terms in the
manifest first, and a run under other terms opens nothing.
"""

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from numpy.typing import NDArray

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.halves import ServiceContract, check_contract, sent_key
from raycloak.attestation.keys.release import RunKeys, commitments_digest
from raycloak.attestation.keys.run_secret import load_secret, run_id_of
from raycloak.attestation.policy.policy import Policy, load_policy
from raycloak.attestation.sealed.sent_batch import HASH_BYTES, SentHead, fresh_salt, seal_sent
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.config.sections import DatasetConfig
from raycloak.metrics.errors import ConfigError, EvidenceError, ProtocolError
from raycloak.metrics.file_errors import file_error
from raycloak.metrics.service_errors import ServiceValidationError
from raycloak.workers.terms.manifest import Manifest

IGNORED_LABEL: Final = -100
"""The label of a token that no loss counts."""

PADDING: Final = -1
"""The id of a token whose attention mask is 0, as Hugging Face models are given it here; others do not know it."""

_FIELDS: Final = ("example_ids", "features", "input_ids", "attention_mask", "labels")

_PIECE_BYTES = 15 * 2**16
"""Of ciphertext in one message; a service takes messages of a megabyte. It asks for a piece when it has the last, so
that each costs a round trip: longer ones travel faster."""
_VOID = ("failed", "cancelled")

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class DataTerms:
    """The terms under which an owner sends data to a run.

    Attributes:
        account: that must pay.
        ledger_key: raw Ed25519 key of the ledger that must charge it.
        least_noise_multiplier: the smallest noise multiplier of a step; above 0.
        most_participations: the largest k: most steps of the run that one example takes part in.
    """

    account: str
    ledger_key: bytes
    least_noise_multiplier: float
    most_participations: int

    def __post_init__(self) -> None:
        if not (self.least_noise_multiplier > 0 and math.isfinite(self.least_noise_multiplier)):
            raise ConfigError("data_terms", "least_noise_multiplier must be above 0.", "Data is sent for noised steps.")
        if self.most_participations < 1 or not self.account or len(self.ledger_key) != 32:
            message = "data terms need an account, a ledger key of 32 bytes, and at least one participation."
            remedy = "raycloak budget show lists the accounts of a ledger, raycloak budget key its key."
            raise ConfigError("data_terms", message, remedy)


class DataKeys:
    """The keys of a data owner, for every run that names the owner's key service.

    Args:
        secret: file with the secret of the owner's key service, mode 0600.
        contract: file with the contract that ``raycloak attest serve`` wrote.
        policy: the evidence policy that a worker must meet: a file, or the policy itself.
        terms: what a run must state.

    Raises:
        ConfigError: ``run_secret``, ``key_service`` or ``policy`` if a file cannot be read.
        EvidenceError: ``owner_contract`` if the contract is not of this secret, ``owner_policy`` if the key service
            serves workers by another policy.
    """

    def __init__(self, secret: str | Path, contract: str | Path, policy: str | Path | Policy, terms: DataTerms) -> None:
        self._secret = load_secret(Path(secret))
        try:
            self.contract = parse(ServiceContract, Path(contract).read_bytes().strip())
        except OSError as error:
            raise file_error("key_service", "read", Path(contract), error) from None
        except ProtocolError:
            message = f"{contract} is not the contract of a key service."
            raise ConfigError("key_service", message, "raycloak attest serve writes it.") from None
        self.terms = terms
        accepted = policy if isinstance(policy, Policy) else load_policy(Path(policy))
        if self.contract.policy_digest != accepted.digest():
            message = "the key service of the contract gives its keys to workers by another policy than yours."
            remedy = "Serve it by your policy: raycloak attest serve, with policy in its file."
            raise EvidenceError("owner_policy", message, remedy)
        # The first epoch shows it: the keys of every epoch come from one secret.
        if not self._committed(0):
            message = "the contract was made from another secret."
            remedy = "Name the run_secret of the key service's file, and the contract that it wrote."
            raise EvidenceError("owner_contract", message, remedy)

    def key_service(self, address: str) -> dict[str, str]:
        """Return the field ``key_service`` of a configuration that trains on what this owner sends.

        Args:
            address: ``host:port`` of the key service, as the workers reach it.
        """
        return {"address": address, "contract": self.contract.encode().decode()}

    def accept(self, manifest: str | bytes, dataset: DatasetConfig) -> "SentRun":
        """Check a run's terms, and return what seals batches for it.

        Guarantee: returns only for a run whose workers this owner's key service must accept by this owner's policy.
        Every step has at least the noise of `terms`, as its shares add up to it, all of them at most. It is charged to
        the account by the ledger of `terms`, for at most the participations in `terms`. What the result seals opens in
        no run of another manifest.

        Args:
            manifest: the run's, as JSON; `Client.manifest_json` of the service has it. Its origin need not be trusted.
            dataset: the form of the examples, as the run was configured.

        Raises:
            EvidenceError: ``run_manifest`` if it is none, ``key_service_mismatch`` if it names another key service, or
                ``data_terms`` with the term that differs.
        """
        try:
            stated = parse(Manifest, canonical_json(json.loads(manifest)))
        except (ValueError, ProtocolError) as error:
            if isinstance(error, ProtocolError) and error.code == "mechanism_bounds":
                raise _terms_refused(f"states what no proof covers: {error.message.removesuffix('.')}") from None
            raise EvidenceError(
                "run_manifest", "the service gave no manifest of a run.", "Wait until the client is READY."
            ) from None
        if stated.key_service != self.contract:
            message = "the run's manifest names another key service than yours."
            remedy = "Create the client with the contract of your own key service."
            raise EvidenceError("key_service_mismatch", message, remedy)
        check_contract(
            self.contract,
            run_id=stated.run_id,
            orchestrator_key=stated.orchestrator_key,
            policy_digest=stated.policy_digest,
            virtual_workers=stated.computation.mechanism.virtual_workers,
            epochs=len(stated.key_commitments),
        )
        self._require_terms(stated, dataset)
        return SentRun(stated, SentExamples(dataset), self._secret, self.contract)

    def _require_terms(self, manifest: Manifest, dataset: DatasetConfig) -> None:
        terms, mechanism = self.terms, manifest.computation.mechanism
        participations = mechanism.max_participations
        differing = {
            f"charges the account '{manifest.account}', not '{terms.account}'": manifest.account != terms.account,
            "charges another ledger than yours": manifest.ledger_key != terms.ledger_key,
            "bounds no participations, so it is not for sent data": participations is None,
            f"lets an example take part in {participations} steps, where {terms.most_participations} are the most": (
                participations is not None and participations > terms.most_participations
            ),
            "releases more than noised steps": len(manifest.computation.mechanisms) != 1,
            # Turned around, so that a number that is none is refused.
            f"has a noise multiplier of {mechanism.noise_multiplier:g}, where {terms.least_noise_multiplier:g} is the "
            "least": not (mechanism.private and mechanism.noise_multiplier >= terms.least_noise_multiplier),
            f"takes {mechanism.num_examples} examples in a step, and the configuration says "
            f"{dataset.max_examples_per_step}": mechanism.num_examples != dataset.max_examples_per_step,
        }
        for what, differs in differing.items():
            if differs:
                raise _terms_refused(what)

    def _committed(self, epoch: int) -> bool:
        contract = self.contract
        keys = RunKeys(self._secret, contract.run_id)
        commitments = keys.commitments(contract.key_context, contract.virtual_workers, epoch)
        committed = contract.key_commitments[epoch : epoch + 1]
        return contract.run_id == run_id_of(self._secret) and committed == (commitments_digest(commitments),)


@dataclass(frozen=True, slots=True)
class SealedBatch:
    """A batch as it travels.

    Attributes:
        examples: number of examples.
        example_hashes: 16 bytes each, in order: an HMAC of each id under a key of the owner's.
        sha256: of ``content``.
        content: encrypted; see `raycloak.attestation.sealed.sent_batch`.
    """

    examples: int
    example_hashes: bytes
    sha256: bytes
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class SentRun:
    """A run whose terms the owner has accepted.

    Attributes:
        examples: checks what is to be sent.
    """

    manifest: Manifest
    examples: "SentExamples"
    _secret: Secret
    _contract: ServiceContract

    def seal_batch(
        self, batch: Mapping[str, Any], *, client_id: str, step: int, number: int = 0, first: int = 0
    ) -> SealedBatch:
        """Check a batch, and encrypt it for one step.

        Args:
            batch: ``example_ids``, n texts or integers; ``features`` and ``labels``, arrays of n rows. Instead of
                features that are ids, ``input_ids`` and perhaps ``attention_mask``, as a tokenizer gives them.
            client_id: the training client's.
            step: the step that it is for: the number of `optim_step` calls before it.
            number: batches that were sealed for the step before.
            first: examples in them.

        Raises:
            ServiceValidationError: ``field`` names the wrong part; nothing was encrypted.
        """
        ids, rows = self.examples.encode(batch)
        computation = self.manifest.computation
        if not 0 <= step < computation.mechanism.steps:
            raise _wrong("step", f"the run has {computation.mechanism.steps} steps, and this would be another.")
        if first + len(ids) > computation.mechanism.num_examples:
            raise _wrong(
                "batch.example_ids",
                f"the step would have {first + len(ids)} examples, where {computation.mechanism.num_examples} are the "
                "most.",
            )
        head = SentHead(
            run_id=self.manifest.run_id,
            manifest_digest=self.manifest.digest(),
            client_id=client_id,
            step=step,
            epoch=computation.epoch_of("gradient", step),
            number=number,
            first=first,
            virtual_workers=computation.mechanism.virtual_workers,
            row_bytes=self.examples.row_bytes,
            hashes=b"".join(self.hash_of(each) for each in ids),
            salt=fresh_salt(),
        )
        content = seal_sent(head, rows, lambda v: self._key(v, head.epoch))
        return SealedBatch(len(ids), head.hashes, hashlib.sha256(content).digest(), content)

    def hash_of(self, example_id: str | int) -> bytes:
        """Return the 16 bytes by which the service counts an example: an HMAC-SHA-256 of its id, cut.

        Guarantee: only the owner can tell which example it is, or that two runs have an example in common.
        """
        key = derive(self._secret, Purpose.SENT_IDS, self.manifest.run_id, self.manifest.key_context)
        mac = HMAC(key.reveal(), SHA256())
        mac.update(str(example_id).encode())
        return mac.finalize()[:HASH_BYTES]

    def _key(self, v: int, epoch: int) -> Secret:
        contract, manifest = self._contract, self.manifest
        half = RunKeys(self._secret, contract.run_id).of(contract.key_context, v, epoch)
        return sent_key(half, run_id=manifest.run_id, key_context=manifest.key_context, v=v, epoch=epoch)


class SentExamples:
    """The form of the examples of one run: checks a batch, and encodes its rows.

    Args:
        dataset: of kind ``sent``.
    """

    def __init__(self, dataset: DatasetConfig) -> None:
        assert dataset.kind == "sent", "only such data is sent"
        assert dataset.shape is not None, "examples to be sent have a shape"
        self._dataset = dataset
        self._shape = tuple(dataset.shape)
        self._of_ids = dataset.vocabulary is not None
        self._of_numbers = dataset.label_kind == "number"
        self._label_shape = self._shape if dataset.label_kind == "token" else ()

    @property
    def row_bytes(self) -> int:
        """The size of an encoded example."""
        sizes = (self._shape, 8 if self._of_ids else 4), (self._label_shape, 4 if self._of_numbers else 8)
        return sum(math.prod(shape) * size for shape, size in sizes)

    def encode(self, batch: Mapping[str, Any]) -> tuple[Sequence[str | int], list[bytes]]:
        """Return the ids of a batch, and its encoded rows.

        Raises:
            ServiceValidationError: ``field`` is ``batch``, or ``batch.`` and the part of it that is wrong.
        """
        if not isinstance(batch, Mapping):
            raise _wrong("batch", "a batch is a mapping with example_ids, features and labels.")
        for name in batch:
            if name not in _FIELDS:
                raise _wrong(f"batch.{name}", f"a batch has no such part; its parts are {', '.join(_FIELDS)}.")
        ids = _example_ids(batch)
        features = self._features(batch, len(ids))
        labels = self._labels(batch, len(ids))
        return ids, [one.tobytes() + label.tobytes() for one, label in zip(features, labels, strict=True)]

    def _features(self, batch: Mapping[str, Any], count: int) -> Array:
        name = "input_ids" if self._of_ids and "input_ids" in batch else "features"
        if "features" in batch and "input_ids" in batch:
            raise _wrong("batch.input_ids", "a batch has features or input_ids, not both.")
        found = _array(batch, name, (count, *self._shape), integers=self._of_ids)
        if not self._of_ids:
            if "attention_mask" in batch:
                raise _wrong("batch.attention_mask", "only features that are ids have an attention mask.")
            return _float32(found, name)
        assert self._dataset.vocabulary is not None, "ids have a vocabulary"
        mask: Array = np.ones_like(found)
        if "attention_mask" in batch:
            mask = _array(batch, "attention_mask", found.shape, integers=True)
        if not _below(found[(mask != 0) & (found != PADDING)], self._dataset.vocabulary):
            raise _wrong(f"batch.{name}", f"an id is outside of the vocabulary, 0 to {self._dataset.vocabulary - 1}.")
        return np.where(mask != 0, found, PADDING).astype("<i8")

    def _labels(self, batch: Mapping[str, Any], count: int) -> Array:
        found = _array(batch, "labels", (count, *self._label_shape), integers=not self._of_numbers)
        if self._of_numbers:
            return _float32(found, "labels")
        classes = self._dataset.classes
        most = classes if isinstance(classes, int) else self._dataset.vocabulary
        assert most is not None, "labels that are integers have a bound"
        counted = found[found != IGNORED_LABEL] if self._label_shape else found
        if not _below(counted, most):
            raise _wrong("batch.labels", f"a label is out of range, 0 to {most - 1}.")
        return found.astype("<i8")


def _example_ids(batch: Mapping[str, Any]) -> Sequence[str | int]:
    given = batch.get("example_ids")
    if given is None:
        raise _wrong("batch.example_ids", "every example needs an id, by which its uses are counted.")
    ids = given.tolist() if isinstance(given, np.ndarray) else given
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not ids:
        raise _wrong("batch.example_ids", "example_ids is a list with one id for each example, and not an empty one.")
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, str | int) or each == "":
            raise _wrong("batch.example_ids", "an id is a text or an integer.")
    # As text, because a service counts "7" and 7 as one example.
    if len({str(each) for each in ids}) != len(ids):
        raise _wrong("batch.example_ids", "an example is in the batch twice.")
    return ids


def _array(batch: Mapping[str, Any], name: str, shape: tuple[int, ...], *, integers: bool) -> Array:
    if name not in batch:
        raise _wrong(f"batch.{name}", f"the batch has no {name}.")
    try:
        # Tensors of torch that are on the CPU become arrays too.
        found = np.asarray(batch[name])
    except (TypeError, ValueError, RuntimeError):
        raise _wrong(f"batch.{name}", f"{name} is no array of one shape.") from None
    kinds, needed = ("iu", "integers") if integers else ("iuf", "numbers")
    if found.dtype.kind not in kinds:
        raise _wrong(f"batch.{name}", f"{name} has dtype {found.dtype}, and needs {needed}.")
    if found.shape != shape:
        raise _wrong(f"batch.{name}", f"{name} has shape {list(found.shape)}, and needs {list(shape)}.")
    return found


def _float32(values: Array, name: str) -> Array:
    with np.errstate(all="ignore"):
        found = values.astype("<f4")
    if not np.isfinite(found).all():
        raise _wrong(f"batch.{name}", f"{name} has a value that is not finite in float32.")
    return found


def _below(values: Array, most: int) -> bool:
    return bool(((values >= 0) & (values < most)).all())


def _wrong(name: str, message: str) -> ServiceValidationError:
    return ServiceValidationError("batch", message, "Nothing was sent. Correct the batch.", field=name)


def _terms_refused(what: str) -> EvidenceError:
    return EvidenceError(
        "data_terms", f"the run {what}.", "Nothing was encrypted. Agree on the terms with who runs it."
    )


class SentSteps:
    """The operations that a client's service has taken, as far as they make steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, bool] = {}  # of optim_step, by number: whether it counts
        self._batches: dict[int, int] = {}  # of forward_backward, by number: its examples

    def learn(self, operation: wire.Operation) -> None:
        """Take an operation in, or its newest state."""
        with self._lock:
            if operation.kind == "optim_step":
                self._steps[operation.number] = operation.state not in _VOID
            elif operation.kind == "forward_backward" and operation.state == "done":
                self._batches[operation.number] = operation.forward_backward.examples_sent

    def next(self) -> tuple[int, int, int]:
        """Return the step of the next batch, and how many batches and examples that step has already."""
        with self._lock:
            counted = [number for number, counts in self._steps.items() if counts]
            last = max(counted, default=-1)
            of_step = [examples for number, examples in self._batches.items() if number > last]
            return len(counted), len(of_step), sum(of_step)


def pieces(client_id: str, key: str, sealed: SealedBatch) -> Iterator[wire.BatchPiece]:
    """Yield the messages in which a sealed batch travels."""
    yield wire.BatchPiece(
        head=wire.BatchHead(
            client_id=client_id,
            idempotency_key=key,
            examples=sealed.examples,
            example_hashes=sealed.example_hashes,
            bytes=len(sealed.content),
            sha256=sealed.sha256,
        )
    )
    for start in range(0, len(sealed.content), _PIECE_BYTES):
        yield wire.BatchPiece(data=sealed.content[start : start + _PIECE_BYTES])
