"""Elastic membership: workers come and go between two steps, and the bytes stay the same."""

import json
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.coordinator.accounting.calibration import epsilon_against
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.metrics.errors import RefusedError
from raycloak.workers.train_worker import TrainWorker
from tests.protocol import VIRTUAL_WORKERS, Call, Fate, HandRun, WholeRun, on, on_machines, trained, whole_run
from tests.rounds import rounds

LONG = {"steps": 8, "epoch_steps": 3}


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory) -> list[str]:
    """Return the digests of eight steps in three epochs."""
    return trained(tmp_path_factory.mktemp("long"), **LONG).digests


def asks_to_leave(reply, *vectors):
    """Return a worker that was sent SIGTERM: it answers as ever, and says so."""
    return (reply.model_copy(update={"leaving": True}), *vectors)


def at_step(run: WholeRun, events: dict) -> None:
    """Call ``events[step]`` as the coordinator is about to charge that step; a second passes with each."""
    before = run.stage.disturb

    def disturb(call: Call) -> Fate:
        if call.method == "charge":
            run.stage.time.sleep(1.0)
            events.get(call.arguments[1], lambda: None)()
        return before(call)

    run.stage.disturb = disturb


def sizes(run: WholeRun) -> list[int]:
    """Return the number of workers in the roster that completed each step."""
    final = {roster.step: len(roster.workers) for roster in run.stage.rosters}
    return [final[step] for step in range(len(run.digests))]


def log_of(run: WholeRun) -> list[tuple[str, dict]]:
    path = run.folder / "evidence.jsonl"
    read_exported_log(path, run.session.orchestrator_key)
    return [(line["kind"], line["body"]) for line in map(json.loads, path.read_text().splitlines()[:-1])]


def assert_keys_went_to_admitted_only(run: WholeRun) -> None:
    """In the log's order: who is released keys stands admitted at that moment, on the evidence it was admitted by."""
    admitted: dict[str, str] = {}
    released = 0
    for kind, body in log_of(run):
        if kind == "admitted":
            admitted[body["member_id"]] = body["evidence_digest"]
        elif kind == "expelled":
            del admitted[body["member_id"]]
        elif kind == "released":
            assert admitted[body["member_id"]] == body["evidence_digest"]
            released += len(body["virtual_workers"])
    assert released >= VIRTUAL_WORKERS


# --- replacing


