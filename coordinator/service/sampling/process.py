"""The child process that generates text, one request after another; `sampler.py` beside it starts it.

Lines of JSON come on its standard input: ``{"kind": "sample", "id": …, "run": …, "parameters": …,
"model_digest": …, "request": {…}}`` and ``{"kind": "cancel", "id": …}``. Its answers go to a copy of its standard
output: ``tokens`` and ``rate`` any number of times, then one of ``done``, ``cancelled`` and ``failed``. All else that
is written in here goes to its standard error. It ends with its input.
"""

import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Set
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.coordinator.service.sampling.requests import SampleRequest
from raycloak.coordinator.service.sampling.sampler import SampledCompletion
from raycloak.metrics.errors import RaycloakError, is_out_of_memory

# Steps of the training come first where both want the processor.
_NICENESS = 10


def main(threads: int, memory_bytes: int) -> None:
    """Serve requests until the input ends.

    Args:
        threads: that a model's operations use. memory_bytes: that this process may allocate.
    """
    # Prompts and what is made of them are a tenant's own.
    keep_memory_private()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a model's code prints must not end up between two answers.
    os.dup2(2, 1)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()
    cancelled: set[int] = set()
    threading.Thread(target=_listen, args=(requests, cancelled), daemon=True).start()
    service = _Service(threads)
    while True:
        _answer(service, requests.get(), cancelled, lambda answer: _write(answers, answer))


class _Service:
    """The model of the newest request, and the answers from it."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._loaded: tuple[str, Any, Any] | None = None

    def complete(
        self,
        message: dict[str, Any],
        on_text: Callable[[int, str], None],
        on_rate: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> tuple[SampledCompletion, ...] | None:
        """Return the completions of a request; None if it was cancelled. Errors as `Generator`."""
        fields = message["request"]
        request = SampleRequest(**{**fields, "prompts": tuple(fields["prompts"]), "stop": tuple(fields["stop"])})
        generator = self._generator(message["run"], Path(message["parameters"]), message["model_digest"])
        if cancelled():
            return None
        found: tuple[SampledCompletion, ...] | None = generator.complete(request, on_text, on_rate, cancelled)
        return found

    def _generator(self, run: str, parameters: Path, model_digest: str) -> Any:
        # After the limits are set and the input is listened to: torch and the model take seconds.
        import torch

        from raycloak.coordinator.runs.released_model import model_at, with_weights
        from raycloak.coordinator.service.sampling.generation import Generator

        torch.set_num_threads(self._threads)
        if self._loaded is None or self._loaded[0] != run:
            self._loaded = None  # its memory is for the next one
            model = model_at(Path(run), parameters, model_digest)
            self._loaded = (run, model, Generator(model))
        elif self._loaded[1].model_digest != model_digest:
            _, model, generator = self._loaded
            self._loaded = (run, with_weights(model, parameters, model_digest), generator)
        return self._loaded[2]


def _answer(
    service: _Service, message: dict[str, Any], cancelled: Set[int], write: Callable[[dict[str, Any]], None]
) -> None:
    def on_text(completion: int, text: str) -> None:
        write({"kind": "tokens", "completion": completion, "text": text})

    def on_rate(tokens_per_second: float) -> None:
        write({"kind": "rate", "tokens_per_second": tokens_per_second})

    try:
        found = service.complete(message, on_text, on_rate, lambda: message["id"] in cancelled)
    except RaycloakError as error:
        # Released weights, public code and the tenant's own prompts: nothing in here knows an example.
        details = getattr(error, "details", {})
        write(
            {
                "kind": "failed",
                "code": error.code,
                "message": error.message,
                "remedy": error.remedy,
                "field": details.get("field"),
            }
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        write(
            {
                "kind": "failed",
                "code": "sample_memory",
                "message": "the model and its text do not fit into the memory of a sampler.",
                "remedy": "Ask for fewer rows or tokens at once, or raise the sampler's memory.",
                "field": None,
            }
        )
    else:
        rows = found and [[each.prompt, each.text, each.finish_reason, each.tokens] for each in found]
        write({"kind": "cancelled"} if rows is None else {"kind": "done", "completions": rows})


def _listen(requests: "SimpleQueue[dict[str, Any]]", cancelled: set[int]) -> None:
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if message["kind"] == "cancel":
            # By number: one that comes too late must not end the request behind it.
            cancelled.add(message["id"])
        else:
            requests.put(message)
    # The service is gone, or done with this process: there is nothing to finish and nobody to tell.
    os._exit(0)


def _write(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
