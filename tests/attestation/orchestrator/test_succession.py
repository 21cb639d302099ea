"""The orchestrator commits a step only as its aggregators signed it, made of the model that the run had before."""

from collections.abc import Callable

import numpy as np
import pytest

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.lineage import ModelPoint, ModelStanding, SignedStep, StepRelease
from raycloak.attestation.core.messages import open_envelope, parse, seal
from raycloak.attestation.core.roster import Roster
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.model_digest import with_state
from tests.protocol import HandRun, orchestrator_key


@pytest.fixture
def hand(tmp_path) -> HandRun:
    return HandRun(tmp_path, aggregators=2)


def logged(hand: HandRun) -> list[tuple[str, dict]]:
    entries = [(entry.kind, entry.content) for entry in hand.orchestrator._run.books.log.entries()]
    return [(kind, body) for kind, body in entries if kind in ("committed", "reproduced")]


def refusal(hand: HandRun, commit: StepCommit) -> str:
    """Return the code of a commit that is refused, by each way to make one; nothing of it is logged."""
    before, codes = logged(hand), set()
    for way in (lambda: hand.orchestrator.commit((commit,)), lambda: hand.roster(commit.step + 1, commit=commit)):
        with pytest.raises(ProtocolError) as error:
            way()
        codes.add(error.value.code)
    assert logged(hand) == before
    (code,) = codes
    return code


def test_guarantee_a_step_is_committed_with_what_its_aggregators_signed(hand) -> None:
    first = hand.advance(hand.roster())
    hand.orchestrator.commit((first,))
    second = hand.advance(hand.roster(1), 1)
    hand.orchestrator.commit((first, second))
    assert [body["releases"] for _, body in logged(hand)] == [
        [part.release.model_dump(mode="json") for part in each.released.ranges] for each in (first, second)
    ]
    assert hand.orchestrator.committed() == (first.plain, second.plain)


def test_a_later_session_commits_a_step_again_by_another_attempt(hand) -> None:
    roster, again = hand.roster(), hand.roster()
    answers = [hand.compute(each) for each in (roster, again)]
    start = hand.parameters, hand.states, hand.tensors, hand.digest
    first = hand.finish(roster, answers[0])
    hand.parameters, hand.states, hand.tensors, hand.digest = start
    second = hand.finish(again, answers[1])
    assert first.plain == second.plain
    assert first.released != second.released
    hand.orchestrator.commit((first,))
    hand.orchestrator.begin(hand.orchestrator._session._terms, "second")
    hand.orchestrator.commit((second,))
    assert [kind for kind, _ in logged(hand)] == ["committed", "reproduced"]


def signed(commit: StepCommit, hand: HandRun, **changes) -> StepCommit:
    """Return a commit whose first release has changes, under the signature of its own aggregator."""
    first, *rest = commit.released.ranges
    release = parse(StepRelease, first.release.body).model_copy(update=changes)
    part = first.model_copy(update={"release": seal(release, hand.aggregators[0]._attester.identity)})
    return with_ranges(commit, (part, *rest))


def with_ranges(commit: StepCommit, ranges: tuple) -> StepCommit:
    released = SignedStep(roster=commit.released.roster, ranges=ranges)
    return commit.model_copy(update={"released": released})


def _by_a_worker(commit: StepCommit, hand: HandRun) -> StepCommit:
    first, *rest = commit.released.ranges
    release = seal(parse(StepRelease, first.release.body), hand.workers["worker-0"]._attester.identity)
    return with_ranges(commit, (first.model_copy(update={"release": release}), *rest))


def _with_other_tensors(commit: StepCommit, hand: HandRun) -> StepCommit:
    first, *rest = commit.released.ranges
    tensors = tuple(tensor.model_copy(update={"content": bytes(32)}) for tensor in first.tensors)
    point = ModelPoint.of([*tensors, *(tensor for part in rest for tensor in part.tensors)])
    forged = with_ranges(commit, (first.model_copy(update={"tensors": tensors}), *rest))
    return forged.model_copy(update={"released_digest": point.parameters})