@pytest.mark.parametrize(("phase", "fate"), [("accept_keys", "dies after"), ("step", "hangs")])
def test_a_lost_worker_is_replaced_by_a_new_member_and_no_byte_changes(tmp_path, undisturbed_long, phase, fate):
    run = trained(tmp_path, disturb=on(phase, "worker-1", fate), **LONG)
    assert run.digests == undisturbed_long
    assert run.joined == ["worker-3"]
    assert [name for name, _ in run.left] == ["worker-1"]
    assert sizes(run)[-1] == 3
    assert run.metric("raycloak_workers_joined_total") == 1
    assert run.metric("raycloak_workers_admitted") == 3
    events = [json.loads(line)["event"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert events.count("join") == 1
    assert_keys_went_to_admitted_only(run)


def test_a_newcomer_takes_the_floor_of_its_share_and_the_rest_stays(tmp_path):
    run = trained(tmp_path, disturb=on("step", "worker-0", "dies", 1), **LONG)
    rosters = {roster.step: roster for roster in run.stage.rosters}
    before, after = rosters[1], rosters[2]
    assert len(after.member("worker-3").virtual_workers) == VIRTUAL_WORKERS // 3
    for worker in before.workers:
        assert set(after.member(worker.member_id).virtual_workers) <= set(worker.virtual_workers)


def test_a_newcomer_gets_keys_of_the_running_epoch_only(tmp_path):
    run = trained(tmp_path, disturb=on("step", "worker-1", "dies", 4), **LONG)
    epochs = [call.arguments[1] for call in run.stage.calls("release") if call.arguments[0] == "worker-3"]
    assert epochs == [1, 2], "it joined in step 5 of epochs 0-2, 3-5, 6-7"


@pytest.mark.parametrize("stage", ["prepare", "present"])
def test_a_newcomer_that_hangs_holds_up_no_step_and_is_tried_again(tmp_path, undisturbed_long, stage):
    first = on("step", "worker-1", "dies")
    hangs = on(stage, "worker-3", "hangs")
    run = whole_run(
        tmp_path,
        disturb=lambda call: first(call) or hangs(call),
        overrides=["failure.admission_deadline_s=3"],
        **LONG,
    )
    at_step(run, {})
    run.train()
    assert run.digests == undisturbed_long
    assert run.left == [("worker-1", "died"), ("worker-3", "deadline")]
    assert run.joined == ["worker-4"]
    assert run.stage.time.now == LONG["steps"], "nothing was waited for"
    assert "worker-3" in run.stage.stopped
    assert run.metric("raycloak_workers_refused_total", code="deadline") == 1


def test_a_broken_machine_is_tried_again_at_growing_intervals_and_ends_no_run(tmp_path):
    """Each newcomer dies on its way in; the run continues with its other workers, and stops trying at max_failures."""
    first = on("step", "worker-1", "dies")

    def broken(call: Call) -> Fate:
        newcomer = call.member_id.startswith("worker") and int(call.member_id.split("-")[1]) > 2
        return "dies" if newcomer and call.method == "prepare" else first(call)

    run = whole_run(tmp_path, disturb=broken, steps=22, epoch_steps=100, overrides=["failure.max_failures=5"])
    at_step(run, {})
    started: list[float] = []
    start = run.stage.start_worker
    run.stage.start_worker = lambda name: started.append(run.stage.time.now) or start(name)
    run.train()
    tries = started[3:]
    # A failure shows at the boundary after its start, a second later but for the first; then 1, 2, 4, ... s pass.
    assert [round(after - before) for before, after in pairwise(tries)] == [1, 3, 5, 9]
    assert len(run.digests) == 22
    assert [code for _, code in run.left] == ["died"] * 6


def test_a_newcomer_with_other_data_or_numerics_is_refused_by_name_and_another_joins(tmp_path, undisturbed_long):
    def other_numerics(self, mechanism) -> bytes:
        answer = TrainWorker.compute_known_answer(self, mechanism)
        self._stage.known_answer = bytes(byte ^ 1 for byte in answer)
        self._stage.check = lambda manifest: None
        return self._stage.known_answer

    def other_data(self, setup):
        facts = TrainWorker.prepare(self, setup)
        self._stage.facts = facts.model_copy(update={"num_examples": facts.num_examples + 1})
        return self._stage.facts

    def tamper(worker: TrainWorker, member_id: str) -> None:
        if member_id == "worker-3":
            worker.compute_known_answer = other_numerics.__get__(worker)
        if member_id == "worker-4":
            worker.prepare = other_data.__get__(worker)

    run = whole_run(tmp_path, tamper=tamper, disturb=on("step", "worker-1", "dies"), **LONG)
    at_step(run, {step: lambda: run.stage.time.sleep(5) for step in range(8)})
    run.train()
    assert run.left == [("worker-1", "died"), ("worker-3", "numerics_mismatch"), ("worker-4", "manifest_mismatch")]
    assert "num_examples" in run.departures[-1].message
    assert run.joined == ["worker-5"]
    assert run.digests == undisturbed_long
    assert not any(call.arguments[0] in ("worker-3", "worker-4") for call in run.stage.calls("release"))


# --- growing


def test_the_run_grows_to_max_workers_where_there_is_room(tmp_path, undisturbed_long):
    run = whole_run(tmp_path, max_workers=5, **LONG)
    run.stage.vacancies = 9
    run.train()
    assert run.joined == ["worker-3", "worker-4"]
    assert sizes(run) == [3, 5, 5, 5, 5, 5, 5, 5]
    assert run.digests == undisturbed_long
    assert_keys_went_to_admitted_only(run)


def test_without_room_or_leave_to_grow_nobody_more_is_started(tmp_path):
    full = trained(tmp_path / "full", max_workers=5)
    run = whole_run(tmp_path / "fixed")
    run.stage.vacancies = 9
    run.train()
    assert sizes(full) == sizes(run) == [3] * 3


def test_room_is_looked_for_only_every_few_seconds(tmp_path):
    run = whole_run(tmp_path, max_workers=5, **LONG)
    looks: list[float] = []
    run.stage.room = lambda: looks.append(run.stage.time.now) or 0
    at_step(run, {})
    run.train()
    assert looks == [0, 2, 4, 6]


# --- leaving


def test_a_worker_that_is_asked_to_end_leaves_after_its_step_and_is_replaced(tmp_path, undisturbed_long):
    run = trained(
        tmp_path, disturb=on("step", "worker-1", asks_to_leave, 2), overrides=["failure.max_failures=0"], **LONG
    )
    assert run.digests == undisturbed_long
    assert run.left == [("worker-1", "left")]
    assert run.joined == ["worker-3"]
    assert [outcome.commit.attempts for outcome in run.finished.outcomes] == [1] * 8
    assert sizes(run) == [3, 3, 3, 2, 3, 3, 3, 3]
    assert "worker-1" in run.stage.stopped
    assert len([call for call in run.stage.calls("step") if call.member_id == "worker-1"]) == 3
    assert run.metric("raycloak_workers_left_total", cause="left") == 1
    assert run.metric("raycloak_worker_failures_total") == 0
    assert ("expelled", {"cause": "left", "member_id": "worker-1"}) in log_of(run)


def test_a_drained_node_lets_its_worker_finish_the_step_and_go(tmp_path, undisturbed_long):
    run = whole_run(tmp_path, overrides=["failure.max_failures=0"], **LONG)
    at_step(run, {1: lambda: run.stage.drained.add("worker-2")})
    run.train()
    assert run.digests == undisturbed_long
    assert run.left == [("worker-2", "preempted")]
    assert run.joined == ["worker-3"]
    assert run.metric("raycloak_workers_left_total", cause="preempted") == 1


def test_a_worker_that_dies_while_its_node_is_drained_was_preempted(tmp_path):
    """It had to stay for want of another; that its node is gone by then is nobody's failure."""
    run = whole_run(tmp_path, num_workers=2, overrides=["failure.max_failures=0"], **LONG)
    run.stage.drained.add("worker-1")
    run.stage.disturb = on("step", "worker-1", "dies")
    run.train()
    assert run.left == [("worker-1", "preempted")]
    assert sizes(run) == [2] * 8


def test_leaving_waits_for_the_replacement_where_the_run_has_no_worker_to_spare(tmp_path, undisturbed_long):
    run = trained(tmp_path, num_workers=2, disturb=on("step", "worker-0", asks_to_leave, 1), **LONG)
    assert run.digests == undisturbed_long
    assert run.left == [("worker-0", "left")]
    assert sizes(run) == [2] * 8
    asked = [call for call in run.stage.calls("step") if call.member_id == "worker-0"]
    assert len(asked) == 3, "it took part until the newcomer was there"
    assert run.stage.time.now == 0, "no step was held up for it"
    assert all(len(roster.workers) >= 2 for roster in run.stage.rosters)


def test_a_worker_that_cannot_be_spared_goes_after_the_join_timeout_and_the_run_ends_by_name(tmp_path):
    """The replacement hangs; the worker stayed as long as the run would wait for another."""

    def disturb(call: Call) -> Fate:
        if call.method == "prepare" and call.member_id not in ("worker-0", "worker-1"):
            return "hangs"
        return asks_to_leave if (call.method, call.member_id) == ("step", "worker-0") else None

    overrides = ["failure.join_timeout_s=3", "failure.admission_deadline_s=1000"]
    run = whole_run(tmp_path, num_workers=2, disturb=disturb, overrides=overrides, **LONG)
    at_step(run, {})
    with pytest.raises(RefusedError, match="too_few_workers") as error:
        run.train()
    assert "worker-0: left" in error.value.message
    assert len(run.digests) == 4, "asked in step 0, at 1 s; gone before step 4, at 4 s"
    assert run.stage.time.now == pytest.approx(4 + 3)


# --- too few


def test_with_two_workers_of_which_one_dies_the_run_waits_for_the_replacement(tmp_path, undisturbed_long):
    run = trained(tmp_path, num_workers=2, disturb=on("step", "worker-0", "dies", 2), **LONG)
    assert run.digests == undisturbed_long
    assert run.joined == ["worker-2"]
    assert sizes(run) == [2] * 8
    assert [outcome.commit.attempts for outcome in run.finished.outcomes][2] == 2, "it joined within the step"


def test_a_node_that_takes_all_workers_along_costs_one_attempt(tmp_path, undisturbed_long):
    first = {"worker-0", "worker-1", "worker-2"}
    run = trained(
        tmp_path,
        disturb=lambda call: "dies" if (call.method, call.index) == ("step", 2) and call.member_id in first else None,
        **LONG,
    )
    assert run.digests == undisturbed_long
    assert run.joined == ["worker-3", "worker-4", "worker-5"]
    assert [outcome.commit.attempts for outcome in run.finished.outcomes] == [1, 1, 2, 1, 1, 1, 1, 1]


def test_too_few_workers_wait_up_to_the_join_timeout_and_then_every_reason_is_named(tmp_path):
    def disturb(call: Call) -> Fate:
        if call.method == "prepare" and call.member_id not in ("worker-0", "worker-1"):
            return "hangs"
        return on("step", "worker-0", "dies", 1)(call)

    run = whole_run(tmp_path, num_workers=2, disturb=disturb, overrides=["failure.join_timeout_s=50"], **LONG)
    with pytest.raises(RefusedError) as error:
        run.train()
    assert error.value.code == "too_few_workers"
    assert "worker-0: died" in error.value.message
    assert run.stage.time.now == pytest.approx(50)
    assert len(run.digests) == 1


def test_waiting_ends_early_once_nobody_more_may_be_started(tmp_path):
    fate = on("step", "worker-0", "dies", 1)
    run = whole_run(
        tmp_path,
        num_workers=2,
        disturb=lambda call: "dies" if (call.method, call.member_id) == ("prepare", "worker-2") else fate(call),
        overrides=["failure.max_failures=1"],
    )
    with pytest.raises(RefusedError, match="too_few_workers"):
        run.train()
    assert run.left == [("worker-0", "died"), ("worker-2", "died")]
    assert run.stage.time.now < 1


# --- keys


def test_a_worker_drops_keys_and_vectors_of_what_a_roster_gives_to_another(tmp_path):
    hand = HandRun(tmp_path)
    worker = hand.workers["worker-0"]
    hand.advance(hand.roster())
    assert {v for _, v in worker._stage._keys} == {0, 3, 6} == set(worker._stage._hosted.tags)
    hosting = {**hand.hosting, "worker-0": (0, 3), "worker-2": (2, 5, 6)}
    hand.place({"worker-2": (6,)})
    hand.ask("worker-0", hand.request(hand.roster(1, hosting), 1))
    assert {v for _, v in worker._stage._keys} == {0, 3} == set(worker._stage._hosted.tags)
    assert hand.code("worker-0", hand.request(hand.roster(1), 1)) == "release_denied", "until they are sent again"
    hand.place({"worker-0": (6,)})
    assert hand.code("worker-0", hand.request(hand.roster(1), 1)) == "ok"


def test_a_former_host_is_sent_its_keys_again_when_it_is_to_host_again(tmp_path, undisturbed_long):
    """Worker-3 takes over a part, and dies in the step after; what it had goes back to who had it before."""
    fates = [on("step", "worker-1", "dies"), on("step", "worker-3", "dies", 1)]
    run = trained(tmp_path, disturb=lambda call: next((f for fate in fates if (f := fate(call))), None), **LONG)
    assert run.digests == undisturbed_long
    assert [code for _, code in run.left] == ["died", "died"]


# --- keys by machine


FOUR = {
    "num_workers": 4,
    "min_workers": 3,
    "overrides": ["dp_config.colluding_workers=1", "failure.join_timeout_s=30"],
    **LONG,
    "epoch_steps": 100,
}
"""Eight virtual workers on four workers, of which three suffice, with one machine assumed to collude: it may have three
keys."""


@pytest.fixture(scope="module")
def undisturbed_four(tmp_path_factory) -> list[str]:
    """Return the digests of a run with four workers on four machines, none of which is lost."""
    home = tmp_path_factory.mktemp("four")
    return trained(home, tamper=on_machines(home, lambda member_id: member_id), **FOUR).digests


def fates(*each: Callable[[Call], Fate]) -> Callable[[Call], Fate]:
    return lambda call: next((fate for one in each if (fate := one(call))), None)


def keys_by_machine(run: WholeRun, machine_of: Callable[[str], str]) -> dict[str, set[int]]:
    """Return the virtual workers whose keys were sent to each machine, in a run with one epoch."""
    held: dict[str, set[int]] = {}
    for call in run.stage.calls("release"):
        member_id, _, virtual_workers, _ = call.arguments
        held.setdefault(machine_of(member_id), set()).update(virtual_workers)
    return held


def test_no_machine_ever_gets_more_keys_of_an_epoch_than_the_noise_allows_for(tmp_path, undisturbed_four):
    """Workers die one after the other, and each successor starts on the machine of the one that it replaces."""
    place: dict[str, str] = {f"worker-{i}": f"machine-{i}" for i in range(4)}
    place |= {"worker-4": "machine-1", "worker-5": "machine-2", "worker-6": "machine-0"}
    run = trained(
        tmp_path,
        tamper=on_machines(tmp_path, place.__getitem__),
        disturb=fates(*(on("step", f"worker-{i}", "dies", step) for i, step in ((1, 1), (2, 3), (0, 5)))),
        **FOUR,
    )
    assert [code for _, code in run.left] == ["died"] * 3
    assert max(map(len, keys_by_machine(run, place.__getitem__).values())) == 3 == run.finished.most_hosted
    assert run.digests == undisturbed_four


def test_a_worker_on_a_full_machine_makes_room_for_a_newcomer_elsewhere(tmp_path, undisturbed_four):
    """Two workers share a machine, which may have the keys of three of eight: with two others there is no placement."""
    place = {"worker-0": "machine-0", "worker-1": "machine-0", "worker-2": "machine-1", "worker-3": "machine-2"}
    closed: list[str] = []
    run = whole_run(tmp_path, tamper=on_machines(tmp_path, place.__getitem__), **{**FOUR, "num_workers": 3})
    run.stage.close_place = lambda actor: closed.append(actor.member_id)
    run.train()
    assert run.left == [("worker-0", "key_share")]
    assert closed == ["worker-0"], "its successor must not be given its place"
    assert run.digests == undisturbed_four
    assert run.finished.most_hosted == 3


def test_a_run_whose_newcomers_come_to_full_machines_ends_with_a_refusal_that_says_what_to_do(tmp_path):
    run = whole_run(tmp_path, **FOUR)
    with pytest.raises(RefusedError, match=r"each machine may get the keys of 3 of 8 .* has got 0") as error:
        run.train()
    assert error.value.code == "key_share"
    assert "Add a machine" in error.value.remedy
    assert run.left == [("worker-0", "key_share")], "one worker on each machine, then no more"
    assert run.stage.calls("charge") == []


def test_a_run_waits_for_a_newcomer_on_another_machine_and_then_ends(tmp_path):
    """Each machine is lost once; the last successor is never ready, and the other three have no room for its part."""
    place = {f"worker-{i}": f"machine-{i}" for i in range(4)} | {"worker-4": "machine-1", "worker-5": "machine-2"}
    run = whole_run(
        tmp_path,
        tamper=on_machines(tmp_path, lambda i: place.get(i, "machine-0")),
        disturb=fates(
            *(on("step", f"worker-{i}", "dies", step) for i, step in ((1, 1), (2, 3), (0, 5))),
            lambda call: "hangs" if (call.method, call.member_id) == ("prepare", "worker-6") else None,
        ),
        **{**FOUR, "overrides": [*FOUR["overrides"], "failure.admission_deadline_s=1000"]},
    )
    with pytest.raises(RefusedError, match="3 workers are on machines that leave no placement") as error:
        run.train()
    assert error.value.code == "key_share"
    assert run.stage.time.now >= 30, "the join_timeout_s"


def test_the_bound_holds_across_executions_and_the_second_gives_the_same_bytes(tmp_path, undisturbed_four):
    """The second execution knows no hosts, and its workers are started on the machines in another order."""
    held: dict[str, set[int]] = {}
    for machine_of in (lambda i: f"machine-{i[-1]}", lambda i: f"machine-{(int(i[-1]) + 1) % 4}"):
        run = trained(tmp_path, tamper=on_machines(tmp_path, machine_of), **FOUR)
        for machine, keys in keys_by_machine(run, machine_of).items():
            held.setdefault(machine, set()).update(keys)
        assert run.digests == undisturbed_four
    assert max(map(len, held.values())) == run.finished.most_hosted <= 3


def test_the_epsilon_with_one_worker_is_of_all_keys_that_its_machine_ever_had(tmp_path):
    """Without a bound: one worker after the other dies, and each successor starts on machine A, which gets 7 of 8."""
    place = {"worker-0": "A", "worker-1": "B", "worker-2": "C", "worker-3": "A", "worker-4": "A", "worker-5": "A"}
    run = trained(
        tmp_path,
        tamper=on_machines(tmp_path, place.__getitem__),
        disturb=fates(*(on("step", f"worker-{i}", "dies", index) for i, index in ((1, 1), (0, 4), (3, 3)))),
        **{**LONG, "epoch_steps": 100},
    )
    by_worker, by_machine = (keys_by_machine(run, of) for of in (str, place.__getitem__))
    most = len(by_machine["A"])
    assert (most, max(map(len, by_worker.values()))) == (7, 6)
    verdict = verdict_of(run.finished, run.folder, 1.0, "complete", ())
    mechanism, delta = run.finished.plan.mechanism, run.finished.plan.delta
    assert verdict.keys_on_one_machine == most
    assert verdict.privacy_epsilon_one_worker == epsilon_against(mechanism, most, delta, 8)


# --- everything at once


@pytest.mark.parametrize("seed", range(rounds(2)))
def test_any_schedule_of_joins_leaves_and_deaths_gives_the_same_bytes(tmp_path, undisturbed_long, seed):
    """Workers and aggregators die or hang in any phase, leave and join; one worker of each attempt is spared."""
    dice = random.Random(seed)
    run = whole_run(tmp_path, num_workers=4, max_workers=6, overrides=["failure.max_failures=1000"], **LONG)
    members = run.coordinator._members

    def disturb(call: Call) -> Fate:
        if call.method == "charge":
            run.stage.time.sleep(dice.uniform(0, 5))
            run.stage.vacancies = dice.randrange(3)
            run.stage.drained = {name for name in members.workers if dice.random() < 0.05}
        if call.method == "reduce" and dice.random() < 0.05:
            return dice.choice(["dies", "dies after", "hangs"])
        if not call.member_id.startswith("worker") or call.member_id == min(members.workers, default=""):
            return None
        if call.method == "step":
            if dice.random() < 0.15:
                return asks_to_leave
            return dice.choice(["dies", "dies after", "hangs"]) if dice.random() < 0.15 else None
        newcomer = call.member_id not in ("worker-0", "worker-1", "worker-2", "worker-3")
        return dice.choice(["dies", "dies after", "hangs"]) if newcomer and dice.random() < 0.1 else None

    run.stage.disturb = disturb
    run.train()
    assert run.digests == undisturbed_long
    assert len(run.joined) > 3
    assert len(run.left) > 3
    assert {code for _, code in run.left} >= {"died", "left"}
    assert all(2 <= len(roster.workers) <= 6 for roster in run.stage.rosters)
    assert_keys_went_to_admitted_only(run)
