"""The messages between the sampler and its processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict

from raycloak.attestation.core.messages import Message
from raycloak.coordinator.service.sampling.requests import SampleRequest

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """A completion of a prompt.

    Attributes:
        prompt: number of the prompt in its request, from 0.
        finish_reason: ``stop`` for a stop text or the model's own end, ``length`` for ``max_tokens``.
        tokens: that were generated, the end's own included.
    """

    prompt: int
    text: str
    finish_reason: FinishReason
    tokens: int


class Sample(Message):
    """A request to a process; see `raycloak.coordinator.service.sampling.sampler.SampleSource`."""

    # A request is no message: a whole number that stands for another has one text only after a look at it.
    model_config = ConfigDict(revalidate_instances="always")
    DOMAIN: ClassVar[str] = "raycloak/sampler/sample/v1"
    id: int
    run: Path
    parameters: Path
    model_digest: str
    request: SampleRequest


class Cancel(Message):
    """A request to end the sample of that number before its next token."""

    DOMAIN: ClassVar[str] = "raycloak/sampler/cancel/v1"
    id: int


class Piece(Message):
    """The next piece of the text of a completion, by its place in the result."""

    DOMAIN: ClassVar[str] = "raycloak/sampler/piece/v1"
    completion: int
    text: str


class Rate(Message):
    """The tokens per second by now."""

    DOMAIN: ClassVar[str] = "raycloak/sampler/rate/v1"
    tokens_per_second: float


class SampleDone(Message):
    """The end of a sample with its completions."""

    DOMAIN: ClassVar[str] = "raycloak/sampler/done/v1"
    completions: tuple[SampledCompletion, ...]


class Cancelled(Message):
    """The end of a sample that was cancelled."""

    DOMAIN: ClassVar[str] = "raycloak/sampler/cancelled/v1"


class Unanswered(Message):
    """The end of a sample that cannot be answered; the process serves the next one.

    Attributes:
        field: of the request that is at fault, if one is.
    """

    DOMAIN: ClassVar[str] = "raycloak/sampler/unanswered/v1"
    code: str
    message: str
    remedy: str
    field: str | None
