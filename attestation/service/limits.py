"""The limits of the evidence service, for one peer and for all of them together.

Guarantee: every wait that a peer can cause has an end, and everything that a stranger can fill has a size. The evidence
log alone has no size: admissions and releases are always logged, and refusals at a bounded rate
(`raycloak.attestation.orchestrator.refusal_log`).
"""

from collections import Counter
from typing import ClassVar, Final

from pydantic import Field

from raycloak.attestation.appraisal.appraisal import MAX_PRESENTATION_BYTES
from raycloak.attestation.core.messages import Message
from raycloak.attestation.service.connections import WINDOW_BYTES, ConnectionBounds

# All that a member needs is smaller: answers up to this size have room when large ones have none.
SMALL_BYTES: Final = 65_536
SMALL_SHARE: Final = 2
"""Times the limits of unread answers that small answers may fill, those that were counted before included."""


class ServiceLimits(Message):
    """Limits of the evidence service.

    Attributes:
        deadline_s: longest time a call may take, whatever deadline its caller gave.
        stranger_s: after it, a connection is closed on which no call was answered yet: one whose TLS or request never
            ends, or whose calls are all refused.
        idle_s: after it, a connection without a call is closed.
        age_s: after it, any connection is closed; its calls get another ``deadline_s``.
        connections: at once; more are turned away.
        connections_per_address: of one network address, once half of ``connections`` are taken.
        calls_per_connection: at once.
        calls_per_address: calls of one network address that wait; more are refused.
        pending_calls: calls that wait, for room or for the orchestrator; more are refused.
        message_bytes: of one request.
        request_bytes, request_address_bytes: of requests that are read or decided, in all and of one network address;
            more calls wait.
        unread_bytes, unread_address_bytes: of answers that their receivers do not read, in all and to one network
            address. More answers are refused; small ones beyond twice as much.
        identity_rate, address_rate: calls per second of one TLS identity, and of one network address; all of an IPv6
            /64 are one.
        identity_burst, address_burst: calls that may come at once beyond the rate.
        memory_bytes: that calls may take; half of what the process may have if absent. The service refuses to start if
            its limits allow more.
    """

    DOMAIN: ClassVar[str] = "raycloak/service-limits/v1"

    deadline_s: float = Field(default=10.0, gt=0, le=600)
    stranger_s: float = Field(default=6.0, gt=0, le=60)
    idle_s: float = Field(default=30.0, gt=0, le=3600)
    age_s: float = Field(default=300.0, gt=0, le=86_400)
    connections: int = Field(default=4096, gt=0, lt=2**20)
    connections_per_address: int = Field(default=1024, gt=0, lt=2**20)
    calls_per_connection: int = Field(default=8, gt=0, le=1024)
    calls_per_address: int = Field(default=512, gt=0, le=65_536)
    pending_calls: int = Field(default=1024, gt=0, le=65_536)
    message_bytes: int = Field(default=MAX_PRESENTATION_BYTES + 65_536, gt=0, lt=2**30)
    request_bytes: int = Field(default=128 * 2**20, gt=0, lt=2**40)
    request_address_bytes: int = Field(default=8 * 2**20, gt=0, lt=2**40)
    unread_bytes: int = Field(default=128 * 2**20, gt=0, lt=2**40)
    unread_address_bytes: int = Field(default=16 * 2**20, gt=0, lt=2**40)
    identity_rate: float = Field(default=20.0, gt=0)
    address_rate: float = Field(default=2000.0, gt=0)
    identity_burst: int = Field(default=40, ge=1)
    address_burst: int = Field(default=4000, ge=1)
    memory_bytes: int | None = Field(default=None, gt=0, lt=2**50)

    def bounds(self) -> ConnectionBounds:
        """Return the bounds of its connections."""
        return ConnectionBounds(
            connections=self.connections,
            per_address=self.connections_per_address,
            calls=self.calls_per_connection,
            message_bytes=self.message_bytes,
            stranger_s=self.stranger_s,
            decision_s=self.deadline_s,
            idle_s=self.idle_s,
            age_s=self.age_s,
            grace_s=self.deadline_s,
        )

    @property
    def most_bytes(self) -> int:
        """The memory that all connections and calls may take together."""
        # A call that waits for room has a window of its request here; the rest of it stays at its sender.
        waiting = self.pending_calls * WINDOW_BYTES
        return self.bounds().most_bytes + waiting + self.request_bytes + SMALL_SHARE * self.unread_bytes


class UnreadAnswers:
    """The bytes of answers that have not left: a peer that does not read makes the service hold them."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._all = 0
        self._of: Counter[str] = Counter()

    def takes(self, address: str, size: int) -> bool:
        """Count an answer of ``size`` bytes; False, and nothing is counted, if it is too much."""
        share = SMALL_SHARE if size <= SMALL_BYTES else 1
        too_much = self._all + size > share * self._limits.unread_bytes
        too_much |= self._of[address] + size > share * self._limits.unread_address_bytes
        if too_much:
            return False
        self._all += size
        self._of[address] += size
        return True

    def left(self, address: str, size: int) -> None:
        """Uncount an answer that was sent, or whose receiver has gone."""
        self._all -= size
        self._of[address] -= size
        if not self._of[address]:
            del self._of[address]
