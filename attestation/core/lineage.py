"""The lineage of a run's models: each is the initial one, or what attested aggregators signed that they made of it.

    aggregator     StepRelease, signed: roster, binding, the model before -> the model after, for its range
    driver         carries a SignedStep: the roster, and the release of each range
    orchestrator   opens it before a commit; signs a ModelStanding where a run goes on from a package
    ledger         opens one of both before the next charge

So whoever carries models between two steps cannot pass off another one.

Assumes: an aggregator signs only what it computed itself. Its evidence stands for that.
"""

from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple, NoReturn, Self

from pydantic import Field

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Envelope, Message, open_envelope
from raycloak.attestation.core.roster import Query, Roster
from raycloak.metrics.errors import ProtocolError


class Lineage(Message):
    """The terms by which the models of a run follow from one another; the ledger records them.

    Attributes:
        orchestrator_key: raw Ed25519 key; the rosters that it signs name the aggregators.
        initial_parameters: model digest that the first step starts from.
    """

    DOMAIN: ClassVar[str] = "raycloak/lineage/v1"

    orchestrator_key: bytes
    initial_parameters: bytes


class TensorDigests(Message):
    """One trainable tensor, and what an update rule keeps for it.

    Attributes:
        content: SHA-256 of its values.
        state: digest of the rule's arrays for it, the average included; empty without any.
        averaged: SHA-256 of its averaged values; empty, and left out of the bytes, where none are kept.
        solved: SHA-256 of its part of each release that the next one is solved by, the newest first; left out of the
            bytes where there are none. See docs/proofs/013-correlated-noise.md.
    """

    DOMAIN: ClassVar[str] = "raycloak/tensor-digests/v1"

    name: str
    shape: tuple[int, ...]
    content: bytes
    state: bytes = b""
    averaged: bytes = Field(default=b"", exclude_if=lambda averaged: not averaged)
    solved: tuple[bytes, ...] = Field(default=(), exclude_if=lambda solved: not solved)


def parameters_digest(tensors: Sequence[TensorDigests]) -> bytes:
    """Return a SHA-256 over the name, dtype, shape and content digest of each tensor, in order.

    A shape is written like ``32,10``; a scalar's is empty text.
    """
    # A length-prefixed list: no name can run into the shape or the digest behind it.
    fields: list[bytes | str] = []
    for tensor in tensors:
        fields += (tensor.name, "float32", ",".join(map(str, tensor.shape)), tensor.content)
    return digest(length_prefixed("raycloak/parameters/v1", *fields))


class ModelPoint(Message):
    """A model between two steps.

    Attributes:
        parameters: model digest; of a measurement, the digest of its values.
        state: digest of all that the update rule keeps, averaged weights included, and of the releases that the next
            one is solved by.
        averaged: model digest of the averaged weights; empty, and left out of the bytes, where none are kept.
    """

    DOMAIN: ClassVar[str] = "raycloak/model-point/v1"

    parameters: bytes
    state: bytes
    averaged: bytes = Field(default=b"", exclude_if=lambda averaged: not averaged)

    @property
    def exported(self) -> bytes:
        """The model digest of the weights that are evaluated, measured and exported."""
        return self.averaged or self.parameters

    @property
    def digests(self) -> tuple[bytes, bytes]:
        """The model digests of the weights and of their average."""
        return self.parameters, self.averaged

    @classmethod
    def of(cls, tensors: Sequence[TensorDigests]) -> Self:
        """Return the point of a model, or of a range of one, by its tensors in order."""
        # A tensor without state has no part in it, so the state before the first step is the same for every model.
        kept: list[bytes | str] = []
        for tensor in tensors:
            if tensor.solved:
                kept += (tensor.name, digest(length_prefixed("raycloak/solved/v1", tensor.state, *tensor.solved)))
            elif tensor.state:
                kept += (tensor.name, tensor.state)
        averages = [each.model_copy(update={"content": each.averaged}) for each in tensors if each.averaged]
        averaged = parameters_digest(averages) if averages else b""
        return cls(parameters=parameters_digest(tensors), state=_state_digest(kept), averaged=averaged)

    @classmethod
    def initial(cls, parameters: bytes) -> Self:
        """Return the point before the first step, at which an update rule keeps nothing."""
        return cls(parameters=parameters, state=_state_digest(()))

    @classmethod
    def of_values(cls, values: bytes) -> Self:
        """Return the point of a measurement, which has no state."""
        return cls(parameters=values, state=b"")


def _state_digest(kept: Sequence[bytes | str]) -> bytes:
    return digest(length_prefixed("raycloak/update-state/v1", *kept))


