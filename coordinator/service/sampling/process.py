"""The child process that generates text, one request after another; `sampler.py` beside it starts it.

It answers each `Sample` with `Piece` and `Rate` any number of times, then one of `SampleDone`, `Cancelled` and
`Unanswered`. It ends with its parent.
"""

import os
import resource
import threading
from collections.abc import Callable, Set
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.attestation.processes.channel import Channel
from raycloak.coordinator.service.sampling.messages import (
    Cancel,
    Cancelled,
    Piece,
    Rate,
    Sample,
    SampledCompletion,
    SampleDone,
    Unanswered,
)
from raycloak.metrics.errors import RaycloakError, is_out_of_memory

# Steps of the training come first where both want the processor.
_NICENESS = 10


def main(parent: Channel, threads: str, memory_bytes: str) -> None:
    """Serve requests until the input ends.

    Args:
        threads: that a model's operations use. memory_bytes: that this process may allocate.
    """
    # Prompts and what is made of them are a tenant's own.
    keep_memory_private()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
    samples: SimpleQueue[Sample] = SimpleQueue()
    cancelled: set[int] = set()
    threading.Thread(target=_listen, args=(parent, samples, cancelled), daemon=True).start()
    service = _Service(int(threads))
    while True:
        _answer(service, samples.get(), cancelled, parent)


class _Service:
    """The model of the newest request, and the answers from it."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._loaded: tuple[Path, Any, Any] | None = None

    def complete(
        self,
        sample: Sample,
        on_text: Callable[[int, str], None],
        on_rate: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> tuple[SampledCompletion, ...] | None:
        """Return the completions of a request; None if it was cancelled. Errors as `Generator`."""
        generator = self._generator(sample.run, sample.parameters, sample.model_digest)
        if cancelled():
            return None
        found: tuple[SampledCompletion, ...] | None = generator.complete(sample.request, on_text, on_rate, cancelled)
        return found

    def _generator(self, run: Path, parameters: Path, model_digest: str) -> Any:
        # After the limits are set and the input is listened to: torch and the model take seconds.
        import torch

        from raycloak.coordinator.runs.released_model import model_at, with_weights
        from raycloak.coordinator.service.sampling.generation import Generator

        torch.set_num_threads(self._threads)
        if self._loaded is None or self._loaded[0] != run:
            self._loaded = None  # its memory is for the next one
            model = model_at(run, parameters, model_digest)
            self._loaded = (run, model, Generator(model))
        elif self._loaded[1].model_digest != model_digest:
            _, model, generator = self._loaded
            self._loaded = (run, with_weights(model, parameters, model_digest), generator)
        return self._loaded[2]


def _answer(service: _Service, sample: Sample, cancelled: Set[int], parent: Channel) -> None:
    def on_text(completion: int, text: str) -> None:
        parent.send(Piece(completion=completion, text=text))

    def on_rate(tokens_per_second: float) -> None:
        parent.send(Rate(tokens_per_second=tokens_per_second))

    try:
        found = service.complete(sample, on_text, on_rate, lambda: sample.id in cancelled)
    except RaycloakError as error:
        # Released weights, public code and the tenant's own prompts: nothing in here knows an example.
        where = getattr(error, "details", {}).get("field")
        parent.send(Unanswered(code=error.code, message=error.message, remedy=error.remedy, field=where))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        parent.send(
            Unanswered(
                code="sample_memory",
                message="the model and its text do not fit into the memory of a sampler.",
                remedy="Ask for fewer rows or tokens at once, or raise the sampler's memory.",
                field=None,
            )
        )
    else:
        parent.send(Cancelled() if found is None else SampleDone(completions=found))


def _listen(parent: Channel, samples: SimpleQueue[Sample], cancelled: set[int]) -> None:
    while (message := parent.receive(Sample, Cancel)) is not None:
        if isinstance(message, Cancel):
            # By number: one that comes too late must not end the request behind it.
            cancelled.add(message.id)
        elif isinstance(message, Sample):
            samples.put(message)
    # The service is done with this process: there is nothing to finish and nobody to tell.
    os._exit(0)
