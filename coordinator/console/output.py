"""The output of a command: its result, its errors, and the log of everything else.

Guarantee: with ``--json`` the real standard output carries exactly one JSON object and nothing else, whatever Ray, a
native library or the user's model prints. The command keeps file descriptor 1 for itself: `sys.stdout` and
`sys.stderr` become the run's log. Code that writes to descriptor 1 directly reaches standard error.
"""

import io
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.console.streams import Outlet
from raycloak.coordinator.console.tables import facts_table, fields_table
from raycloak.metrics.errors import RaycloakError, RunFailedError

PLAIN_WIDTH = 120
"""Columns where the output is not a terminal: enough for a digest beside its label."""

RAY_LOG = "ray.log"

RAY_THREADS = "ray_"
"""Prefix of the names of threads in which Ray prints what its processes say."""


_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed, and marks of writing direction: a record could draw a table of its own."""


class Diversion(io.TextIOBase):
    """A stream that takes what others print, and keeps it until :meth:`attach` names its log.

    What Ray says of its processes goes to `RAY_LOG` beside it: what Ray's threads print, and what its loggers say.
    A log is opened for each write: loggers that hold on to a diversion may outlive the command.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[bool, str]] = []
        self.log: Path | None = None

    def writable(self) -> bool:
        """Return true."""
        return True

    def write(self, text: str) -> int:
        """Append ``text``; safe from several threads."""
        self._keep(threading.current_thread().name.startswith(RAY_THREADS), text)
        return len(text)

    def take(self, record: logging.LogRecord, formatter: logging.Formatter) -> None:
        """Append a record of one of Ray's loggers."""
        self._keep(True, f"{formatter.format(record)}\n")

    def _keep(self, from_ray: bool, text: str) -> None:
        with self._lock:
            self._kept.append((from_ray, text))
            self._drain()

    def attach(self, log: Path | None) -> None:
        """Append what was kept to ``log`` and continue there; None keeps what is printed from now on."""
        with self._lock:
            self.log = log
            self._drain()

    def _drain(self) -> None:
        if self.log is None:
            return
        for from_ray in (False, True):
            texts = [text for ray, text in self._kept if ray == from_ray]
            log = self.log.with_name(RAY_LOG) if from_ray else self.log
            # A full disk is not the fault of the code that prints, and must not hide an error that is being reported.
            with suppress(OSError):
                if texts:
                    with log.open("ab", buffering=0) as sink:
                        sink.write("".join(texts).encode(errors="backslashreplace"))
        # Also after a failure, so that a full disk does not fill the memory as well.
        self._kept.clear()


def attach_log(log: Path | None) -> None:
    """Send what the process prints, and has printed since the command began, to ``log``.

    None releases the log, before its folder is removed.
    Does nothing where no command owns the standard output, as in a notebook or a script.
    """
    if isinstance(sys.stdout, Diversion):
        sys.stdout.attach(log)


