"""The limits of the training service: of one client, of one tenant, and of all together.

Guarantee: queues, messages, streams and batches that a tenant can fill have a size, and every wait that it can cause
has an end. The ledger, the evidence log and the directories of runs keep what they have.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from pydantic import Field

from raycloak.attestation.service.connections import WINDOW_BYTES, ConnectionBounds
from raycloak.coordinator.config.section import Section
from raycloak.coordinator.service.sampling.requests import MOST_RESULT_BYTES
from raycloak.metrics.service_errors import ServiceError

CALLS_OF_CONNECTION: Final = 32
"""At once, beside a stream of changes for each client that a tenant may have, which may all be in one program."""
CALLS_OF_TENANT: Final = 256
"""At once, beside its streams; of each the service has a window of the request."""
STRANGER_S: Final = 6.0
"""For which a connection lasts without credentials. A handshake takes milliseconds, and its first call is sent with
it."""
IDLE_S: Final = 300.0
"""Connecting again costs a client milliseconds."""
ANSWER_BYTES: Final = MOST_RESULT_BYTES + 2**21
"""Of one answer: an operation has the texts of a sample at most; a client its configuration and its manifest."""
LIST_BYTES: Final = 24 * 2**20
"""Of a list: 1,000 clients or artifacts, with 20 KB of notes each."""
WATCH_BYTES: Final = 256 * 2**10
"""Of what waits for one watcher or is written, beside pages: see `raycloak.coordinator.service.watches`."""
PAGE_BYTES: Final = ANSWER_BYTES
"""Of what one watcher is written at once, from the store."""
SEND_BYTES: Final = 2**20
"""Of one upload, collected before a thread writes them, so that small pieces cost little."""
PULL_BYTES: Final = 2**20
"""Of one download: pieces of 256 KiB, one that is read, one on its way."""


class LimitsConfig(Section):
    """The bounds of the service.

    Attributes:
        active_clients: clients that train at once; each has a driver process and its run's actors.
        idle_seconds: a client without work gives its place up after so long, when another waits for one.
        turn_seconds: a client with work gives its place up after so long, and a step, when another waits for one. Its
            run is resumed when it gets a place again.
        leave_seconds: a client that is to give its place up may take so long to end its step, when another waits for
            one. Its driver is ended then. The step is repeated when it has a place again, and not charged again; if it
            never ends in time, the client fails (``step_too_long``).
        clients_per_tenant: clients of one tenant that were not closed.
        closed_clients_per_tenant: closed clients of one tenant that are remembered, with their operations and
            artifacts; of more, those that were closed first are forgotten.
        queued_operations, queued_bytes: operations of one client that are not finished, and their requests.
        operations_per_client: that one client may ever submit; they stay until it is forgotten.
        artifacts_per_client: that one client may save; each is a model on the operator's storage.
        sampled_bytes: of the texts that one client's samples have written; they stay until it is forgotten.
        calls_per_second, burst: of one tenant; more calls are refused with the time to wait.
        request_bytes: of one message.
        batch_bytes: of the ciphertext of one ``forward_backward(batch)``.
        stored_batch_bytes: of all batches that one tenant's clients have sent; they stay for replay. Those of a closed
            client count until the operator has deleted them from its run's directory and started the service again.
        sends_per_tenant, pulls_per_tenant: batches of one tenant that arrive at once, and artifacts that leave.
        watches_per_tenant: streams of changes that one tenant may have open.
        tenant_bytes: of one tenant's requests that are read, and of answers that were not; more calls wait.
        stall_seconds: a stream whose reader takes nothing for so long is cut, and an upload that sends nothing.
        waiting_calls: calls that wait for the store; more are refused.
        connections: at once; more are turned away.
        connections_per_address: of one network address, once half of ``connections`` are taken.
        memory_bytes: that calls may take; half of what the process may have if absent. The service refuses to start if
            its limits allow more.
    """

    active_clients: int = Field(default=4, gt=0, le=4096)
    idle_seconds: float = Field(default=60.0, ge=0)
    turn_seconds: float = Field(default=900.0, gt=0)
    leave_seconds: float = Field(default=600.0, gt=0)
    clients_per_tenant: int = Field(default=64, gt=0, le=2**20)
    closed_clients_per_tenant: int = Field(default=256, ge=0, le=2**20)
    queued_operations: int = Field(default=1024, gt=0, le=2**20)
    queued_bytes: int = Field(default=16 * 2**20, gt=0, lt=2**40)
    operations_per_client: int = Field(default=2**18, gt=0, le=2**31)
    artifacts_per_client: int = Field(default=256, gt=0, le=1000)  # a list has no more: see `desk.MOST_LISTED`
    sampled_bytes: int = Field(default=256 * 2**20, gt=0, lt=2**40)
    calls_per_second: float = Field(default=1000.0, gt=0)
    burst: int = Field(default=2000, gt=0)
    request_bytes: int = Field(default=2**20, ge=4096, lt=2**30)
    batch_bytes: int = Field(default=256 * 2**20, gt=0, lt=2**40)
    stored_batch_bytes: int = Field(default=64 * 2**30, gt=0, lt=2**50)
    sends_per_tenant: int = Field(default=4, gt=0, le=1024)
    pulls_per_tenant: int = Field(default=16, gt=0, le=1024)
    watches_per_tenant: int = Field(default=256, gt=0, le=2**16)
    tenant_bytes: int = Field(default=48 * 2**20, ge=LIST_BYTES, lt=2**40)
    stall_seconds: float = Field(default=30.0, gt=0, le=3600)
    waiting_calls: int = Field(default=4096, gt=0, le=2**16)
    connections: int = Field(default=1024, gt=0, lt=2**20)
    connections_per_address: int = Field(default=256, gt=0, lt=2**20)
    memory_bytes: int | None = Field(default=None, gt=0, lt=2**50)

    def bounds(self) -> ConnectionBounds:
        """Return the bounds of its connections."""
        return ConnectionBounds(
            connections=self.connections,
            per_address=self.connections_per_address,
            calls=min(self.clients_per_tenant, self.watches_per_tenant) + CALLS_OF_CONNECTION,
            message_bytes=self.request_bytes,
            stranger_s=STRANGER_S,
            idle_s=IDLE_S,
        )

    @property
    def calls_per_tenant(self) -> int:
        """Calls of one tenant at once, its streams included."""
        return CALLS_OF_TENANT + self.watches_per_tenant + self.sends_per_tenant + self.pulls_per_tenant

    def most_bytes(self, tenants: int) -> int:
        """Return the memory that all connections, and all calls of so many tenants, may take together."""
        of_tenant = (
            self.tenant_bytes
            + self.calls_per_tenant * WINDOW_BYTES
            + self.watches_per_tenant * WATCH_BYTES
            + self.sends_per_tenant * (2 * self.request_bytes + SEND_BYTES)
            + self.pulls_per_tenant * PULL_BYTES
        )
        return self.bounds().most_bytes + tenants * of_tenant


class Slots:
    """The number of calls or streams that each tenant has open. For one event loop.

    Args:
        full: makes the refusal of one more than ``most``.
    """

    def __init__(self, most: int, full: Callable[[], ServiceError]) -> None:
        self._most, self._full = most, full
        self._taken: Counter[str] = Counter()

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """Have a slot in the block; the refusal if the tenant has them all."""
        if self._taken[tenant] >= self._most:
            raise self._full()
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
