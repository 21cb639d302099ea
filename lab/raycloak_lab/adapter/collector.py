"""The figures of an encrypted adapter's server, as series. No series names a client or a token."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from raycloak.metrics.exporter import Values
from raycloak.metrics.privacy_class import PrivacyClass
from raycloak.metrics.registry import ANSWERED, Label, Series

ADAPTER_CALLS = ("Describe", "Begin", "Register", "Apply", "Close")
ADAPTER_PHASES = ("charge", "compute")
ADAPTER_SERIES = (
    Series(
        "raycloak_adapter_calls_total",
        "Calls that the server of an encrypted adapter answered: ok, or the code of the refusal.",
        labels=(Label("method", ADAPTER_CALLS), Label("code", usual=(ANSWERED,))),
    ),
    Series("raycloak_adapter_tokens_total", "Tokens charged to clients, by whole blocks, once a block."),
    Series(
        "raycloak_adapter_busy_seconds_total",
        "Time that blocks took, by phase.",
        PrivacyClass.PHYSICAL,
        (Label("phase", ADAPTER_PHASES),),
    ),
    Series(
        "raycloak_adapter_tokens_left",
        "Tokens that the projection with the least left will ever answer, for all clients together.",
    ),
    Series("raycloak_adapter_sessions", "Sessions that are open."),
)


@dataclass(frozen=True)
class AdapterFigures:
    """The figures of a server since it was started.

    Args:
        calls: answers by method and code; ``ok`` for one that was no refusal.
        tokens: charged, by whole blocks.
        seconds: by phase of a block.
        tokens_left: for all clients together, of the projection that has the least.
        sessions: open ones.
    """

    calls: Mapping[tuple[str, str], int]
    tokens: int
    seconds: Mapping[str, float]
    tokens_left: int
    sessions: int


class AdapterCollector:
    """The series of a server, read at every scrape."""

    series: tuple[Series, ...] = ADAPTER_SERIES

    def __init__(self, read: Callable[[], AdapterFigures]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the families of a reading."""
        figures = self._read()
        values = Values(ADAPTER_SERIES)
        for method in ADAPTER_CALLS:
            values.start_at_zero("raycloak_adapter_calls_total", method, ANSWERED)
        for (method, code), count in figures.calls.items():
            values.set("raycloak_adapter_calls_total", count, method, code)
        values.set("raycloak_adapter_tokens_total", figures.tokens)
        for phase, seconds in figures.seconds.items():
            values.set("raycloak_adapter_busy_seconds_total", seconds, phase)
        values.set("raycloak_adapter_tokens_left", figures.tokens_left)
        values.set("raycloak_adapter_sessions", figures.sessions)
        return values.collect()
