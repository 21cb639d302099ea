"""The sampler: text from released weights, generated in child processes beside the training.

    Sampler.submit ──► waiting, in turns ──► one thread and one process per run ──► on_tokens, on_rate, on_done

A process holds the model of one run with one released set of weights at a time, takes one request after another, and
ends when nobody asks for a while or another run waits for its place. It gets a run directory and a file of weights, and
neither data nor keys. It computes on the CPU: the accelerators belong to the workers.

Weights are a package that a client saved, or a copy that a driver wrote for the sample. The service is a recipient of
the packages of its runs, by a key of its own. It opens one only after both signatures, the run and every byte are
verified, into a file that it alone can read and that goes when newer weights come.

The next request is one of the tenant whose requests have taken the least time, and of these the one that waits longest.
Who had no request for a while has saved no time up.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.sealed.package_keys import TrustStore, create_recipient, load_recipient_key, load_signer
from raycloak.coordinator.checkpoints.reader import Expected, open_to_file, verify_package
from raycloak.coordinator.checkpoints.storage import STORAGE_ERRORS, PackageStorage, one_line, split_location
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.results import Completion
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.service.sampling import messages
from raycloak.coordinator.service.sampling.requests import COPY_SUFFIX, MOST_RESULT_BYTES, wrong_field
from raycloak.metrics.errors import ConfigError, RaycloakError
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
_KEY = "training-service.key"
# A process that does not notice the cancellation in this time, deep in one long prompt, is ended.
_CANCEL_S = 20.0
# All that the libraries of a model look at. The service's environment may hold passwords, and user code runs here.
_PASSED = ("PATH", "HOME", "LANG", "LC_", "TMPDIR", "PYTHON", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_", "MKL_", "XDG_")
_PASSED_HUB = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
_SEE_LOG = "The service's log folder has what it wrote. Ask again: another process is started."


def service_recipient(folder: Path) -> Path:
    """Return the public file of the service's key for packages; the first call makes the key in ``folder``.

    A run's ``checkpoint.recipients`` must name the file, or the service cannot sample from the run.

    Raises:
        ConfigError: ``recipient`` if it cannot be written.
    """
    public = folder / f"{_KEY}.pub"
    if not public.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_recipient(folder / _KEY)
    return public


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


Outcome = tuple[Completion, ...] | ServiceError
"""The end of a request: its completions, or why there are none."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request that waits or is answered."""

    name: str
    tenant: str
    package: str
    run: Path
    request: wire.Sample
    is_taken: bool = False
    cancelled: bool = False
    process: "_Process | None" = None


