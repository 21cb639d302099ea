"""Ledger and orchestrator may be lost at any moment: the run continues with the same bytes and no second charge."""

import itertools
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from raycloak.attestation.core.lineage import INITIAL
from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.coordinator.cluster.backend import ActorLost, LocalBackend, Settled
from raycloak.coordinator.cluster.control import Control, LedgerFace, Restart, _Overlaps
from raycloak.coordinator.cluster.remote import Actor
from raycloak.coordinator.ledger.entries import StepCharged, VectorsBound
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.metrics.errors import BudgetError, ConfigError, RaycloakError, RunFailedError
from tests.protocol import Call, Fate, WholeRun, on, trained, whole_run

STEPS = 3
AHEAD = {"load_accountant", "price"}
"""Questions that nobody waits for: a later one computes what their loss left undone."""
LEDGER = {"view", "outlook", "charge", "bind_vectors"} | AHEAD
ORCHESTRATOR = {"key_commitments", "begin", "challenge", "admit", "release", "record_data"} | {
    *("open_step", "expel", "commit", "most_hosted", "loads", "finish", "view", "review", "present"),
}


def role_of(call: Call) -> str | None:
    role = call.member_id.partition("-")[0]
    return role if role in ("ledger", "orchestrator") else None


class Losing:
    """A backend that gives each method of the two its fate at its ``nth`` question, whichever incarnation is asked."""

    def __init__(self, fate: Fate, nth: int, *methods: str) -> None:
        self.fate, self.nth, self.methods = fate, nth, methods
        self.asked: Counter[tuple[str, str]] = Counter()
        self.lost: set[tuple[str, str]] = set()

    def __call__(self, call: Call) -> Fate:
        if (call.method, call.member_id, call.index) == ("step", "worker-1", 1):
            return "dies"  # so that somebody is expelled, and a roster asked for a step ahead is of no use
        role = role_of(call)
        if role is None or (self.methods and call.method not in self.methods):
            return None
        place = role, call.method
        self.asked[place] += 1
        if self.asked[place] != self.nth + 1:
            return None
        self.lost.add(place)
        return self.fate


def check(run: WholeRun, undisturbed: list[str]) -> None:
    """Require the bytes of an undisturbed run; one charge, binding and commit per step; and records that hold."""
    assert run.digests == undisturbed
    path = run.folder / "evidence.jsonl"
    read_exported_log(path, run.session.orchestrator_key)
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    committed = [line["body"] for line in lines if line["kind"] == "committed"]
    assert [(body["step"], body["released_digest"]) for body in committed] == list(enumerate(undisturbed))
    assert [line["kind"] for line in lines].count("finished") == 1
    rosters = [(line["body"]["step"], line["body"]["attempt"]) for line in lines if line["kind"] == "roster"]
    assert len(set(rosters)) == len(rosters)
    ledger = PrivacyLedger(f"sqlite:///{run.home / 'ledger.sqlite'}")
    ledger.verify()
    history = list(ledger.history())
    ledger.close()
    charged = [entry.event.step for entry in history if isinstance(entry.event, StepCharged)]
    assert charged == [body["step"] for body in committed]
    bound = [entry for entry in history if isinstance(entry.event, VectorsBound)]
    assert [(entry.event.step, entry.sequence, entry.hash.hex()) for entry in bound] == [
        (body["step"], body["ledger_sequence"], body["ledger_hash"]) for body in committed
    ]


@pytest.mark.parametrize(
    ("fate", "nth"), [("dies", 0), ("dies after", 0), ("hangs", 0), ("dies", 1), ("dies after", 2)]
)
def test_the_two_are_lost_at_the_nth_question_of_each_method(tmp_path, undisturbed, fate, nth):
    losing = Losing(fate, nth)
    run = trained(tmp_path, disturb=losing, epoch_steps=100)
    check(run, undisturbed)
    if nth == 0:
        assert {method for role, method in losing.lost if role == "ledger"} == LEDGER
        assert {method for role, method in losing.lost if role == "orchestrator"} == ORCHESTRATOR
    cause = "deadline" if fate == "hangs" else "died"
    assert {each for _, each in run.restarts} == {cause}
    # The second begin is part of a restart; a roster that nobody needs any more is not missed.
    waited = [each for each in losing.lost if each[1] not in AHEAD]
    assert len(waited) - 2 <= len(run.restarts) <= len(losing.lost)