class _RayHandler(logging.Handler):
    """A handler that passes records to the diversion if that is `sys.stderr` now, else to the real standard error."""

    _formatter = logging.Formatter("%(asctime)s\t%(levelname)s %(filename)s:%(lineno)s -- %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(sys.stderr, Diversion):
            sys.stderr.take(record, self._formatter)
        else:
            sys.stderr.write(f"{self._formatter.format(record)}\n")


def divert_logger(name: str) -> None:
    """Send the records of logger ``name`` to `RAY_LOG`; do nothing where no command owns the standard output."""
    if not isinstance(sys.stderr, Diversion):
        return
    logger = logging.getLogger(name)
    # Replaced, because Ray's own handler writes to the terminal.
    logger.handlers[:] = [_RayHandler()]
    logger.propagate = False


class Output:
    """The output of one command: its result, its notes and its errors."""

    def __init__(self, stdout: TextIO, stderr: TextIO, diversion: Diversion, as_json: bool, debug: bool) -> None:
        self._stdout = Outlet(stdout)
        self._stderr = Outlet(stderr)
        self._diversion = diversion
        self._as_json = as_json
        self._debug = debug
        self.progress = _console(self._stderr if as_json or not stdout.isatty() else self._stdout)
        """Progress goes to standard output if it is a terminal and free of JSON, else to standard error."""

    @property
    def terminal(self) -> Console | None:
        """The console of the person who watches; None where standard output is a file, a pipe or for JSON."""
        is_watched = self._stdout.isatty() and not self._as_json and not self.progress.is_dumb_terminal
        return self.progress if is_watched else None

    def announce(self, text: str) -> None:
        """Show one line while a run is going, and write it to the log as well."""
        # Through the console of the progress bar, which makes room for the line.
        self.progress.print(text, markup=False, soft_wrap=True)
        self._diversion.write(f"{text}\n")

    def result(self, data: Mapping[str, Any], view: RenderableType) -> None:
        """Print the command's result once: ``data`` as JSON, or ``view`` for a person.

        JSON has no infinity and no NaN; such numbers become null. Bytes become hexadecimal text.

        Raises:
            RaycloakError: ``output_lost`` if it could not be written. Somebody who has stopped reading is not an error.
        """
        if self._as_json:
            print(json_text(data), file=self._stdout, flush=True)
        else:
            _console(self._stdout).print(view)
        self._stdout.flush()
        failure = self._stdout.failure
        if failure is not None and not isinstance(failure, BrokenPipeError):
            message = f"the command's result could not be written: {failure.strerror}."
            raise RaycloakError("output_lost", message, "Make room; a run also keeps its verdict in verdict.json.")

    def show(self, title: str, facts: Mapping[str, Any], rows: Iterable[tuple[str, str]] | None = None) -> None:
        """Print the command's result as :meth:`result` does: a person gets a table of ``rows``, else of the facts."""
        self.result(facts, facts_table(title, facts) if rows is None else fields_table(title, rows))

    def preview(self, view: RenderableType) -> None:
        """Show a person the result so far before the command fails; JSON has it beside the error."""
        if not self._as_json:
            _console(self._stdout).print(view)

    def note(self, text: str) -> None:
        """Print one line for the person at the terminal, on standard error."""
        print(harmless(" ".join(text.split())), file=self._stderr, flush=True)

    def attach_log(self, log: Path) -> None:
        """Name the run's log, if the run did not do so itself."""
        self._diversion.attach(log)

    def error(self, error: RaycloakError, cause: BaseException | None = None) -> None:
        """Print one line on standard error, and with ``--json`` an object with the key ``error`` on standard output.

        The object carries the result so far of a run that had begun. The traceback, of ``cause`` if given, goes to the
        log, and with ``--debug`` to standard error.
        """
        self.trace(cause or error)
        self._say(error)

    def unexpected(self, error: BaseException) -> None:
        """Report a defect as one line that says where its traceback is."""
        self.trace(error)
        log = self._diversion.log
        remedy = f"The traceback is in {log}." if log else "Run it again with --debug to see the traceback."
        self._say(RaycloakError("unexpected", f"{type(error).__name__}: {error}.", remedy))

    def trace(self, error: BaseException) -> None:
        """Write the traceback of an error to the log, and with ``--debug`` to standard error."""
        trace = "".join(traceback.format_exception(error))
        self._diversion.write(trace)
        if self._debug:
            print(harmless(trace), end="", file=self._stderr, flush=True)

    def _say(self, error: RaycloakError) -> None:
        step, epsilon = error.step, error.spent_epsilon
        spent = "" if epsilon is None else f", with ε {epsilon_text(epsilon)} charged to the account"
        ended = "" if step is None else f"It ended in step {step}{spent}. "
        self.note(f"error: {error.code}: {error.message} {ended}{error.remedy}")
        if self._as_json:
            so_far = {"run_dir": error.result["run_dir"], **error.result["metrics"]} if error.result else {}
            described = {name: getattr(error, name) for name in ("code", "message", "remedy", "exit_code")}
            if isinstance(error, RunFailedError) or step is not None:
                described |= {"step": step, "spent_epsilon": epsilon}
            print(json_text({**so_far, "error": described}), file=self._stdout, flush=True)


def json_text(data: Mapping[str, Any]) -> str:
    """Return ``data`` as one JSON object: null for infinity and NaN, hexadecimal text for bytes."""
    # Help has no JSON, and is shown without it.
    from pydantic_core import to_jsonable_python

    plain = to_jsonable_python(data, inf_nan_mode="null", bytes_mode="hex", fallback=dict)
    return json.dumps(plain, allow_nan=False)


@contextmanager
def command_output(as_json: bool, debug: bool) -> Iterator[Output]:
    """Own the standard streams while a command runs, and give them back."""
    diversion = Diversion()
    kept = sys.stdout, sys.stderr
    with _own_descriptor() as stdout:
        sys.stdout = sys.stderr = diversion
        try:
            yield Output(stdout, kept[1], diversion, as_json, debug)
        finally:
            sys.stdout, sys.stderr = kept


def leave_stdout() -> None:
    """Send what exit handlers may still print to standard error: the result is complete."""
    # Before the descriptor changes: buffered text belongs to where it was printed.
    sys.stdout.flush()
    os.dup2(2, 1)


@contextmanager
def _own_descriptor() -> Iterator[TextIO]:
    sys.stdout.flush()
    # A native library writes to descriptor 1 whatever `sys.stdout` is.
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        raw = io.FileIO(kept, "w", closefd=False)
        stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
        try:
            yield stdout
        finally:
            with suppress(OSError):  # the failed write was noticed before
                stdout.close()
            raw.close()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def harmless(text: str) -> str:
    """Return ``text`` without what moves a terminal's cursor or turns its text around, which others may have named."""
    return _HARMFUL.sub("\N{REPLACEMENT CHARACTER}", text)


class _HarmlessConsole(Console):
    """A console whose text cannot command the terminal; its own styles and bars can."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def _console(stream: Outlet) -> Console:
    return _HarmlessConsole(file=cast(TextIO, stream), width=None if stream.isatty() else PLAIN_WIDTH, highlight=False)


def log_console(stream: TextIO) -> Console:
    """Return a console that writes plain lines, also to a terminal or a notebook."""
    outlet = cast(TextIO, Outlet(stream))
    return _HarmlessConsole(file=outlet, width=PLAIN_WIDTH, highlight=False, force_terminal=False, force_jupyter=False)
