"""What a worker may say of a failure: a code, never the text of an exception.

An exception raised while private data is in reach can carry it (a tensor's repr, an index, a label). Our own errors
are worded without data and pass; anything else becomes ``worker_error`` with neither text nor traceback. What user
code prints goes nowhere for the same reason.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from metrics.errors import RaycloakError, RunFailedError

P = ParamSpec("P")
R = TypeVar("R")


def answer_code(error: BaseException) -> str:
    """The code that stands for ``error`` in a worker's answer."""
    if isinstance(error, RaycloakError):
        return error.code
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    return "worker_error"


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Send what Python code and native libraries print to nowhere, by stream and by descriptor."""
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        kept = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
        try:
            for descriptor, _ in kept:
                os.dup2(sink.fileno(), descriptor)
            yield
        finally:
            for descriptor, copy in kept:
                os.dup2(copy, descriptor)
                os.close(copy)


def guarded(method: Callable[P, R]) -> Callable[P, R]:
    """Silence ``method``'s prints and let only our own errors out.

    Guarantee: an exception that is not a RaycloakError, nor the operator's interrupt, leaves as ``RunFailedError`` with
    a code and no text, cause or context of the original.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        failure: RaycloakError
        try:
            with _silenced():
                return method(*args, **kwargs)
        except RaycloakError as error:
            failure = error.with_traceback(None)
            failure.__cause__ = failure.__context__ = None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - its text may hold private data, that of SystemExit too
            failure = RunFailedError(answer_code(error), f"the worker failed in {method.__name__}")
        raise failure from None

    return call
