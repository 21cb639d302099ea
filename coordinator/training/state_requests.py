"""Requests of a run's user about its state, between two steps: save the current one, make an earlier one current.

    copy    the parameters are written to a file of the caller's, which the run forgets
    save    the state is sealed as a package at once, which stays; a state that a package holds already is that package
    load    package verified and opened -> logged by the orchestrator -> current; the next step starts from it

None takes anything back: steps, charges and the record stay, and the next step has fresh noise.

Guarantee: a load is in the evidence log before anything is charged for its parameters. A refused request changes
nothing, and the run goes on.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from raycloak.attestation.core.lineage import ModelOrigin, ModelPoint
from raycloak.attestation.orchestrator.loads import StateLoad
from raycloak.coordinator.aggregation.ranges import ParameterRange
from raycloak.coordinator.checkpoints.archive import Restored
from raycloak.coordinator.checkpoints.storage import PackageStorage, located, split_location
from raycloak.coordinator.cluster.backend import Backend
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.cluster.remote import Parameters
from raycloak.coordinator.record.folder import SavedState, write_weights
from raycloak.coordinator.training.step_context import EarlierStep, Model, earlier_of
from raycloak.coordinator.vaults.calls import Reference
from raycloak.metrics.errors import ConfigError, EvidenceError, RefusedError
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.model_digest import with_state
from raycloak.workers.vectors.threads import WordThreads

if TYPE_CHECKING:
    # It makes the loads of earlier executions again.
    from raycloak.coordinator.training.steps import Training


def save(training: "Training", request: str, after: int) -> SavedState:
    """Save the state after ``after`` finished steps; return where it is once its package is published.

    The package is never deleted by the run. A repeat under the same ``request``, and another request for the same
    state, give the same package. It may be of fewer steps than were asked after, if it was loaded.

    Raises:
        RefusedError: ``no_state`` before the first step, ``no_storage`` if the run seals nothing, ``storage`` if
            it could not be written, ``other_step`` if the run is elsewhere.
    """
    folder, archive = training.order.folder, training.order.assignment.archive
    if (known := next((each for each in folder.saved() if each.request == request), None)) is not None:
        return known
    _require_step(training, after)
    if training.checkpoints is None or archive is None:
        _refuse("no_storage", "the run seals no packages.", "Give it a place for them: checkpoint.storage.")
    if training.finished_steps == 0:
        _refuse("no_state", "no step is finished, so there is nothing to save.", "Save after a step.")
    held = training.held
    if held is None:
        training.seal()
        held = training.checkpoints.settle(training.finished_steps, training.runner.context.deadline_s)
    if held is None:
        _refuse(
            "storage",
            f"the state after step {training.finished_steps} could not be written.",
            "Free the storage of the packages, then save again.",
        )
    saved = SavedState(
        request=request,
        step=held.manifest.step,
        package=located(archive.location, held.name),
        package_digest=held.manifest.digest(),
        model_digest=held.manifest.model_digest,
    )
    # At once, and before the next package is written: until then it is the newest, which is kept.
    training.checkpoints.want(saved.package_digest)
    folder.keep_saved(saved)
    return saved


def copy(training: "Training", after: int, path: Path) -> bytes:
    """Write the parameters after ``after`` finished steps, which were released, to ``path``; return their digest.

    It is a safetensors file of the caller's.

    Raises:
        RefusedError: ``no_state`` before the first step, ``copy`` if it cannot be written, ``other_step`` if the
            run is elsewhere.
    """
    _require_step(training, after)
    if training.finished_steps == 0:
        _refuse("no_state", "no step is finished, so nothing was released.", "Ask after a step.")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_weights(path, training.admitted.manifest, training.parameters(), training.model.digest)
    except OSError as error:
        _refuse("copy", f"the weights cannot be written ({error.strerror}).", "Free the service's disk.")
    return training.model.digest


def load(training: "Training", after: int, package: str) -> StateLoad:
    """Make the state of an earlier package of this run the current one, once ``after`` steps are finished.

    Guarantee: what was spent stays, and so does the number of finished steps. The evidence log has the load when
    this returns. A repeat of the newest load does nothing.

    Args:
        package: its location, as `save` states it.

    Raises:
        RefusedError: ``other_step`` if the run is elsewhere, ``step_charged`` if the next release was charged for
            the current parameters. ``package_elsewhere`` if the package is not where the run's own are. Or why
            the package is refused: a code of
            `raycloak.attestation.sealed.package_manifest.PackageRefusal`, ``storage`` or ``release_denied``.
    """
    before = training.model.digest
    try:
        loaded = _load(training, after, package)
    except (ConfigError, EvidenceError) as refusal:
        # One kind of error for everything that leaves the run as it was.
        raise RefusedError(refusal.code, refusal.message, refusal.remedy) from None
    if training.model.digest != before:
        digest = loaded.model_digest.hex()
        events = training.order.reporting.events
        events.write("load", steps=training.finished_steps, step=loaded.step, model_digest=digest)
    return loaded


def _load(training: "Training", after: int, place: str) -> StateLoad:
    archive, control = training.order.assignment.archive, training.order.session.control
    if archive is None:
        _refuse("no_storage", "the run seals no packages.", "Give it a place for them: checkpoint.storage.")
    restorer = archive.restorer(control, training.admitted.manifest)
    location, name = split_location(place)
    package = restorer.verified(PackageStorage.open(location), name)
    stated = package.manifest
    # After the verification, so that another run's package is called that.
    if location != archive.location:
        _refuse(
            "package_elsewhere",
            f"the package of step {stated.step} is not among the run's own in {archive.location}.",
            "Name the package there.",
        )
    load = StateLoad(
        after_step=after, step=stated.step, package_digest=stated.digest(), model_digest=stated.model_digest
    )
    known = control.orchestrator.loads()
    # An answer that was lost: the run has resumed from this very load, or gone on from it.
    if load in known and (training.finished_steps > after or known[-1] == load):
        return load
    _require_step(training, after)
    plan, run = training.admitted.plan, training.admitted.manifest.run_id
    due = {each.query: each.due(after, plan.mechanism.steps) for each in plan.measurements} | {"gradient": after}
    # As before a crash: what was charged for the current parameters must be computed of them.
    if any(number is not None and control.ledger.status(run, number, query).charged for query, number in due.items()):
        _refuse(
            "step_charged",
            f"the release after step {after} was charged for the current parameters.",
            "Finish that step, then load.",
        )
    restored = restorer.opened(package)
    _require_no_mix(training, restored)
    # Before the log has it: a load goes on from the newest committed step.
    training.runner.commit()
    control.orchestrator.load_state(load)
    if training.checkpoints is not None:
        training.checkpoints.want(load.package_digest)
    take(training, restored)
    return load


def take(training: "Training", restored: Restored) -> None:
    """Make a restored state the current one."""
    training.held = restored.package
    session = training.order.session
    finished, control = training.finished_steps, session.control
    origin = ModelOrigin(standing=control.orchestrator.model_standing(finished))
    model = as_model(restored, training.admitted.ranges, session.backend, origin)
    training.model = with_inputs(model, control, training.admitted.manifest, finished)


def with_inputs(model: Model, control: Control, manifest: Manifest, finished: int) -> Model:
    """Return a restored model with the input digests of the steps before it, where noise is correlated."""
    if manifest.computation.mechanism.bands == 1:
        return model

    def charged(step: int) -> bytes:
        return (control.ledger.status(manifest.run_id, step, "gradient").input_digest or b"") if step >= 0 else b""

    earlier = tuple(replace(each, input_before=charged(finished - age)) for age, each in enumerate(model.earlier, 2))
    return replace(model, input_before=charged(finished - 1), earlier=earlier)


def as_model(restored: Restored, ranges: tuple[ParameterRange, ...], backend: Backend, origin: ModelOrigin) -> Model:
    """Return a restored state as references, cut into ``ranges``; ``origin`` as in `Model`."""
    # Copies: a view would keep the whole vector alive behind each range.
    parameters = tuple(backend.put(restored.parameters[owned.start : owned.stop].copy()) for owned in ranges)
    names = ({tensor.name for tensor in owned.tensors} for owned in ranges)
    states = tuple(
        backend.put({key: value for key, value in restored.state.items() if key.rpartition("/")[0] in own})
        for own in names
    )
    specs = [each for owned in ranges for each in owned.tensors]
    earlier, kept = earlier_of(restored.state)
    threads, solved = WordThreads.of_share(), [release for _, release in earlier]
    tensors = with_state(restored.parameters, kept, specs, threads, solved)
    averaged = ModelPoint.of(tensors).averaged

    def cut(whole: np.ndarray) -> tuple[Reference[Parameters], ...]:
        return tuple(backend.put(whole[owned.start : owned.stop].copy()) for owned in ranges)

    # Their inputs are in the ledger: see `with_inputs`.
    steps = tuple(EarlierStep(cut(model), b"", cut(release)) for model, release in earlier)
    digest = restored.package.manifest.model_digest
    return Model(parameters, states, digest, tensors, origin, averaged, earlier=steps)


def _require_step(training: "Training", after: int) -> None:
    if training.finished_steps != after:
        _refuse("other_step", f"the run has finished {training.finished_steps} steps, not {after}.", "Ask again.")


def _require_no_mix(training: "Training", restored: Restored) -> None:
    computation = training.admitted.manifest.computation
    if computation.reach(training.finished_steps) or earlier_of(restored.state)[0]:
        _refuse(
            "within_mix",
            "noise is correlated, and the step after this state or the loaded one mixes sums of those before it.",
            f"Save and load after a multiple of epoch_steps, {computation.epoch_steps}.",
        )


def _refuse(code: str, message: str, remedy: str) -> NoReturn:
    raise RefusedError(code, message, remedy)