@pytest.mark.parametrize("fate", ["dies", "dies after"])
@pytest.mark.parametrize("method", ["charge", "open_step"])
def test_one_is_lost_in_every_step(tmp_path, undisturbed, method, fate):
    questions = itertools.count()
    lost = (fate, None)
    run = trained(tmp_path, disturb=lambda call: lost[next(questions) % 2] if call.method == method else None)
    check(run, undisturbed)
    assert len(run.restarts) == STEPS
    assert [roster.ratchet for roster in run.stage.rosters] == sorted(roster.ratchet for roster in run.stage.rosters)


@pytest.mark.parametrize("fate", ["dies", "dies after"])
def test_a_generated_secret_is_destroyed_by_whichever_incarnation_finishes(tmp_path, fate):
    run = trained(tmp_path, secret=None, disturb=on("finish", "orchestrator", fate))
    check(run, run.digests)
    assert not list(tmp_path.rglob("*.secret"))


def test_a_restart_is_told_to_who_watches(tmp_path):
    run = trained(tmp_path, disturb=on("charge", "ledger", "dies", 1))
    assert run.restarts == [("ledger", "died")]
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    (event,) = [line for line in lines if line["event"] == "restart"]
    assert (event["role"], event["cause"]) == ("ledger", "died")
    assert run.metric("raycloak_step_phase_duration_seconds_count", phase="recover") == 1


@pytest.mark.parametrize(("method", "role"), [("charge", "ledger"), ("open_step", "orchestrator")])
def test_one_that_is_lost_too_often_ends_the_run_by_name(tmp_path, method, role):
    losing = {"charge": lambda call: call.arguments[1] == 1, "open_step": lambda call: call.arguments[0] == 1}[method]
    run = whole_run(
        tmp_path,
        overrides=["failure.max_failures=3"],
        disturb=lambda call: "dies" if call.method == method and losing(call) else None,
    )
    with pytest.raises(RunFailedError) as error:
        run.train()
    assert (error.value.code, error.value.step) == ("unreachable", 1)
    for part in (role, method, "died", "3 restarts"):
        assert part in error.value.message
    assert error.value.spent_epsilon is not None
    assert len(run.digests) == 1
    assert run.restarts == [(role, "died")] * 3


# --- the questions


@dataclass(frozen=True)
class Terms:
    """The terms of a run, as far as control looks at them."""

    collateral: str


class Counting:
    """An actor that answers with its own number, whatever of the two it stands for."""

    def __init__(self, number: int) -> None:
        self.number = number

    def view(self) -> int:
        return self.number

    def open_step(self, *step: object) -> int:
        return self.number

    def charge(self, *step: object) -> int:
        self.charged = step
        return self.number

    def begin(self, *terms: object) -> None:
        self.terms = terms

    def take_collateral(self, collateral: str) -> None:
        assert self.terms[0].collateral != collateral

    def finish(self, *ending: object) -> None:
        pass

    def hash_at(self, sequence: int) -> None:
        raise BudgetError("cap_exceeded", "spent")


class Plain(LocalBackend):
    """Hands values over as they are, because a counting actor takes and answers what no signature allows."""

    def call(self, actor, method, *args, returns=1):
        if actor.member_id in self._stopped:
            return (Settled(error=ActorLost("died")),)
        try:
            return (Settled(getattr(actor.handle, method.__name__)(*args)),)
        except RaycloakError as error:
            return (Settled(error=error),)


class Bench:
    """A control over counting actors."""

    def __init__(self, max_restarts: int = 5) -> None:
        self.backend = Plain(Counting, Counting)
        self.started: list[Actor] = []
        self.told: list[Restart] = []
        self.fails: list[Exception] = []
        actors = {"ledger": self.start("ledger"), "orchestrator": self.start("orchestrator")}
        self.control = Control(self.backend, actors, self.start, 1.0, max_restarts, self.told.append)

    def start(self, role: str) -> Actor:
        if len(self.started) >= 2 and self.fails:
            raise self.fails.pop()
        self.started.append(Actor(f"{role}-{len(self.started)}", Counting(len(self.started))))
        return self.started[-1]

    def lose(self, role: str) -> None:
        self.backend.stop(self.control.actors[role])


