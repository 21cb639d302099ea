"""A client's channel to an adapter's server: attested keys at both ends, and refusals as our errors."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc
from google.protobuf.message import Message as ProtoMessage

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.service.grpc_status import refusal_in
from raycloak.attestation.trust.channel import client_channel, client_end
from raycloak.metrics.errors import BudgetError, ConfigError, RaycloakError, RefusedError
from raycloak_lab.adapter.adapter_pb2_grpc import AdapterStub
from raycloak_lab.adapter.introduction import introduction_digest

DEADLINE_S: Final = 90.0
"""Bounds one call; the server gives its worker 60 seconds."""
_ANSWER_BYTES: Final = 64 * 2**20
# The kind of a refusal on the wire knows evidence and protocol alone.
_KINDS: Final[dict[str, type[RefusedError]]] = {
    "tokens_spent": BudgetError,
    **dict.fromkeys(("busy", "worker_gone", "adapter_failed"), RefusedError),
}


@dataclass(frozen=True, slots=True)
class AdapterAddress:
    """The address that ``raycloak-lab adapter serve`` prints: ``KEY@host:port``.

    Attributes:
        worker_key: the identity key of the worker, 32 bytes, which its evidence must state.
    """

    worker_key: bytes
    target: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address; ConfigError ``adapter_address``."""
        key, _, target = text.partition("@")
        with suppress(ValueError):
            if len(raw := bytes.fromhex(key)) == 32 and target.rpartition(":")[0]:
                return cls(raw, target)
        raise ConfigError(
            "adapter_address",
            f"'{text}' is no address of an adapter.",
            "Give what 'raycloak-lab adapter serve' prints: 64 hexadecimal digits, @, host:port.",
        )


class AdapterConnection:
    """One channel to an adapter's server.

    Args:
        identity: the client's key, one that the server's settings name.

    Every call raises the server's refusal; without an answer RefusedError ``adapter_unreachable``.
    """

    def __init__(self, address: AdapterAddress, identity: IdentityKey) -> None:
        self._address = address
        end = client_end(identity, introduction_digest(address.worker_key))
        self._channel = client_channel(address.target, end, address.worker_key, _ANSWER_BYTES)
        self._stub: Any = AdapterStub(self._channel)  # type: ignore[no-untyped-call]

    def call(self, method: str, request: ProtoMessage | Iterator[ProtoMessage]) -> Any:
        """Make one call of the service and return its reply; a stream's messages are taken one by one."""
        return self.start(method, request)()

    def start(self, method: str, request: ProtoMessage | Iterator[ProtoMessage]) -> Callable[[], Any]:
        """Start a call; the returned function waits for its reply."""
        future = getattr(self._stub, method).future(request, timeout=DEADLINE_S)

        def reply() -> Any:
            try:
                return future.result()
            except grpc.RpcError as error:
                raise self._refusal(error) from None

        return reply

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _refusal(self, error: grpc.RpcError) -> RaycloakError:
        metadata: Any = ()
        # Some of gRPC's errors carry no status and no metadata.
        status = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
        with suppress(AttributeError):
            metadata = error.trailing_metadata() or ()
        refusal = refusal_in(metadata)
        # gRPC's own refusal, where all of a server's threads have calls: it has no metadata, and nothing was read.
        if refusal is None and status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return RefusedError("busy", "the adapter's server has no room for another call.", "Ask later.")
        if refusal is None:
            return RefusedError(
                "adapter_unreachable",
                f"the adapter's server at {self._address.target} gave no answer ({status.name}).",
                "Check the address and its key, and that the server knows this client's.",
            )
        kind = _KINDS.get(refusal.code)
        return refusal if kind is None else kind(refusal.code, refusal.message, refusal.remedy)
