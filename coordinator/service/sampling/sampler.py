"""The sampler: text from released weights, generated in child processes beside the training.

    Sampler.submit ──► waiting, in turns ──► one thread and one process per run ──► on_tokens, on_rate, on_done

A process holds the model of one run with one released set of weights at a time, takes one request after another, and
ends when nobody asks for a while or another run waits for its place. It gets a run directory and a file of weights, and
neither data nor keys. It computes on the CPU: the accelerators belong to the workers.

The next request is one of the tenant whose requests have taken the least time, and of these the one that waits longest.
Who had no request for a while has saved no time up.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
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
from raycloak.coordinator.service.sampling.requests import MOST_RESULT_BYTES, SampleRequest, wrong_field
from raycloak.metrics.errors import RaycloakError
from raycloak.metrics.service_errors import (
    FutureCancelledError,
    FutureFailedError,
    ServiceError,
    ServiceQueueFullError,
    ServiceStateError,
    ServiceValidationError,
)

_LOG = logging.getLogger(__name__)
_TARGET = "raycloak.coordinator.service.sampling.process:main"
# A process that does not notice the cancellation in this time, deep in one long prompt, is ended.
_CANCEL_S = 20.0
# All that the libraries of a model look at. The service's environment may hold passwords, and user code runs here.
_PASSED = ("PATH", "HOME", "LANG", "LC_", "TMPDIR", "PYTHON", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_", "MKL_", "XDG_")
_PASSED_HUB = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Released weights, and the run that says which model they are of.

    Attributes:
        run: the run directory.
        parameters: safetensors file of the trained tensors, as a run directory has it and a package opens to.
        model_digest: of the released weights, in hexadecimal digits; the file must have it.
    """

    run: Path
    parameters: Path
    model_digest: str


@dataclass(frozen=True, slots=True)
class SamplerLimits:
    """The bounds of a sampler.

    Attributes:
        processes: that live at once. threads: of each. memory_bytes: that each may allocate.
        idle_s: seconds without a request after which a process ends. request_s: seconds that a request may take.
        waiting: requests that wait for a process.
    """

    processes: int = 1
    threads: int = 2
    memory_bytes: int = 16 * 2**30
    idle_s: float = 300.0
    request_s: float = 900.0
    waiting: int = 64


Outcome = tuple[SampledCompletion, ...] | ServiceError
"""The end of a request: its completions, or why there are none."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request and what is known of its end."""

    tenant: str
    source: SampleSource
    request: SampleRequest
    on_tokens: Callable[[int, str], None]
    on_rate: Callable[[float], None]
    on_done: Callable[[Outcome], None]
    number: int
    cancelled: bool = False
    process: "_Process | None" = None


