"""The rule by which a ledger holds each charge of a run to the model before: a pure function of signed statements."""

from dataclasses import dataclass

from raycloak.attestation.core.lineage import ModelOrigin, ModelPoint, ModelStanding, open_release
from raycloak.attestation.core.messages import open_envelope
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.ledger.entries import RunRegistered
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.step_input import step_input


@dataclass(frozen=True, slots=True)
class AskedStep:
    """A step that a run asks to be charged for.

    Attributes:
        origin: evidence of where its model comes from.
        batches: SHA-256 of each batch that a client sent for it.
    """

    query: Query
    step: int
    input_digest: bytes
    origin: ModelOrigin
    batches: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LastStep:
    """The newest training step that a run was charged for.

    Attributes:
        state_digest: of what the update rule kept before it.
        binding: hash of the entry that bound its vectors; empty before that.
    """

    step: int
    input_digest: bytes
    state_digest: bytes
    binding: bytes


def state_before(run: RunRegistered, last: LastStep | None, asked: AskedStep) -> bytes:
    """Hold a step to the model before it; return the digest of its update rule's state, empty without a lineage.

    Guarantee: returns only if the step starts from the model that the run began with, that the aggregators of the step
    before signed, made of the model which that step was charged for, or that the run's orchestrator states. With
    correlated noise it also names the last step that was charged as the one before it.

    Args:
        last: None before the first training step.

    Raises:
        BudgetError: ``lineage_missing`` without a signed statement, ``lineage_broken`` if it is of another step or
            model. ``ledger_rolled_back`` if the run has charged or released steps that the ledger does not have.
        ProtocolError: as `raycloak.attestation.core.lineage.open_release`.
    """
    if run.lineage is None:
        return b""
    finished = last.step + 1 if last else 0
    # A measurement counts its own releases, and is of the newest model.
    if asked.query == "gradient" and asked.step != finished:
        raise _forgotten(run, f"step {asked.step} is not the next one after {finished} charged steps")
    model = _model_after(run, run.lineage.orchestrator_key, last, asked.origin)
    if model is None:
        model = ModelPoint.initial(run.lineage.initial_parameters)
    # A measurement is of the model as it is exported.
    start = model.parameters if asked.query == "gradient" else model.exported
    # With correlated noise the input names all steps before: another past would redraw what is already mixed.
    chained = last is not None and any(each.bands > 1 for each in run.mechanisms)
    before = last.input_digest if last is not None and chained else b""
    if step_input(start, asked.batches, before) != asked.input_digest:
        raise _broken(run, finished, f"{asked.query} step {asked.step} is to start from another one")
    return model.state


def _model_after(run: RunRegistered, key: bytes, last: LastStep | None, origin: ModelOrigin) -> ModelPoint | None:
    """Return the model after the last step, as it was signed; None before the first step."""
    if last is None:
        return None
    finished = last.step + 1
    if origin.standing is not None:
        stated = open_envelope(ModelStanding, origin.standing, key)
        place = run.run_id, run.manifest_digest, finished
        if (stated.run_id, stated.manifest_digest, stated.finished_steps) != place:
            raise _broken(run, finished, "the orchestrator's statement is about another run or step")
        return stated.model
    if origin.released is None:
        raise BudgetError(
            "lineage_missing",
            f"run {run.run_id} shows no signed model after {finished} steps.",
            "Give what the aggregators of the last step signed.",
        )
    if not last.binding:
        raise _forgotten(run, f"step {last.step} was released, and is not bound to its vectors")
    found = open_release(origin.released, orchestrator_key=key, run_id=run.run_id, manifest_digest=run.manifest_digest)
    if (found.query, found.step, found.binding) != ("gradient", last.step, last.binding):
        raise _broken(run, finished, "it was released in another step, or of other vectors")
    if (found.input_digest, found.before.state) != (last.input_digest, last.state_digest):
        raise _broken(run, finished, "it was made of another model or state than the last step was charged for")
    return found.after


def _forgotten(run: RunRegistered, why: str) -> BudgetError:
    return BudgetError(
        "ledger_rolled_back",
        f"the ledger has not all that run {run.run_id} has done: {why}.",
        "Put the ledger's newest state back; an older one forgets what was spent.",
    )


def _broken(run: RunRegistered, finished: int, why: str) -> BudgetError:
    return BudgetError(
        "lineage_broken",
        f"the model of run {run.run_id} after {finished} steps is refused: {why}.",
        "Resume the run from its newest package. If this comes again, something between its parts changes models.",
    )