def test_all_questions_to_a_lost_incarnation_are_asked_again_of_one_successor():
    bench = Bench()
    bench.lose("orchestrator")
    pending = [bench.control.orchestrator.open_step(step, {}, (), ()) for step in range(3)]
    other = bench.control.ledger.charge("run", 0, b"", b"")
    assert [each.result() for each in pending] == [2, 2, 2]
    assert other.result() == 0
    assert [(told.role, told.cause) for told in bench.told] == [("orchestrator", "died")]


def test_the_lost_incarnation_is_stopped_for_good_before_another_starts():
    bench = Bench()
    lost = bench.control.actors["ledger"]
    bench.control.replace(lost, "ledger", "view", "deadline")
    bench.control.replace(lost, "ledger", "view", "deadline")
    assert lost.member_id in bench.backend._stopped
    assert len(bench.told) == 1


def test_a_new_orchestrator_begins_what_the_former_one_had_begun():
    bench = Bench()
    bench.lose("orchestrator")
    assert bench.control.orchestrator.view() == 2
    assert not hasattr(bench.started[2].handle, "terms"), "nothing had been begun"
    bench.control.orchestrator.begin(terms := Terms("first"), "session")
    bench.lose("orchestrator")
    assert bench.control.orchestrator.view() == 3
    assert bench.started[3].handle.terms == (terms, "session")
    bench.lose("ledger")
    bench.control.ledger.view()
    assert not hasattr(bench.started[4].handle, "terms")


def test_a_new_orchestrator_begins_with_the_newest_collateral():
    bench = Bench()
    bench.control.orchestrator.begin(Terms("first"), "session")
    bench.control.orchestrator.take_collateral("second")
    bench.lose("orchestrator")
    bench.control.orchestrator.view()
    assert bench.started[2].handle.terms == (Terms("second"), "session")


@pytest.mark.parametrize(("code", "is_done"), [("secret_destroyed", True), ("run_secret", False)])
def test_a_run_is_finished_where_a_new_orchestrator_finds_the_secret_gone(code, is_done):
    bench = Bench()
    bench.lose("orchestrator")
    bench.fails = [ConfigError(code, "the secret cannot be read")]
    with nullcontext() if is_done else pytest.raises(ConfigError, match=code):
        bench.control.orchestrator.finish("evidence.jsonl", True)


def test_only_finish_takes_a_secret_that_is_gone_for_an_answer():
    bench = Bench()
    bench.lose("orchestrator")
    bench.fails = [ConfigError("secret_destroyed", "the secret is gone")]
    with pytest.raises(ConfigError, match="secret_destroyed"):
        bench.control.orchestrator.view()


def test_keywords_reach_an_actor_in_the_order_of_its_parameters():
    bench = Bench()
    digests = {"manifest_digest": b"manifest", "input_digest": b"parameters"}
    bench.control.ledger.charge("run", step=1, **digests).result()
    defaults = "gradient", None, INITIAL, ()
    assert bench.started[0].handle.charged == ("run", 1, b"parameters", b"manifest", *defaults)


def test_a_face_has_each_method_under_the_name_by_which_it_is_sent():
    with pytest.raises((AssertionError, RuntimeError)):  # Python 3.11 raises the second of the first.
        type("Misnamed", (LedgerFace,), {"spend": _Overlaps(PrivacyLedger.charge)})


def test_what_an_actor_raises_is_its_answer():
    bench = Bench()
    with pytest.raises(BudgetError, match="cap_exceeded"):
        bench.control.ledger.hash_at(0)
    assert bench.told == []


def test_a_successor_that_dies_as_it_starts_counts_as_a_restart_too():
    bench = Bench(max_restarts=3)
    bench.fails = [ActorLost("out_of_memory"), ActorLost("unreachable")]
    bench.lose("ledger")
    assert bench.control.ledger.view() == 2
    assert [told.cause for told in bench.told] == ["out_of_memory"], "the newest cause"
    bench.lose("ledger")
    with pytest.raises(RunFailedError, match=r"ledger did not answer view .died., after 3 restarts"):
        bench.control.ledger.view()