class SampleHandle:
    """A request that was submitted."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        """Cancel the request before its next token; do nothing if it has ended. ``on_done`` is told, not the caller."""
        self._cancel()


@dataclass(slots=True, eq=False)
class _Host:
    """The thread that serves one run."""

    run: Path
    thread: threading.Thread = field(init=False)


class Sampler:
    """A sampler of released models.

    Guarantee: no process computes with weights that have another digest than the source states. One that crashes or
    hangs fails the request that it had and no other. No process outlives this object or its process.

    Guarantee: of tenants that always have a request here, none gets more of the time than another, but for one request,
    whatever they ask for and however they submit it.

    Args:
        logs: folder, made here, for what the processes write beside their answers; one file per run.
        clock: seconds that never go back, by which the time of tenants is counted.
    """

    def __init__(self, limits: SamplerLimits, logs: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._logs = logs
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._hosts: dict[Path, _Host] = {}
        self._leaving: list[_Host] = []
        self._running: set[_Job] = set()
        # Seconds that requests of each tenant took, and those of the tenant whose request was taken last: who comes
        # back starts from there.
        self._spent: dict[str, float] = {}
        self._least = 0.0
        self._numbers = count(1)
        self._closed = False

    def submit(
        self,
        tenant: str,
        source: SampleSource,
        request: SampleRequest,
        on_tokens: Callable[[int, str], None],
        on_rate: Callable[[float], None],
        on_done: Callable[[Outcome], None],
    ) -> SampleHandle:
        """Queue a request and return at once.

        Args:
            tenant: whose share of the time it takes.
            on_tokens: gets the place of a completion in the result, and the next piece of its text. It is called from
                a thread of the sampler, as the others are, and should not wait.
            on_rate: gets the tokens per second by now, a few times a second; the last time, those of the whole request.
            on_done: is called once, after the last piece.

        Raises:
            ServiceQueueFullError: ``sampler_queue_full``. ServiceStateError: ``sampler_closed``.
        """
        assert wrong_field(request) is None, "the desk has checked it"
        job = _Job(tenant, source, request, on_tokens, on_rate, on_done, next(self._numbers))
        with self._changed:
            if self._closed:
                raise ServiceStateError("sampler_closed", "the service is ending.", "Ask again once it is back.")
            if len(self._waiting) >= self._limits.waiting:
                raise ServiceQueueFullError(
                    "sampler_queue_full",
                    f"{self._limits.waiting} requests for text wait already.",
                    "Ask again later.",
                    retry_after_s=1.0,
                )
            self._spent[tenant] = max(self._spent.get(tenant, 0.0), self._least)
            self._waiting.append(job)
            self._start_hosts()
            self._changed.notify_all()
        return SampleHandle(lambda: self._cancel(job))

    @property
    def processes(self) -> int:
        """The number of processes that live, or are about to."""
        with self._changed:
            return len(self._hosts) + len(self._leaving)

    def close(self) -> None:
        """Cancel all requests, end all processes, and wait for their threads."""
        with self._changed:
            self._closed = True
            dropped, self._waiting = self._waiting, []
            running = list(self._running)
            hosts = [*self._hosts.values(), *self._leaving]
            for job in running:
                job.cancelled = True
                if job.process is not None:
                    job.process.kill()
            self._changed.notify_all()
        for job in dropped:
            job.on_done(_cancelled())
        for host in hosts:
            if host.thread is not threading.current_thread():
                host.thread.join()

    def _cancel(self, job: _Job) -> None:
        with self._changed:
            if job.cancelled:
                return
            waits, process = job in self._waiting, job.process
            if waits:
                self._waiting.remove(job)
            job.cancelled = True
        if waits:
            job.on_done(_cancelled())
        if process is not None:
            process.cancel(job.number)

    def _in_turn(self) -> list[_Job]:
        """Return the requests that wait, in the order in which they are taken; the lock is held."""
        # Of one tenant first the longest wait, as sorting keeps the order of equals.
        return sorted(self._waiting, key=lambda job: self._spent[job.tenant])

    def _start_hosts(self) -> None:
        """Start hosts for the runs whose turn it is, as far as there are places; the lock is held."""
        for job in self._in_turn():
            if len(self._hosts) + len(self._leaving) >= self._limits.processes:
                return
            if job.source.run not in self._hosts:
                host = _Host(job.source.run)
                host.thread = threading.Thread(target=self._serve, args=(host,), name="sampler", daemon=True)
                self._hosts[job.source.run] = host
                host.thread.start()

    def _serve(self, host: _Host) -> None:
        process: _Process | None = None
        try:
            while (job := self._next(host)) is not None:
                begun = self._clock()
                try:
                    if process is None or not process.alive:
                        if process is not None:
                            process.close()
                        process = _Process(host.run, self._limits, self._logs)
                    outcome: Outcome = self._answered(job, process)
                except Exception as error:  # noqa: BLE001
                    # The request was taken, so it ends here or never.
                    _LOG.exception("a request for text failed")
                    if process is not None:
                        process.kill()
                    why = f"the process that generates text cannot be started or heard ({type(error).__name__})."
                    outcome = FutureFailedError("sampler_failed", why, _SEE_LOG)
                finally:
                    with self._changed:
                        self._running.discard(job)
                        self._spent[job.tenant] += self._clock() - begun
                        job.process = None
                job.on_done(outcome)
        finally:
            if process is not None:
                process.close()
            with self._changed:
                if host in self._leaving:
                    self._leaving.remove(host)
                else:
                    del self._hosts[host.run]
                if not self._closed:
                    self._start_hosts()

    def _next(self, host: _Host) -> _Job | None:
        """Return the next request of the host's run, once there is one; None if the host is to give its place up."""
        until = time.monotonic() + self._limits.idle_s
        with self._changed:
            while not self._closed and (rest := until - time.monotonic()) > 0:
                firsts: dict[Path, _Job] = {}
                for job in self._in_turn():
                    firsts.setdefault(job.source.run, job)
                own = firsts.get(host.run)
                # Each host that leaves makes room for one run.
                homeless = [job for run, job in firsts.items() if run not in self._hosts][len(self._leaving) :]
                order = list(firsts.values())
                if homeless and (own is None or order.index(homeless[0]) < order.index(own)):
                    break
                if own is not None:
                    self._waiting.remove(own)
                    self._running.add(own)
                    self._least = max(self._least, self._spent[own.tenant])
                    return own
                self._changed.wait(rest)
            # From here on a request of this run needs another host.
            del self._hosts[host.run]
            self._leaving.append(host)
            return None

    def _answered(self, job: _Job, process: "_Process") -> Outcome:
        with self._changed:
            # From here on a cancellation finds the process.
            job.process = process
            dropped = job.cancelled
        outcome: Outcome = _cancelled() if dropped else process.outcome(job)
        return _cancelled() if job.cancelled and isinstance(outcome, ServiceError) else outcome


