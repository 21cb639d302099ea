"""Requests of a run's user about its state, between two steps: save the current one, make an earlier one current.

    copy    the parameters are written to a file of the caller's, which the run forgets
    save    the state is sealed as a package at once, which stays; a state that a package holds already is that package
    load    package verified and opened -> logged by the orchestrator -> current; the next step starts from it

None takes anything back: steps, charges and the record stay, and the next step has fresh noise.

Guarantee: a load is in the evidence log before anything is charged for its parameters. A refused request changes
nothing, and the run goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from raycloak.attestation.orchestrator.loads import StateLoad
from raycloak.coordinator.aggregation.aggregator import State
from raycloak.coordinator.aggregation.ranges import ParameterRange
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.checkpoints.restorer import Restored
from raycloak.coordinator.checkpoints.saver import Checkpoints, Published
from raycloak.coordinator.checkpoints.storage import PackageStorage, located, split_location
from raycloak.coordinator.cluster.backend import Backend
from raycloak.coordinator.record.folder import RunFolder, SavedState, write_weights
from raycloak.coordinator.training.model import Model
from raycloak.coordinator.training.step_context import StepContext
from raycloak.metrics.errors import ConfigError, EvidenceError, RefusedError


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A request to save the state after ``after`` finished steps; a repeat under the same ``request`` is the same."""

    request: str
    after: int


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to go on from a package of this run once ``after`` steps are finished.

    Attributes:
        package: location of the package, as :class:`PackagedState` has it.
    """

    after: int
    package: str


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """A request to write the parameters after ``after`` finished steps to ``path``, a safetensors file."""

    after: int
    path: Path


@dataclass(frozen=True, slots=True)
class PackagedState:
    """A saved state.

    Attributes:
        package: location of the package that holds it.
        step: number of finished steps behind the package; fewer than were asked after if it was loaded.
    """

    package: str
    package_digest: bytes
    model_digest: bytes
    step: int


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A loaded state; ``step`` counts the finished steps behind it, and the run's own count stays as it was."""

    package_digest: bytes
    model_digest: bytes
    step: int


class Between(Protocol):
    """A training between two steps; see `raycloak.coordinator.training.steps.Training`."""

    model: Model
    finished_steps: int
    checkpoints: Checkpoints | None

    @property
    def is_over(self) -> bool:
        """Return whether no step is left."""
        ...

    def save(self, request: SaveRequest) -> PackagedState:
        """Save the current state; as `StateKeeper.save`."""
        ...

    def copy(self, request: CopyRequest) -> bytes:
        """Write the current parameters to a file; as `StateKeeper.copy`."""
        ...

    def load(self, request: LoadRequest) -> LoadedState:
        """Go on from an earlier state; as `StateKeeper.load`."""
        ...

    def seal(self) -> None:
        """Hand the current state over to be sealed, unless it was already."""
        ...

    def commit(self) -> None:
        """Commit all finished steps."""
        ...

    def parameters(self) -> np.ndarray:
        """Return the current parameters, float32[d]."""
        ...

    def charged_next(self) -> bool:
        """Return whether anything was charged for the current parameters, and so must be computed of them."""
        ...


