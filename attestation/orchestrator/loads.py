"""The book of loads: the points between two steps at which a run continued from one of its earlier states.

The evidence log is the book, so a load and its record are one entry. A run without loads has no entry of this kind.
"""

from collections.abc import Iterator
from typing import ClassVar, Final, NoReturn

from raycloak.attestation.core.messages import Message
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.attestation.orchestrator.commits import CommitBook
from raycloak.metrics.errors import ProtocolError

LOADED: Final = "loaded"


class StateLoad(Message):
    """The state of an earlier package, which became a run's current one between two steps.

    Attributes:
        after_step: number of finished steps at which it became current; no step or charge is taken back.
        step: number of finished steps behind the package.
        package_digest: of the package, which the run published.
        model_digest: of the package's parameters.
    """

    DOMAIN: ClassVar[str] = "raycloak/state-load/v1"

    after_step: int
    step: int
    package_digest: bytes
    model_digest: bytes


class LoadBook:
    """The loads of one run."""

    def __init__(self, log: EvidenceLog, commits: CommitBook) -> None:
        self._log = log
        self._commits = commits

    def all(self) -> tuple[StateLoad, ...]:
        """Return every load of the run, in order."""
        return tuple(self._newest())[::-1]

    def record(self, load: StateLoad) -> None:
        """Log a load, in a transaction of the caller's; a repeat of the newest one does nothing.

        Guarantee: the log has only loads between the newest committed step and the next. Each is of a package that
        the run published before, and of the very parameters that it committed for that package's step.

        Raises:
            ProtocolError: ``load_refused``.
        """
        if next(self._newest(), None) == load:
            return
        if self._commits.of(load.after_step - 1) is None or self._commits.of(load.after_step) is not None:
            _refuse(f"a state was to be loaded after step {load.after_step}, which is not the newest committed one")
        committed = self._commits.of(load.step - 1)
        if committed is None or committed.released_digest != load.model_digest:
            _refuse(f"step {load.step} of this run was not committed with the parameters to be loaded")
        package = {"step": load.step, "package_digest": load.package_digest.hex()}
        if all(entry.content != package for entry in self._log.newest("published")):
            _refuse(f"this run published no such package of step {load.step}")
        self._log.append(LOADED, load.model_dump(mode="json"))

    def made(self, finished_steps: int, model_digest: bytes) -> bool:
        """Return whether the model to be exported after ``finished_steps`` was this one, by commit or by load."""
        loaded = (load.step for load in self._newest() if load.after_step == finished_steps)
        found = [self._commits.of(step - 1) for step in (finished_steps, *loaded)]
        return found[0] is not None and any(each and each.model.exported == model_digest for each in found)

    def _newest(self) -> Iterator[StateLoad]:
        return (StateLoad.model_validate_json(entry.body) for entry in self._log.newest(LOADED))


def _refuse(message: str) -> NoReturn:
    raise ProtocolError("load_refused", f"{message}.")
