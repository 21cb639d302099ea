"""The limits of the training service: of one client, of one tenant, and of all together.

Guarantee: queues, messages, streams and batches that a tenant can fill have a size, and every wait that it can cause
has an end. All operations of a client that was not closed stay in the store, since its caller may come back for them;
of closed clients the newest stay. The ledger, the evidence log and the directories of runs keep what they have.
"""

from typing import Final

from pydantic import Field

from raycloak.coordinator.config.section import Section

HANDSHAKE_MS: Final = 30_000
METADATA_BYTES: Final = 16_384
"""Of the headers of one call: a token, a version and a request id, and what proxies add."""

CALLS_OF_CONNECTION: Final = 256
"""Calls of one connection at once, beside its streams of changes. A caller needs a few; a stranger could hold millions
open, of health or of calls whose request never comes, before it is asked for credentials."""

ANSWERS_AT_ONCE: Final = 64
"""Of one tenant; more calls wait until its callers have read. An answer may have megabytes, which the service holds for
a caller that asks and does not read."""
LISTS_AT_ONCE: Final = 4
"""Of one tenant, in the same way: a list of clients may have twenty megabytes."""


class LimitsConfig(Section):
    """The bounds of the service.

    Attributes:
        active_clients: clients that train at once; each has a driver process and its run's actors.
        idle_seconds: a client without work gives its place up after so long, when another waits for one.
        turn_seconds: a client with work gives its place up after so long, and a step, when another waits for one. Its
            run is resumed when it gets a place again.
        clients_per_tenant: clients of one tenant that were not closed.
        closed_clients_per_tenant: closed clients of one tenant that are remembered, with their operations and
            artifacts; of more, those that were closed first are forgotten.
        queued_operations: operations of one client that are not finished.
        calls_per_second, burst: of one tenant; more calls are refused with the time to wait.
        request_bytes: of one message.
        batch_bytes: of the ciphertext of one ``forward_backward(batch)``.
        stored_batch_bytes: of all batches that one tenant's clients have sent; they stay for replay. Those of a closed
            client count until the operator has deleted them from its run's directory and started the service again.
        sends_per_tenant: batches of one tenant that arrive at once.
        watches_per_tenant: streams of changes that one tenant may have open.
        stall_seconds: a stream whose reader takes nothing for so long is cut, and an upload that sends nothing.
        waiting_calls: calls that wait for the store; more are refused.
        connections: at once; more are turned away.
    """

    active_clients: int = Field(default=4, gt=0, le=4096)
    idle_seconds: float = Field(default=60.0, ge=0)
    turn_seconds: float = Field(default=900.0, gt=0)
    clients_per_tenant: int = Field(default=64, gt=0, le=2**20)
    closed_clients_per_tenant: int = Field(default=256, ge=0, le=2**20)
    queued_operations: int = Field(default=1024, gt=0, le=2**20)
    calls_per_second: float = Field(default=1000.0, gt=0)
    burst: int = Field(default=2000, gt=0)
    request_bytes: int = Field(default=2**20, ge=4096, lt=2**30)
    batch_bytes: int = Field(default=256 * 2**20, gt=0, lt=2**40)
    stored_batch_bytes: int = Field(default=64 * 2**30, gt=0, lt=2**50)
    sends_per_tenant: int = Field(default=4, gt=0, le=1024)
    watches_per_tenant: int = Field(default=256, gt=0, le=2**16)
    stall_seconds: float = Field(default=30.0, gt=0, le=3600)
    waiting_calls: int = Field(default=4096, gt=0, le=2**16)
    connections: int = Field(default=1024, gt=0, lt=2**20)

    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """Return the limits that gRPC enforces, as options of its server."""
        return (
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", self.watches_per_tenant + CALLS_OF_CONNECTION),
            ("grpc.max_receive_message_length", self.request_bytes),
            ("grpc.max_metadata_size", METADATA_BYTES),
            # A dead peer is noticed, so that its streams end.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
            # With reuse, a second service could take the same port, and a part of the calls.
            ("grpc.so_reuseport", 0),
        )


class Slots:
    """The number of streams that each tenant has open. For one thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: dict[str, int] = {}

    def take(self, tenant: str) -> bool:
        """Take a slot; False if the tenant has them all."""
        taken = self._taken.get(tenant, 0)
        if taken >= self._most:
            return False
        self._taken[tenant] = taken + 1
        return True

    def leave(self, tenant: str) -> None:
        """Give a slot back."""
        self._taken[tenant] -= 1