class _Process:
    """A child process that generates text; see `raycloak.coordinator.service.sampling.process`."""

    def __init__(self, run: Path, limits: SamplerLimits, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._limits = limits
        log = logs / f"sampler-{run.name}.log"
        log.unlink(missing_ok=True)
        self._child = Child(
            _TARGET, str(limits.threads), str(limits.memory_bytes), log=log, environment=_environment(), grace_s=0.0
        )
        self._changing = threading.Lock()
        self._present: tuple[int, Deadline] | None = None

    @property
    def alive(self) -> bool:
        """Return whether the process can take a request."""
        return self._child.alive

    def outcome(self, job: _Job) -> Outcome:
        """Send a request and read the answer to its end. A process that failed it has ended."""
        source, until = job.source, Deadline(self._limits.request_s)
        sample = Sample(
            id=job.number,
            run=source.run,
            parameters=source.parameters,
            model_digest=source.model_digest,
            request=job.request,
        )
        with self._changing:
            self._present = job.number, until
        try:
            self._child.send(sample, by=until)
            while True:
                match self._child.receive(Piece, Rate, SampleDone, Cancelled, Unanswered, by=until):
                    case Piece(completion=place, text=text):
                        job.on_tokens(place, text)
                    case Rate(tokens_per_second=rate):
                        job.on_rate(rate)
                    case SampleDone(completions=found):
                        return found if _fits(found) else self._failure("it gave more text than it may.")
                    case Cancelled():
                        return _cancelled()
                    case Unanswered() as failed:
                        return _failed(failed)
        except RaycloakError as error:
            if error.code == "child_overdue":
                why = f"the text was not there after {self._limits.request_s:g} s."
                return FutureFailedError("sample_timeout", why, "Ask for fewer tokens or completions.")
            return self._failure(error.message)
        finally:
            with self._changing:
                self._present = None

    def cancel(self, number: int) -> None:
        """Ask the process to end that request before the next token; end the process if it does not."""
        with self._changing:
            if self._present is None or self._present[0] != number:
                return
            until = self._present[1]
            until.shorten(_CANCEL_S)
        # Whoever receives is told of an end, and ends a process that does not read.
        with suppress(ConnectionError, TimeoutError):
            self._child.channel.send(Cancel(id=number), by=until)

    def kill(self) -> None:
        """End the process and all that it started."""
        self._child.kill()

    def close(self) -> None:
        """End the process; return when it is gone."""
        self._child.destroy()
        self._child.channel.close()

    def _failure(self, why: str) -> FutureFailedError:
        self._child.destroy()
        return FutureFailedError("sampler_failed", f"the process that generates text failed: {why}", _SEE_LOG)


_SEE_LOG = "The service's log folder has what it wrote. Ask again: another process is started."


def _failed(said: Unanswered) -> ServiceError:
    if said.field is not None:
        return ServiceValidationError(said.code, said.message, said.remedy, field=said.field)
    return FutureFailedError(said.code, said.message, said.remedy)


def _fits(found: tuple[SampledCompletion, ...]) -> bool:
    return sum(len(each.text.encode()) for each in found) <= MOST_RESULT_BYTES


def _environment() -> dict[str, str]:
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED) or name in _PASSED_HUB}
    # The run has fetched its model. No process here opens a connection, or takes an accelerator from a worker.
    return {**passed, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


def _cancelled() -> FutureCancelledError:
    return FutureCancelledError("sample_cancelled", "the request for text was cancelled.", "It cost nothing.")