@dataclass(slots=True)
class StateKeeper:
    """Saves and loads states of one run.

    Attributes:
        archive: where the run's packages are; None if it seals none.
        held: the package that holds the current state; None once a step has changed it.
    """

    context: StepContext
    archive: Archive | None
    ranges: tuple[ParameterRange, ...]
    folder: RunFolder
    held: Published | None = None

    def save(self, between: Between, request: SaveRequest) -> PackagedState:
        """Save the current state; return where it is once its package is published.

        The package is never deleted by the run. A repeated request, and another one for the same state, give the
        same package.

        Raises:
            RefusedError: ``no_state`` before the first step, ``no_storage`` if the run seals nothing, ``storage`` if
                it could not be written, ``other_step`` if the run is elsewhere.
        """
        states = self.folder.saved()
        if (known := next((each for each in states if each.request == request.request), None)) is not None:
            return PackagedState(known.package, known.package_digest, known.model_digest, known.step)
        _require_step(between, request.after)
        if between.checkpoints is None or self.archive is None:
            _refuse("no_storage", "the run seals no packages.", "Give it a place for them: checkpoint.storage.")
        if between.finished_steps == 0:
            _refuse("no_state", "no step is finished, so there is nothing to save.", "Save after a step.")
        held = self.held or self._published(between, between.checkpoints)
        location, package = located(self.archive.location, held.name), held.manifest
        saved = PackagedState(location, package.digest(), package.model_digest, package.step)
        # At once, and before the next package is written: until then it is the newest, which is kept.
        between.checkpoints.want(saved.package_digest)
        self.folder.keep_saved(
            SavedState(
                request=request.request,
                step=saved.step,
                package=saved.package,
                package_digest=saved.package_digest,
                model_digest=saved.model_digest,
            )
        )
        return saved

    def copy(self, between: Between, request: CopyRequest) -> bytes:
        """Write the current parameters, which were released, to a file that is the caller's; return their digest.

        Raises:
            RefusedError: ``no_state`` before the first step, ``copy`` if it cannot be written, ``other_step`` if the
                run is elsewhere.
        """
        _require_step(between, request.after)
        if between.finished_steps == 0:
            _refuse("no_state", "no step is finished, so nothing was released.", "Ask after a step.")
        try:
            request.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_weights(request.path, self.context.manifest, between.parameters(), between.model.digest)
        except OSError as error:
            _refuse("copy", f"the weights cannot be written ({error.strerror}).", "Free the service's disk.")
        return between.model.digest

    def _published(self, between: Between, checkpoints: Checkpoints) -> Published:
        between.seal()
        published = checkpoints.settle(between.finished_steps, self.context.deadline_s)
        if published is None:
            _refuse(
                "storage",
                f"the state after step {between.finished_steps} could not be written.",
                "Free the storage of the packages, then save again.",
            )
        return published

    def load(self, between: Between, request: LoadRequest) -> LoadedState:
        """Make the state of an earlier package of this run the current one.

        Guarantee: what was spent stays, and so does the number of finished steps. The evidence log has the load when
        this returns. A repeat of the newest load does nothing.

        Raises:
            RefusedError: ``other_step`` if the run is elsewhere, ``step_charged`` if the next release was charged for
                the current parameters. ``package_elsewhere`` if the package is not where the run's own are. Or why
                the package is refused: a code of
                `raycloak.attestation.sealed.package_manifest.PackageRefusal`, ``storage`` or ``release_denied``.
        """
        try:
            return self._load(between, request)
        except (ConfigError, EvidenceError) as refusal:
            # One kind of error for everything that leaves the run as it was.
            raise RefusedError(refusal.code, refusal.message, refusal.remedy) from None

    def _load(self, between: Between, request: LoadRequest) -> LoadedState:
        if self.archive is None:
            _refuse("no_storage", "the run seals no packages.", "Give it a place for them: checkpoint.storage.")
        restorer = self.archive.restorer(self.context.control, self.context.manifest)
        location, name = split_location(request.package)
        package = restorer.verified(PackageStorage.open(location), name)
        stated = package.manifest
        # After the verification, so that another run's package is called that.
        if location != self.archive.location:
            _refuse(
                "package_elsewhere",
                f"the package of step {stated.step} is not among the run's own in {self.archive.location}.",
                "Name the package there.",
            )
        loaded = LoadedState(stated.digest(), stated.model_digest, stated.step)
        load = StateLoad(
            after_step=request.after,
            step=loaded.step,
            package_digest=loaded.package_digest,
            model_digest=loaded.model_digest,
        )
        known = self.context.control.orchestrator.loads()
        # An answer that was lost: the run has resumed from this very load, or gone on from it.
        if load in known and (between.finished_steps > request.after or known[-1] == load):
            return loaded
        _require_step(between, request.after)
        if between.charged_next():
            _refuse(
                "step_charged",
                f"the release after step {request.after} was charged for the current parameters.",
                "Finish that step, then load.",
            )
        restored = restorer.opened(package)
        # Before the log has it: a load goes on from the newest committed step.
        between.commit()
        self.context.control.orchestrator.load_state(load)
        if between.checkpoints is not None:
            between.checkpoints.want(loaded.package_digest)
        between.model = self.take(restored)
        return loaded

    def take(self, restored: Restored) -> Model:
        """Return a restored state as the current model."""
        self.held = Published(restored.name, restored.package)
        return as_model(restored, self.ranges, self.context.backend)

    def wanted(self, loads: Sequence[StateLoad]) -> set[bytes]:
        """Return the digests of the packages that were asked for, or that a resume or replay of ``loads`` needs."""
        saved = {state.package_digest for state in self.folder.saved()}
        return saved | {load.package_digest for load in loads}

    def follow(self, load: StateLoad) -> Model:
        """Return the model of a load that the log has, for an execution that repeats it."""
        assert self.archive is not None, "the run that loaded a package had a place for it"
        return self.take(self.archive.restorer(self.context.control, self.context.manifest).loaded(load))


def as_model(restored: Restored, ranges: tuple[ParameterRange, ...], backend: Backend) -> Model:
    """Return a restored state as references, cut into ``ranges``."""
    flat = np.concatenate(restored.parameters)
    merged = {key: value for state in restored.states for key, value in state.items()}
    # Copies: a view would keep the whole vector alive behind each range.
    parameters = tuple(backend.put(flat[owned.start : owned.stop].copy()) for owned in ranges)
    states = tuple(backend.put(_state_of(merged, owned)) for owned in ranges)
    return Model(parameters, states, restored.model_digest)


def _state_of(merged: State, owned: ParameterRange) -> dict[str, np.ndarray]:
    """Return the part of an optimizer state that belongs to the tensors of a range."""
    names = {tensor.name for tensor in owned.tensors}
    return {key: value for key, value in merged.items() if key.rpartition("/")[0] in names}


def _require_step(between: Between, after: int) -> None:
    if between.finished_steps != after:
        _refuse("other_step", f"the run has finished {between.finished_steps} steps, not {after}.", "Ask again.")


def _refuse(code: str, message: str, remedy: str) -> NoReturn:
    raise RefusedError(code, message, remedy)
