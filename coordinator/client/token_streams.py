"""The pieces of text of running samples: each caller gets its whole text once, in order, though pieces may be lost."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.futures import call_safely

OnToken = Callable[[int, str], object]
"""Is called with the number of a completion and a piece of its text."""


@dataclass
class _Stream:
    on_token: OnToken
    operation_id: str = ""
    has_gap: bool = False
    delivered: dict[int, str] = field(default_factory=dict)


class TokenStreams:
    """The samples of one client that are being written.

    The service keeps no pieces, so a broken connection loses its pieces. From then on pieces are left out, and the
    rest of the text follows at the end, from the result.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}

    def expect(self, key: str, on_token: OnToken) -> None:
        """Deliver the pieces of the sample that is submitted under ``key``."""
        with self._lock:
            self._streams[key] = _Stream(on_token)

    def named(self, key: str, operation_id: str) -> None:
        """Learn the operation id of ``key``."""
        with self._lock:
            if key in self._streams:
                self._streams[key].operation_id = operation_id

    def interrupted(self) -> None:
        """Count pieces as lost from here on."""
        with self._lock:
            for stream in self._streams.values():
                stream.has_gap = True

    def piece(self, tokens: wire.Tokens) -> None:
        """Deliver a piece."""
        with self._lock:
            stream = next((each for each in self._streams.values() if each.operation_id == tokens.operation_id), None)
            if stream is None:
                # It may be of a sample whose id is not known yet.
                for each in self._streams.values():
                    each.has_gap = each.has_gap or not each.operation_id
                return
        if not stream.has_gap:
            _deliver(stream, tokens.completion, tokens.text)

    def end(self, key: str, texts: list[str]) -> None:
        """Deliver what is left of the completions' whole ``texts``, and forget the sample."""
        with self._lock:
            stream = self._streams.pop(key, None)
        if stream is None:
            return
        for number, text in enumerate(texts):
            before = stream.delivered.get(number, "")
            if text.startswith(before) and text != before:
                _deliver(stream, number, text[len(before) :])


def _deliver(stream: _Stream, number: int, text: str) -> None:
    stream.delivered[number] = stream.delivered.get(number, "") + text
    call_safely(stream.on_token, number, text)
