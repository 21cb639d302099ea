"""The answers of a worker that fails: a code, never the text of an exception.

An exception raised while private data is in reach can carry it (a tensor's repr, an index, a label). Our own errors
are worded without data and pass. Anything else becomes ``out_of_memory``, ``gpu_error`` or ``worker_error``, with
neither text nor traceback. Prints of user code are dropped for the same reason.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from raycloak.metrics.errors import MORE_MEMORY, RaycloakError, RunFailedError, is_gpu_error, is_out_of_memory

GPU_ERROR = "gpu_error"
"""The code of a worker whose GPU failed: whatever it computes from then on fails as well."""

gpu_failed = threading.Event()
"""Set once a method of this process failed so. The process has to end, since the GPU keeps its memory until then."""

P = ParamSpec("P")
R = TypeVar("R")


def answer_code(error: BaseException) -> str:
    """Return the code that stands for ``error`` in a worker's answer."""
    if isinstance(error, RaycloakError):
        return error.code
    if is_out_of_memory(error):
        return "out_of_memory"
    return GPU_ERROR if is_gpu_error(error) else "worker_error"


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Drop all that Python code and native libraries print, by stream and by descriptor."""
    with (
        open(os.devnull, "w", encoding="utf-8") as sink,
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
    ):
        # Native libraries write to descriptors 1 and 2 past Python's streams.
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
    """Drop the prints of ``method``, and let only our own errors out.

    Guarantee: an exception leaves as ``RunFailedError``, with a code and no text, cause or context of the original. A
    RaycloakError passes without traceback, cause and context; the operator's interrupt passes as it is.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        failure: RaycloakError
        try:
            with _silenced():
                return method(*args, **kwargs)
        except RaycloakError as error:
            # A traceback has frames, and a cause or context another error: both may hold examples.
            failure = error.with_traceback(None)
            failure.__cause__ = failure.__context__ = None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - its text may hold private data, that of SystemExit too
            code = answer_code(error)
            if code == GPU_ERROR:
                gpu_failed.set()
            remedy = MORE_MEMORY if code == "out_of_memory" else ""
            failure = RunFailedError(code, f"the worker failed in {method.__name__}", remedy)
        raise failure from None

    return call
