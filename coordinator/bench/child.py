"""A child process of a bench, which answers questions about itself."""

import multiprocessing
from collections.abc import Callable
from typing import Any, Self

from raycloak.metrics.errors import RunFailedError

_DEADLINE_S = 120.0


class Child:
    """A process that runs ``target(pipe, *arguments)``. It first sends one message, then answers with its figures."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(_DEADLINE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def first(self) -> Any:
        """Return the message that it sends when it is ready; RunFailedError ``bench_failed`` without one."""
        try:
            if self._pipe.poll(_DEADLINE_S):
                return self._pipe.recv()
        except EOFError:
            pass
        raise RunFailedError("bench_failed", "a process of the bench did not answer", "See its traceback above.")

    def ask(self, question: Any = "figures") -> Any:
        """Return its answer to a question: its present figures, unless something else is asked for."""
        self._pipe.send(question)
        return self.first()
