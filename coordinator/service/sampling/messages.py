"""The messages between the sampler and its processes."""

from pathlib import Path
from typing import ClassVar

from raycloak.attestation.core.messages import Message
from raycloak.coordinator.client.results import Completion


class Sample(Message):
    """A request for text from released weights.

    Attributes:
        id: the operation's.
        run: the run directory, which says which model the weights are of.
        parameters: safetensors file of the trained tensors, as a run directory has it and a package opens to.
        model_digest: of the released weights, in hexadecimal digits; the file must have it.
        request: a `raycloak.coordinator.client.service_pb2.Sample`, serialised.
    """

    DOMAIN: ClassVar[str] = "raycloak/sampler/sample/v2"
    id: str
    run: Path
    parameters: Path
    model_digest: str
    request: bytes


class Cancel(Message):
    """A request to end a sample before its next token."""

    DOMAIN: ClassVar[str] = "raycloak/sampler/cancel/v2"
    id: str


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
    completions: tuple[Completion, ...]


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
