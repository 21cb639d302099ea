"""Samples of clients: weights and a request of the wire in, completions of the wire out.

Weights are a package that a client saved, or a copy that a driver wrote for the sample. The service is a recipient of
the packages of its runs, by a key of its own. It opens one only after both signatures, the run and every byte are
verified, into a file that it alone can read and that goes when newer weights come.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

from raycloak.attestation.sealed.package_keys import TrustStore, create_recipient, load_recipient_key, load_signer
from raycloak.coordinator.checkpoints.reader import Expected, open_to_file, verify_package
from raycloak.coordinator.checkpoints.storage import STORAGE_ERRORS, PackageStorage, one_line, split_location
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.service.sampling.requests import COPY_SUFFIX, SampleRequest, request_of
from raycloak.coordinator.service.sampling.sampler import Outcome, Sampler, SampleSource
from raycloak.metrics.errors import ConfigError, RaycloakError
from raycloak.metrics.service_errors import FutureCancelledError, FutureFailedError, ServiceError

_KEY = "training-service.key"


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


@dataclass(slots=True)
class _Sample:
    """A sample under way. ``cancel`` is set once the sampler has it."""

    operation_id: str
    tenant: str
    package: str
    run: Path
    request: SampleRequest
    cancelled: Event = field(default_factory=Event)
    cancel: Callable[[], None] | None = None


@dataclass(slots=True)
class _Opened:
    """The newest weights of a run that lie open, and how many samples still need each file."""

    newest: Path
    users: dict[Path, int] = field(default_factory=dict)


class PackageSampler:
    """The samples of all clients, from packages of their runs and from copies of weights.

    Guarantee: text comes from weights that a run's orchestrator has signed as released, of that run, and from no
    others; or from a copy, which must have the digest that its name has.

    Args:
        folder: of the service's key, and of the opened weights, which are removed when this object is made.
        signer: public file of the site's signer of packages; it is read when the first package is opened.
        on_tokens: called with an operation, the place of a completion in it, and a piece of its text.
        on_rate: called with an operation and its tokens per second by now, a few times a second.
        on_done: called once with an operation, and its completions or else the cause for which there are none.
            All are called from threads of this object.
    """

    def __init__(
        self,
        sampler: Sampler,
        folder: Path,
        signer: Path,
        on_tokens: Callable[[str, int, str], None],
        on_rate: Callable[[str, float], None],
        on_done: Callable[[str, list[wire.Completion], ServiceError | None], None],
    ) -> None:
        self._sampler = sampler
        self._key = folder / _KEY
        self._signer = signer
        self._folder = folder / "sampled"
        self._on_tokens, self._on_rate, self._on_done = on_tokens, on_rate, on_done
        self._lock = Lock()
        self._samples: dict[str, _Sample] = {}
        self._opened: dict[Path, _Opened] = {}
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A service that was killed left them.
        for left in self._folder.iterdir():
            left.unlink()
        # One: a package is read once for all samples that wait for it.
        self._opener = ThreadPoolExecutor(1, "package-opener")

    def submit(self, operation_id: str, tenant: str, package: str, run_dir: str, request: wire.Sample) -> None:
        """See `raycloak.coordinator.service.ports.SamplerPort`."""
        sample = _Sample(operation_id, tenant, package, Path(run_dir), request_of(request))
        with self._lock:
            self._samples[operation_id] = sample
        self._opener.submit(self._begin, sample)

    def cancel(self, operation_id: str) -> None:
        """Cancel a sample before its next token; do nothing if it has ended."""
        with self._lock:
            sample = self._samples.get(operation_id)
            if sample is None:
                return
            sample.cancelled.set()
            cancel = sample.cancel
        if cancel is not None:
            cancel()

    def close(self) -> None:
        """End all samples and the sampler, and remove the opened weights."""
        with self._lock:
            for sample in self._samples.values():
                sample.cancelled.set()
        self._opener.shutdown()
        self._sampler.close()
        for left in self._folder.iterdir():
            left.unlink()

    def _begin(self, sample: _Sample) -> None:
        parameters: Path | None = None
        try:
            if sample.cancelled.is_set():
                raise FutureCancelledError("sample_cancelled", "the sample was cancelled.")
            source, parameters = self._source(sample)
            used = parameters
            handle = self._sampler.submit(
                sample.tenant,
                source,
                sample.request,
                lambda place, text: self._on_tokens(sample.operation_id, place, text),
                lambda rate: self._on_rate(sample.operation_id, rate),
                lambda outcome: self._end(sample, used, outcome),
            )
        except RaycloakError as error:
            self._end(sample, parameters, error)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the operation must end
            failed = RaycloakError("sample_failed", f"the package cannot be opened ({type(error).__name__}).")
            self._end(sample, parameters, failed)
            return
        with self._lock:
            sample.cancel = handle.cancel
            late = sample.cancelled.is_set()
        if late:
            handle.cancel()

    def _source(self, sample: _Sample) -> tuple[SampleSource, Path | None]:
        """Return the weights of a sample, and the file of them that is this object's; None for a copy."""
        if sample.package.endswith(COPY_SUFFIX):
            copy = Path(sample.package)
            return SampleSource(sample.run, copy, copy.stem), None
        parameters, digest = self._open(sample)
        return SampleSource(sample.run, parameters, digest), parameters

    def _open(self, sample: _Sample) -> tuple[Path, str]:
        """Return a file of the package's weights and their digest; the file stays as long as the sample.

        Raises:
            EvidenceError: why the package is refused.
            ConfigError: ``storage``, ``signer``, ``recipient``, ``not_a_run`` or ``no_weights``.
        """
        manifest = RunFolder.open(sample.run).manifest()
        if manifest is None:
            raise ConfigError("no_weights", "the run has released no weights yet.", "Finish a step first.")
        trust = TrustStore.of("site", load_signer(self._signer))
        location, name = split_location(sample.package)
        expected = Expected(run=manifest.digest(), run_id=manifest.run_id)
        try:
            package = verify_package(PackageStorage.open(location), name, trust, expected)
            digest = package.manifest.model_digest.hex()
            path = self._folder / f"{manifest.run_id}-{digest}.safetensors"
            if not path.exists():
                open_to_file(package, package.unwrap(load_recipient_key(self._key)), path)
        except STORAGE_ERRORS as error:
            raise ConfigError(
                "storage", f"a package cannot be read: {one_line(error)}.", "Ask the operator to look at the storage."
            ) from None
        self._take(sample.run, path)
        return path, digest

    def _take(self, run: Path, path: Path) -> None:
        with self._lock:
            opened = self._opened.setdefault(run, _Opened(path))
            former, opened.newest = opened.newest, path
            opened.users[path] = opened.users.get(path, 0) + 1
            if former != path and not opened.users.get(former):
                former.unlink()

    def _end(self, sample: _Sample, parameters: Path | None, outcome: Outcome | RaycloakError) -> None:
        with self._lock:
            del self._samples[sample.operation_id]
            if parameters is not None:
                opened = self._opened[sample.run]
                opened.users[parameters] -= 1
                if not opened.users[parameters]:
                    del opened.users[parameters]
                    if parameters != opened.newest:
                        with suppress(FileNotFoundError):
                            parameters.unlink()
        if isinstance(outcome, RaycloakError):
            failed = FutureFailedError(outcome.code, outcome.message, outcome.remedy)
            cause = outcome if isinstance(outcome, ServiceError) else failed
            self._on_done(sample.operation_id, [], cause)
            return
        self._on_done(
            sample.operation_id,
            [
                wire.Completion(
                    prompt=each.prompt, text=each.text, finish_reason=each.finish_reason, tokens=each.tokens
                )
                for each in outcome
            ],
            None,
        )
