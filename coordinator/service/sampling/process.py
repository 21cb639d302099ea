"""The child process that generates text, one request after another; `sampler.py` beside it starts it.

It answers each `Sample` with `Piece` and `Rate` any number of times, then one of `SampleDone`, `Cancelled` and
`Unanswered`. It ends with its parent.
"""

import os
import resource
import threading
from collections.abc import Set
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.attestation.processes.channel import Channel
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.sampling import messages
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
    samples: SimpleQueue[messages.Sample] = SimpleQueue()
    cancelled: set[str] = set()
    threading.Thread(target=_listen, args=(parent, samples, cancelled), daemon=True).start()
    newest = _Newest(int(threads))
    while True:
        _answer(newest, samples.get(), cancelled, parent)


class _Newest:
    """The model of the newest request."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._loaded: tuple[Path, Any, Any] | None = None

    def generator(self, sample: messages.Sample) -> Any:
        """Return the `Generator` of the weights that a request names."""
        # After the limits are set and the input is listened to: torch and the model take seconds.
        import torch

        from raycloak.coordinator.runs.released_model import model_at, with_weights
        from raycloak.coordinator.service.sampling.generation import Generator

        torch.set_num_threads(self._threads)
        if self._loaded is None or self._loaded[0] != sample.run:
            self._loaded = None  # its memory is for the next one
            model = model_at(sample.run, sample.parameters, sample.model_digest)
            self._loaded = (sample.run, model, Generator(model))
        elif self._loaded[1].model_digest != sample.model_digest:
            _, model, generator = self._loaded
            self._loaded = (sample.run, with_weights(model, sample.parameters, sample.model_digest), generator)
        return self._loaded[2]


def _answer(newest: _Newest, sample: messages.Sample, cancelled: Set[str], parent: Channel) -> None:
    try:
        generator = newest.generator(sample)
        found = None
        if sample.id not in cancelled:
            found = generator.complete(
                wire.Sample.FromString(sample.request),
                lambda completion, text: parent.send(messages.Piece(completion=completion, text=text)),
                lambda rate: parent.send(messages.Rate(tokens_per_second=rate)),
                lambda: sample.id in cancelled,
            )
    except RaycloakError as error:
        # Released weights, public code and the tenant's own prompts: nothing in here knows an example.
        where = getattr(error, "details", {}).get("field")
        parent.send(messages.Unanswered(code=error.code, message=error.message, remedy=error.remedy, field=where))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = "the model and its text do not fit into the memory of a sampler."
        remedy = "Ask for fewer rows or tokens at once, or raise the sampler's memory."
        parent.send(messages.Unanswered(code="sample_memory", message=message, remedy=remedy, field=None))
    else:
        parent.send(messages.Cancelled() if found is None else messages.SampleDone(completions=found))


def _listen(parent: Channel, samples: "SimpleQueue[messages.Sample]", cancelled: set[str]) -> None:
    while (message := parent.receive(messages.Sample, messages.Cancel)) is not None:
        if isinstance(message, messages.Cancel):
            # By name: one that comes too late must not end the request behind it.
            cancelled.add(message.id)
        elif isinstance(message, messages.Sample):
            samples.put(message)
    # The service is done with this process: there is nothing to finish and nobody to tell.
    os._exit(0)