FORGED: dict[str, tuple[str, Callable[[StepCommit, HandRun], StepCommit]]] = {
    "unsigned": ("lineage_missing", lambda commit, _: commit.plain),
    "other parameters": (
        "lineage_broken",
        lambda commit, _: commit.model_copy(update={"released_digest": bytes(32)}),
    ),
    "another state": ("lineage_broken", lambda commit, _: commit.model_copy(update={"state_digest": bytes(32)})),
    "other tensors": ("release_mismatch", _with_other_tensors),
    "another step": ("lineage_broken", lambda commit, _: commit.model_copy(update={"step": 1})),
    "another query": ("lineage_broken", lambda commit, _: commit.model_copy(update={"query": "evaluation"})),
    "other vectors": ("lineage_broken", lambda commit, _: commit.model_copy(update={"ledger_hash": b"v" * 32})),
    "signed by a worker": ("signature", _by_a_worker),
    "ranges exchanged": ("signature", lambda commit, _: with_ranges(commit, commit.released.ranges[::-1])),
    "a range left out": ("release_mismatch", lambda commit, _: with_ranges(commit, commit.released.ranges[:1])),
    "one range of another binding": ("release_mismatch", lambda commit, hand: signed(commit, hand, binding=b"x" * 32)),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_commit_of_anything_else_is_refused(hand, name) -> None:
    code, forge = FORGED[name]
    honest = hand.advance(hand.roster())
    assert refusal(hand, forge(honest, hand)) == code
    hand.orchestrator.commit((honest,))


def test_the_release_of_another_attempt_does_not_pass_for_this_one(hand) -> None:
    earlier, roster = hand.roster(), hand.roster()
    honest = hand.advance(roster)
    replayed = honest.released.model_copy(update={"roster": earlier})
    assert refusal(hand, honest.model_copy(update={"released": replayed})) == "release_mismatch"
    own = honest.released.model_copy(update={"roster": seal(parse(Roster, roster.body), IdentityKey.generate())})
    assert refusal(hand, honest.model_copy(update={"released": own})) == "signature"


@pytest.mark.parametrize("exchanged", ["parameters", "state"])
def test_a_model_that_was_exchanged_between_two_steps_is_never_committed(hand, exchanged) -> None:
    """Members and ledger were told the same of it, so they find nothing: only the step before gave another one."""
    hand.orchestrator.commit((hand.advance(hand.roster()),))
    if exchanged == "parameters":
        hand.parameters = tuple(part + np.float32(1) for part in hand.parameters)
    else:
        hand.states = tuple({key: array + np.float32(1) for key, array in state.items()} for state in hand.states)
    states = {key: array for state in hand.states for key, array in state.items()}
    hand.tensors = with_state(np.concatenate(hand.parameters), states, hand.facts.tensors)
    hand.digest = ModelPoint.of(hand.tensors).parameters
    assert refusal(hand, hand.advance(hand.roster(1), 1)) == "lineage_broken"


def test_the_orchestrator_states_the_model_after_a_committed_step_alone(hand) -> None:
    def stated(finished: int) -> ModelStanding:
        return open_envelope(ModelStanding, hand.orchestrator.model_standing(finished), orchestrator_key().public)

    first = hand.advance(hand.roster())
    with pytest.raises(ProtocolError, match="not_committed"):
        stated(1)
    hand.orchestrator.commit((first,))
    of_run = {"run_id": hand.run_id, "manifest_digest": hand.manifest.digest()}
    start = ModelPoint.initial(hand.manifest.computation.initial_parameters)
    assert stated(0) == ModelStanding(**of_run, finished_steps=0, model=start)
    point = ModelPoint(parameters=first.released_digest, state=first.state_digest)
    assert stated(1) == ModelStanding(**of_run, finished_steps=1, model=point)