class StepRelease(Message):
    """An aggregator's statement of the model that it made of one attempt, signed with the key that its evidence binds.

    Attributes:
        roster_digest: of the attempt, and so of run, manifest, query, step and members.
        binding: hash of the ledger's entry that bound the vectors; it covers the charge before it.
        input_digest: what the step was charged for: the model before, and the batches that a client sent.
        before: the whole model that it started from.
        after: the aggregator's range of the model that it made, or the values that it released.
    """

    DOMAIN: ClassVar[str] = "raycloak/step-release/v1"

    roster_digest: bytes
    binding: bytes
    input_digest: bytes
    before: ModelPoint
    after: ModelPoint


class RangeRelease(Message):
    """An aggregator's signed `StepRelease`, and the tensors of its range afterwards; none of a measurement."""

    DOMAIN: ClassVar[str] = "raycloak/range-release/v1"

    release: Envelope
    tensors: tuple[TensorDigests, ...] = ()


class SignedStep(Message):
    """A step as its aggregators signed it: the orchestrator's roster, and each range in order."""

    DOMAIN: ClassVar[str] = "raycloak/signed-step/v1"

    roster: Envelope
    ranges: tuple[RangeRelease, ...]


class ModelStanding(Message):
    """The orchestrator's statement about the model after ``finished_steps``, by its commit or the last load there."""

    DOMAIN: ClassVar[str] = "raycloak/model-standing/v1"

    run_id: str
    manifest_digest: bytes
    finished_steps: int
    model: ModelPoint


class ModelOrigin(Message):
    """Evidence of where a step's model comes from; empty for the initial one.

    Attributes:
        released: the step before.
        standing: a signed `ModelStanding`, where the run goes on from a package.
    """

    DOMAIN: ClassVar[str] = "raycloak/model-origin/v1"

    released: SignedStep | None = None
    standing: Envelope | None = None


INITIAL: Final = ModelOrigin()


class OpenedRelease(NamedTuple):
    """A verified `SignedStep`: the fields of `StepRelease`, with the whole model ``after``."""

    query: Query
    step: int
    binding: bytes
    input_digest: bytes
    before: ModelPoint
    after: ModelPoint


def open_release(
    released: SignedStep, *, orchestrator_key: bytes, run_id: str, manifest_digest: bytes
) -> OpenedRelease:
    """Verify a step that was released.

    Guarantee: returns only if each aggregator of a roster of this run signed its range of ``after``, all of the same
    attempt, binding and model before.

    Raises:
        ProtocolError: ``release_mismatch``, ``malformed`` or ``signature``.
    """
    roster = open_envelope(Roster, released.roster, orchestrator_key)
    if (roster.run_id, roster.manifest_digest) != (run_id, manifest_digest):
        _refuse("its roster is of another run or manifest")
    keys = [owner.identity_key for owner in roster.aggregators]
    parts = open_parts([part.release for part in released.ranges], keys, roster.digest())
    after = parts[0].after
    if roster.query == "gradient":
        for part, release in zip(released.ranges, parts, strict=True):
            if ModelPoint.of(part.tensors) != release.after:
                _refuse("the tensors of a range are not those that its aggregator signed")
        after = ModelPoint.of([tensor for part in released.ranges for tensor in part.tensors])
    first = parts[0]
    return OpenedRelease(roster.query, roster.step, first.binding, first.input_digest, first.before, after)


def open_parts(releases: Sequence[Envelope], keys: Sequence[bytes], roster_digest: bytes) -> tuple[StepRelease, ...]:
    """Verify the releases of all ranges of one attempt, each by the identity key of its aggregator.

    Raises:
        ProtocolError: ``release_mismatch`` if one is missing or of another attempt, or if they do not start from the
            same; ``malformed`` or ``signature``.
    """
    if not keys or len(releases) != len(keys):
        _refuse(f"it has {len(releases)} ranges, and its roster {len(keys)} aggregators")
    parts = tuple(open_envelope(StepRelease, each, key) for each, key in zip(releases, keys, strict=True))
    if any(part.roster_digest != roster_digest for part in parts):
        _refuse("a range was released in another attempt than its roster's")
    if any(_start(part) != _start(parts[0]) for part in parts):
        _refuse("its ranges do not start from one model and one binding")
    return parts


def _start(release: StepRelease) -> tuple[bytes, bytes, ModelPoint]:
    return release.binding, release.input_digest, release.before


def _refuse(why: str) -> NoReturn:
    raise ProtocolError("release_mismatch", f"the release of a step cannot be accepted: {why}.")
