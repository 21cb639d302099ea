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

# An answer up to this size is given whatever else is unread: all that a member needs is smaller.
SMALL_BYTES: Final = 65_536


class ServiceLimits(Message):
    """Limits of the evidence service.

    Attributes:
        deadline_s: longest time a call may take, whatever deadline its caller gave.
        handshake_s: longest TLS handshake; then the connection is closed. A shorter limit keeps out nobody who
            connects again, and accepting a connection again costs more than the memory that it held.
        idle_s: after it, a connection without a call is closed.
        age_s: after it, any connection is closed; its calls get another ``deadline_s``.
        connections: at once; more are turned away.
        calls_per_connection: at once.
        pending_calls: calls that wait for the orchestrator; more are refused.
        message_bytes: of one request.
        unread_bytes, unread_address_bytes: of answers that their receivers do not read, in all and to one network
            address. More answers are refused, except small ones.
        identity_rate, address_rate: calls per second of one TLS identity, and of one network address; all of an IPv6
            /64 are one.
        identity_burst, address_burst: calls that may come at once beyond the rate.
    """

    DOMAIN: ClassVar[str] = "raycloak/service-limits/v1"

    deadline_s: float = Field(default=10.0, gt=0, le=600)
    handshake_s: float = Field(default=30.0, gt=0, le=60)
    idle_s: float = Field(default=30.0, gt=0, le=3600)
    age_s: float = Field(default=300.0, gt=0, le=86_400)
    connections: int = Field(default=16_384, gt=0, lt=2**20)
    calls_per_connection: int = Field(default=8, gt=0, le=1024)
    pending_calls: int = Field(default=1024, gt=0, le=65_536)
    message_bytes: int = Field(default=MAX_PRESENTATION_BYTES + 65_536, gt=0, lt=2**30)
    unread_bytes: int = Field(default=128 * 2**20, gt=0, lt=2**40)
    unread_address_bytes: int = Field(default=16 * 2**20, gt=0, lt=2**40)
    identity_rate: float = Field(default=20.0, gt=0)
    address_rate: float = Field(default=2000.0, gt=0)
    identity_burst: int = Field(default=40, ge=1)
    address_burst: int = Field(default=4000, ge=1)

    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """Return the limits that gRPC enforces, as options of its server."""
        return (
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_s)),
            ("grpc.max_connection_idle_ms", _ms(self.idle_s)),
            ("grpc.max_connection_age_ms", _ms(self.age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(self.deadline_s)),
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", self.calls_per_connection),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_metadata_size", 8192),
            # A dead peer is noticed, and one that only pings is closed.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
            ("grpc.http2.max_ping_strikes", 2),
            # With reuse, a second service could take the same port, and a part of the calls.
            ("grpc.so_reuseport", 0),
        )


class UnreadAnswers:
    """The bytes of answers that have not left: a peer that does not read makes the service hold them."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._all = 0
        self._of: Counter[str] = Counter()

    def takes(self, address: str, size: int) -> bool:
        """Count an answer of ``size`` bytes; False, and nothing is counted, if it is too much and not small."""
        too_much = self._all + size > self._limits.unread_bytes
        too_much |= self._of[address] + size > self._limits.unread_address_bytes
        if too_much and size > SMALL_BYTES:
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


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
