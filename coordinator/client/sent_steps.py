"""The place of the next batch that a client sends: its step, and what was sent for that step before."""

import threading
from collections.abc import Iterator

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.sent_batches import SealedBatch

_PIECE_BYTES = 15 * 2**16
"""Of ciphertext in one message; a service takes messages of a megabyte. It asks for a piece when it has the last, so
that each costs a round trip: longer ones travel faster."""
_VOID = ("failed", "cancelled")


class SentSteps:
    """The operations that a client's service has taken, as far as they make steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, bool] = {}  # of optim_step, by number: whether it counts
        self._batches: dict[int, int] = {}  # of forward_backward, by number: its examples

    def learn(self, operation: wire.Operation) -> None:
        """Take an operation in, or its newest state."""
        with self._lock:
            if operation.kind == "optim_step":
                self._steps[operation.number] = operation.state not in _VOID
            elif operation.kind == "forward_backward" and operation.state == "done":
                self._batches[operation.number] = operation.forward_backward.examples_sent

    def next(self) -> tuple[int, int, int]:
        """Return the step of the next batch, and how many batches and examples that step has already."""
        with self._lock:
            counted = [number for number, counts in self._steps.items() if counts]
            last = max(counted, default=-1)
            of_step = [examples for number, examples in self._batches.items() if number > last]
            return len(counted), len(of_step), sum(of_step)


def pieces(client_id: str, key: str, sealed: SealedBatch) -> Iterator[wire.BatchPiece]:
    """Yield the messages in which a sealed batch travels."""
    yield wire.BatchPiece(
        head=wire.BatchHead(
            client_id=client_id,
            idempotency_key=key,
            examples=sealed.examples,
            example_hashes=sealed.example_hashes,
            bytes=len(sealed.content),
            sha256=sealed.sha256,
        )
    )
    for start in range(0, len(sealed.content), _PIECE_BYTES):
        yield wire.BatchPiece(data=sealed.content[start : start + _PIECE_BYTES])