class Sampler:
    """A sampler of released models.

    Guarantee: text comes from weights that a run's orchestrator has signed as released, of that run, and from no
    others; or from a copy, which must have the digest that its name has. No process computes with weights that have
    another digest than was stated. One that crashes or hangs fails the request that it had and no other. No process
    outlives this object or its process.

    Guarantee: of tenants that always have a request here, none gets more of the time than another, but for one request,
    whatever they ask for and however they submit it.

    Args:
        folder: of the service's key, of the opened weights, which are removed when this object is made, and of what
            the processes write beside their answers, one file per run.
        signer: public file of the site's signer of packages; it is read when the first package is opened.
        on_tokens: called with an operation, the place of a completion in it, and a piece of its text.
        on_rate: called with an operation and its tokens per second by now, a few times a second.
        on_done: called once with an operation, and its completions or else the cause for which there are none.
            All are called from threads of this object, and should not wait.
        clock: seconds that never go back, by which the time of tenants is counted.
    """

    def __init__(
        self,
        limits: SamplerLimits,
        folder: Path,
        signer: Path,
        on_tokens: Callable[[str, int, str], None],
        on_rate: Callable[[str, float], None],
        on_done: Callable[[str, list[wire.Completion], ServiceError | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._folder = folder
        self._signer = signer
        self._on_tokens, self._on_rate, self._on_done = on_tokens, on_rate, on_done
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}  # that have not ended, by operation
        self._hosts: dict[Path, threading.Thread] = {}  # a thread serves one run
        self._leaving: list[threading.Thread] = []
        self._newest: dict[Path, Path] = {}  # the opened weights of each run
        # Seconds that requests of each tenant took, and those of the tenant whose request was taken last: who comes
        # back starts from there.
        self._spent: dict[str, float] = {}
        self._least = 0.0
        self._closed = False
        self._opened = folder / "sampled"
        self._opened.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A service that was killed left them.
        self._remove_weights()

    def submit(self, operation_id: str, tenant: str, package: str, run_dir: str, request: wire.Sample) -> None:
        """See `raycloak.coordinator.service.ports.SamplerPort`."""
        assert wrong_field(request) is None, "the desk has checked it"
        job = _Job(operation_id, tenant, package, Path(run_dir), request)
        refusal: ServiceError | None = None
        with self._changed:
            if self._closed:
                refusal = ServiceStateError("sampler_closed", "the service is ending.", "Ask again once it is back.")
            elif len(self._in_turn()) >= self._limits.waiting:
                why = f"{self._limits.waiting} requests for text wait already."
                refusal = ServiceQueueFullError("sampler_queue_full", why, "Ask again later.", retry_after_s=1.0)
            else:
                self._spent[tenant] = max(self._spent.get(tenant, 0.0), self._least)
                self._jobs[operation_id] = job
                self._start_hosts()
                self._changed.notify_all()
        if refusal is not None:
            self._on_done(operation_id, [], refusal)

    @property
    def processes(self) -> int:
        """The number of processes that live, or are about to."""
        with self._changed:
            return len(self._hosts) + len(self._leaving)

    def cancel(self, operation_id: str) -> None:
        """Cancel a sample before its next token; do nothing if it has ended. ``on_done`` is told, not the caller."""
        with self._changed:
            job = self._jobs.get(operation_id)
            if job is None or job.cancelled:
                return
            job.cancelled = True
            process = job.process
            if not job.is_taken:
                del self._jobs[operation_id]
        if not job.is_taken:
            self._on_done(operation_id, [], _cancelled())
        elif process is not None:
            process.cancel(operation_id)

    def close(self) -> None:
        """Cancel all requests, end all processes, wait for their threads, and remove the opened weights."""
        with self._changed:
            self._closed = True
            dropped = self._in_turn()
            for job in dropped:
                del self._jobs[job.name]
            for job in self._jobs.values():
                job.cancelled = True
                if job.process is not None:
                    job.process.kill()
            hosts = [*self._hosts.values(), *self._leaving]
            self._changed.notify_all()
        for job in dropped:
            self._on_done(job.name, [], _cancelled())
        for thread in hosts:
            if thread is not threading.current_thread():
                thread.join()
        self._remove_weights()

    def _remove_weights(self) -> None:
        for left in self._opened.iterdir():
            left.unlink()

    def _in_turn(self) -> list[_Job]:
        """Return the requests that wait, in the order in which they are taken; the lock is held."""
        # Of one tenant first the longest wait, as sorting keeps the order of equals.
        waiting = (job for job in self._jobs.values() if not job.is_taken)
        return sorted(waiting, key=lambda job: self._spent[job.tenant])

    def _start_hosts(self) -> None:
        """Start hosts for the runs whose turn it is, as far as there are places; the lock is held."""
        for job in self._in_turn():
            if len(self._hosts) + len(self._leaving) >= self._limits.processes:
                return
            if job.run not in self._hosts:
                host = threading.Thread(target=self._serve, args=(job.run,), name="sampler", daemon=True)
                self._hosts[job.run] = host
                host.start()

    def _serve(self, run: Path) -> None:
        process: _Process | None = None
        host = threading.current_thread()
        try:
            while (job := self._next(run, host)) is not None:
                begun, weights = self._clock(), None
                try:
                    weights = self._weights(job)
                    if process is None or not process.alive:
                        if process is not None:
                            process.close()
                        process = _Process(run, self._limits, self._folder / "logs")
                    outcome = self._answered(job, process, *weights)
                except RaycloakError as refusal:
                    failed = FutureFailedError(refusal.code, refusal.message, refusal.remedy)
                    outcome = refusal if isinstance(refusal, ServiceError) else failed
                except Exception as error:  # noqa: BLE001
                    # The request was taken, so it ends here or never.
                    _LOG.exception("a request for text failed")
                    if process is not None:
                        process.kill()
                    cause = type(error).__name__
                    why = f"the process that generates text cannot be started or heard ({cause})."
                    outcome = FutureFailedError("sampler_failed", why, _SEE_LOG)
                    if weights is None:
                        outcome = FutureFailedError("sample_failed", f"the package cannot be opened ({cause}).")
                finally:
                    with self._changed:
                        del self._jobs[job.name]
                        self._spent[job.tenant] += self._clock() - begun
                        job.process = None
                if isinstance(outcome, ServiceError):
                    self._on_done(job.name, [], outcome)
                else:
                    self._on_done(job.name, [wire.Completion(**vars(each)) for each in outcome], None)
        finally:
            if process is not None:
                process.close()
            with self._changed:
                if host in self._leaving:
                    self._leaving.remove(host)
                else:
                    del self._hosts[run]
                if not self._closed:
                    self._start_hosts()

    def _next(self, run: Path, host: threading.Thread) -> _Job | None:
        """Return the next request of a host's run, once there is one; None if the host is to give its place up."""
        until = time.monotonic() + self._limits.idle_s
        with self._changed:
            while not self._closed and (rest := until - time.monotonic()) > 0:
                firsts: dict[Path, _Job] = {}
                for job in self._in_turn():
                    firsts.setdefault(job.run, job)
                own = firsts.get(run)
                # Each host that leaves makes room for one run.
                homeless = [job for each, job in firsts.items() if each not in self._hosts][len(self._leaving) :]
                order = list(firsts.values())
                if homeless and (own is None or order.index(homeless[0]) < order.index(own)):
                    break
                if own is not None:
                    own.is_taken = True
                    self._least = max(self._least, self._spent[own.tenant])
                    return own
                self._changed.wait(rest)
            # From here on a request of this run needs another host.
            del self._hosts[run]
            self._leaving.append(host)
            return None

    def _weights(self, job: _Job) -> tuple[Path, str]:
        """Return the file of a sample's weights and their digest. That of a package stays until newer ones are opened.

        Raises:
            EvidenceError: why the package is refused.
            ConfigError: ``storage``, ``signer``, ``recipient``, ``not_a_run`` or ``no_weights``.
        """
        if job.package.endswith(COPY_SUFFIX):
            return Path(job.package), Path(job.package).stem
        manifest = RunFolder.open(job.run).manifest()
        if manifest is None:
            raise ConfigError("no_weights", "the run has released no weights yet.", "Finish a step first.")
        trust = TrustStore.of("site", load_signer(self._signer))
        location, name = split_location(job.package)
        expected = Expected(run=manifest.digest(), run_id=manifest.run_id)
        try:
            package = verify_package(PackageStorage.open(location), name, trust, expected)
            digest = package.manifest.model_digest.hex()
            path = self._opened / f"{manifest.run_id}-{digest}.safetensors"
            if not path.exists():
                open_to_file(package, package.unwrap(load_recipient_key(self._folder / _KEY)), path)
        except STORAGE_ERRORS as error:
            raise ConfigError(
                "storage", f"a package cannot be read: {one_line(error)}.", "Ask the operator to look at the storage."
            ) from None
        # Only the thread of its run reads it.
        former, self._newest[job.run] = self._newest.get(job.run, path), path
        if former != path:
            former.unlink(missing_ok=True)
        return path, digest

    def _answered(self, job: _Job, process: "_Process", parameters: Path, model_digest: str) -> Outcome:
        with self._changed:
            # From here on a cancellation finds the process.
            job.process = process
            dropped = job.cancelled
        outcome: Outcome = _cancelled()
        if not dropped:
            sample = messages.Sample(
                id=job.name,
                run=job.run,
                parameters=parameters,
                model_digest=model_digest,
                request=job.request.SerializeToString(),
            )
            outcome = process.outcome(
                sample,
                lambda place, text: self._on_tokens(job.name, place, text),
                lambda rate: self._on_rate(job.name, rate),
            )
        return _cancelled() if job.cancelled and isinstance(outcome, ServiceError) else outcome


class _Process:
    """A child process that generates text; see `raycloak.coordinator.service.sampling.process`."""

    def __init__(self, run: Path, limits: SamplerLimits, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._limits = limits
        log = logs / f"sampler-{run.name}.log"
        log.unlink(missing_ok=True)
        passed = {each: text for each, text in os.environ.items() if each.startswith(_PASSED) or each in _PASSED_HUB}
        # The run has fetched its model. No process here opens a connection, or takes an accelerator from a worker.
        passed |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        self._child = Child(
            _TARGET, str(limits.threads), str(limits.memory_bytes), log=log, environment=passed, grace_s=0.0
        )
        self._changing = threading.Lock()
        self._present: tuple[str, Deadline] | None = None

    @property
    def alive(self) -> bool:
        """Return whether the process can take a request."""
        return self._child.alive

    def outcome(
        self, sample: messages.Sample, on_text: Callable[[int, str], None], on_rate: Callable[[float], None]
    ) -> Outcome:
        """Send a request and read the answer to its end. A process that failed it has ended."""
        until = Deadline(self._limits.request_s)
        answers = (messages.Piece, messages.Rate, messages.SampleDone, messages.Cancelled, messages.Unanswered)
        with self._changing:
            self._present = sample.id, until
        try:
            self._child.send(sample, by=until)
            while True:
                match self._child.receive(*answers, by=until):
                    case messages.Piece(completion=place, text=text):
                        on_text(place, text)
                    case messages.Rate(tokens_per_second=rate):
                        on_rate(rate)
                    case messages.SampleDone(completions=found):
                        size = sum(len(each.text.encode()) for each in found)
                        return found if size <= MOST_RESULT_BYTES else self._failure("it gave more text than it may.")
                    case messages.Cancelled():
                        return _cancelled()
                    case messages.Unanswered(field=None) as said:
                        return FutureFailedError(said.code, said.message, said.remedy)
                    case messages.Unanswered() as said:
                        return ServiceValidationError(said.code, said.message, said.remedy, field=said.field)
        except RaycloakError as error:
            if error.code == "child_overdue":
                why = f"the text was not there after {self._limits.request_s:g} s."
                return FutureFailedError("sample_timeout", why, "Ask for fewer tokens or completions.")
            return self._failure(error.message)
        finally:
            with self._changing:
                self._present = None

    def cancel(self, name: str) -> None:
        """Ask the process to end that request before the next token; end the process if it does not."""
        with self._changing:
            if self._present is None or self._present[0] != name:
                return
            until = self._present[1]
            until.shorten(_CANCEL_S)
        # Whoever receives is told of an end, and ends a process that does not read.
        with suppress(ConnectionError, TimeoutError):
            self._child.channel.send(messages.Cancel(id=name), by=until)

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


def _cancelled() -> FutureCancelledError:
    return FutureCancelledError("sample_cancelled", "the request for text was cancelled.", "It cost nothing.")
