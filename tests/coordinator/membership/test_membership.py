"""Membership: a worker that fails is named, and the run continues as long as enough are left."""

import pytest

from raycloak.attestation.core.evidence import EvidenceClass, Presentation
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.metrics.errors import ModelError, RefusedError, RunFailedError
from raycloak.workers.train_worker import TrainWorker
from tests.anchors import INTEL_TDX_ANCHOR
from tests.protocol import Call, Fate, HandRun, WholeRun, examples, on, on_machines, trained, whole_run

PHASES = ["prepare", "compute_known_answer", "present", "accept_keys"]
LOST = [("dies", "died"), ("hangs", "deadline")]


def failure(kind, home, **arguments) -> tuple[Exception, WholeRun]:
    run = whole_run(home, **arguments)
    with pytest.raises(kind) as error:
        run.train()
    return error.value, run


# --- admission


@pytest.mark.parametrize(
    ("phase", "fate", "cause"),
    # Both ends of a worker in each phase would be the same twice: one wait asks for all of them.
    [*((phase, *fate) for phase, fate in zip(PHASES, LOST * 2, strict=True)), ("accept_keys", "dies after", "died")],
)
def test_a_worker_lost_before_the_first_step_is_named_and_the_bytes_stay_the_same(
    tmp_path, undisturbed, phase, fate, cause
):
    run = trained(tmp_path, disturb=on(phase, "worker-1", fate))
    assert run.digests == undisturbed
    assert run.left == [("worker-1", cause)]
    assert run.joined == ["worker-3"]
    assert run.finished.workers == 3


def tampered(name: str, **methods):
    """Replace methods of one worker, which is then not the code that it claims to be."""

    def tamper(worker: TrainWorker, member_id: str) -> None:
        if member_id == name:
            for method, replacement in methods.items():
                setattr(worker, method, replacement.__get__(worker))

    return tamper


def other_numerics(self: TrainWorker, mechanism) -> bytes:
    answer = TrainWorker.compute_known_answer(self, mechanism)
    self._stage.known_answer = bytes(byte ^ 1 for byte in answer)
    return self._stage.known_answer


def hidden_numerics(self: TrainWorker, mechanism) -> bytes:
    answer = other_numerics(self, mechanism)
    self._stage.check = lambda manifest: None
    return answer


def test_an_honest_worker_of_another_numerics_class_leaves_by_itself(tmp_path, undisturbed):
    run = trained(tmp_path, tamper=tampered("worker-0", compute_known_answer=other_numerics))
    assert run.left == [("worker-0", "manifest_mismatch")]
    assert "known_answer" in run.departures[0].message
    assert run.digests == undisturbed


def test_a_worker_that_hides_its_numerics_class_is_refused(tmp_path, undisturbed):
    silent = tampered("worker-0", compute_known_answer=hidden_numerics)
    run = trained(tmp_path, tamper=silent)
    assert run.left == [("worker-0", "numerics_mismatch")]
    assert run.digests == undisturbed


def test_the_majority_decides_what_the_manifest_says(tmp_path, undisturbed):
    """Also if the odd one answers first: of two classes the smaller leaves."""

    def prepare(self: TrainWorker, setup):
        facts = TrainWorker.prepare(self, setup)
        self._stage.facts = facts.model_copy(
            update={"numerics": facts.numerics.model_copy(update={"cpu_capability": "ANOTHER"})}
        )
        return self._stage.facts

    run = trained(tmp_path, tamper=tampered("worker-0", prepare=prepare))
    assert run.left == [("worker-0", "manifest_mismatch")]
    assert "numerics" in run.departures[0].message
    assert run.digests == undisturbed


def test_a_replayed_presentation_is_refused_by_name(tmp_path, undisturbed, undisturbed_epochs):
    """Worker-1 answers the challenge of the second epoch with its evidence of the first."""
    kept = []

    def replay(call: Call) -> Fate:
        if (call.method, call.member_id) != ("present", "worker-1"):
            return None
        return (lambda envelope: (kept.append(envelope) or envelope,)) if call.index == 0 else lambda _: (kept[0],)

    run = trained(tmp_path, epoch_steps=2, disturb=replay)
    assert run.left == [("worker-1", "nonce_replayed")]
    assert run.digests[:2] != undisturbed[:2], "the length of an epoch is part of the computation"
    assert run.digests == undisturbed_epochs


def swapped_key(envelope: Envelope) -> tuple[Envelope]:
    thief = IdentityKey.generate()
    honest = Presentation.model_validate_json(envelope.body)
    return (seal(honest.model_copy(update={"identity_key": thief.public}), thief),)


def test_a_worker_that_presents_a_swapped_key_is_refused_by_name(tmp_path, undisturbed):
    run = trained(tmp_path, disturb=on("present", "worker-2", swapped_key))
    assert run.left == [("worker-2", "key_not_bound")]
    assert run.digests == undisturbed


def test_a_worker_that_presents_evidence_of_another_session_is_refused_by_name(tmp_path, undisturbed):
    other = HandRun(tmp_path / "other")
    run = trained(tmp_path, disturb=on("present", "worker-2", lambda _: (other.presentations["worker-2"],)))
    assert run.left == [("worker-2", "nonce_foreign")]
    assert run.digests == undisturbed


def test_a_worker_that_presents_under_another_root_is_refused_by_name(tmp_path, undisturbed):
    """Its platform is certified by another simulator: genuine form, wrong root."""
    stranger = HandRun(tmp_path / "other").source

    def tamper(worker: TrainWorker, member_id: str) -> None:
        if member_id == "worker-2":
            worker._attester._source = stranger

    run = trained(tmp_path, tamper=tamper)
    assert run.left == [("worker-2", "root_unknown")]
    assert run.digests == undisturbed


def test_everybody_who_left_is_in_the_evidence_log(tmp_path):
    fates = {("present", "worker-2"): swapped_key, ("step", "worker-1"): "dies", ("reduce", "aggregator-0-0"): "hangs"}
    run = trained(
        tmp_path,
        num_workers=4,
        disturb=lambda call: fates.get((call.method, call.member_id)) if call.index == 0 else None,
    )
    log = (run.folder / "evidence.jsonl").read_text()
    assert '"body":{"code":"key_not_bound","member_id":"worker-2"}' in log
    assert '"body":{"cause":"died","member_id":"worker-1"}' in log
    assert '"body":{"cause":"deadline","member_id":"aggregator-0-0"}' in log
    assert run.metric("raycloak_workers_refused_total") == 1


# --- too few


def test_too_few_admitted_workers_end_the_run_before_anything_is_charged(tmp_path):
    def refuse(call: Call) -> Fate:
        return swapped_key if call.method == "present" and call.member_id in ("worker-0", "worker-2") else None

    error, run = failure(RefusedError, tmp_path, disturb=refuse)
    assert error.code == "too_few_workers"
    assert "worker-0: key_not_bound" in error.message
    assert "worker-2: key_not_bound" in error.message
    assert run.stage.calls("charge") == []
    assert run.stage.calls("release") == []


def test_without_any_worker_there_is_no_run(tmp_path):
    for phase in PHASES[:2]:
        error, run = failure(
            RunFailedError, tmp_path / phase, disturb=lambda call, at=phase: "dies" if call.method == at else None
        )
        assert error.code == "too_few_workers"
        assert "worker-1: died" in error.message
        assert run.stage.calls("charge") == []


def test_a_model_or_dataset_that_cannot_be_trained_is_the_users_error_not_the_workers(tmp_path):
    error, run = failure(ModelError, tmp_path, model="tests.models:with_batch_norm")
    assert error.code == "mixing_layer"
    assert run.departures == []
    assert run.stage.calls("charge") == []


def test_an_aggregator_that_cannot_be_started_ends_the_run_by_name(tmp_path):
    error, run = failure(RunFailedError, tmp_path, disturb=on("present", "aggregator-0-0", "dies"))
    assert error.code == "unreachable"
    assert "aggregator-0-0" in error.message
    assert run.stage.calls("charge") == []


def dies_with(*successors: str):
    """Return what becomes of calls where the first aggregator dies in a step and these successors when they begin."""
    dying = {("reduce", "aggregator-0-0"), *(("present", each) for each in successors)}
    return lambda call: "dies" if (call.method, call.member_id) in dying else None


def test_a_successor_that_dies_with_its_predecessors_node_is_replaced_once_more(tmp_path, undisturbed):
    run = trained(tmp_path, disturb=dies_with("aggregator-0-1"))
    assert run.digests == undisturbed
    assert run.left == [("aggregator-0-0", "died")]
    assert [each.aggregators[0].member_id for each in run.stage.rosters][-1] == "aggregator-0-2"


def test_an_aggregator_without_a_successor_ends_the_run_by_name(tmp_path):
    error, _ = failure(RunFailedError, tmp_path, disturb=dies_with("aggregator-0-1", "aggregator-0-2"))
    assert error.code == "unreachable"
    assert "aggregator-0-2" in error.message


# --- placing


@pytest.mark.usefixtures("done")
def test_a_worker_that_opened_other_data_leaves_and_its_part_is_placed_again(tmp_path, undisturbed):
    """The data this run began with is bound by its first commitments."""
    features, labels = examples()
    changed = features.copy()
    changed[7, 0] += 1
    dataset = HandRun(tmp_path / "other", data=(changed, labels)).workers["worker-0"]._stage.planned.workload.dataset

    def tamper(worker: TrainWorker, member_id: str) -> None:
        def known(self, mechanism):
            self._stage.dataset = dataset
            return TrainWorker.compute_known_answer(self, mechanism)

        if member_id == "worker-2":
            worker.compute_known_answer = known.__get__(worker)

    run = trained(tmp_path, tamper=tamper)
    assert run.left == [("worker-2", "data_changed")]
    assert run.digests == undisturbed


def test_each_key_goes_to_its_host_only_and_the_most_any_held_is_counted(tmp_path):
    """Worker-1 is lost in the second step; the newcomer is given a share in the third."""
    tamper = on_machines(tmp_path, lambda member_id: member_id)
    run = trained(tmp_path, num_workers=4, tamper=tamper, disturb=on("step", "worker-1", "dies", 1))
    held: dict[str, set[int]] = {}
    for call in run.stage.calls("release"):
        member_id, epoch, virtual_workers, _ = call.arguments
        assert epoch == 0
        assert not held.get(member_id, set()) & set(virtual_workers)
        held.setdefault(member_id, set()).update(virtual_workers)
    assert {name: len(keys) for name, keys in held.items()} == {
        "worker-0": 3,
        "worker-1": 2,
        "worker-2": 3,
        "worker-3": 2,
        "worker-4": 2,
    }
    assert run.finished.most_hosted == 3, "also if they were given away again"


def test_only_moved_virtual_workers_get_new_hosts(tmp_path):
    run = trained(tmp_path, disturb=on("step", "worker-0", "dies", 1))
    before, after = (roster for roster in run.stage.rosters if roster.step == 1)
    for name in ("worker-1", "worker-2"):
        assert set(before.member(name).virtual_workers) <= set(after.member(name).virtual_workers)


# --- epochs


def test_each_epoch_rests_on_fresh_evidence_of_everybody(tmp_path):
    run = trained(tmp_path, epoch_steps=1, aggregators=3)
    presented = [call.member_id for call in run.stage.calls("present")]
    members = {"worker-0", "worker-1", "worker-2", "aggregator-0-0", "aggregator-1-1", "aggregator-2-2"}
    assert {name: presented.count(name) for name in members} == dict.fromkeys(members, 3)
    assert [call.arguments[1] for call in run.stage.calls("release")] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    shown = [{each.evidence_digest for each in roster.members} for roster in run.stage.rosters]
    assert len(shown[0] | shown[1] | shown[2]) == 3 * len(members)


@pytest.fixture(scope="module")
def undisturbed_epochs(tmp_path_factory) -> list[str]:
    """Return the digests of three steps in two epochs."""
    return trained(tmp_path_factory.mktemp("epochs"), epoch_steps=2).digests


@pytest.mark.parametrize(("phase", "fate", "cause"), [("present", *LOST[1]), ("accept_keys", *LOST[0])])
def test_a_worker_lost_between_two_epochs_changes_no_byte(tmp_path, undisturbed_epochs, phase, fate, cause):
    run = trained(tmp_path, epoch_steps=2, disturb=on(phase, "worker-0", fate, 1))
    assert run.digests == undisturbed_epochs
    assert run.left == [("worker-0", cause)]


def test_an_aggregator_lost_between_two_epochs_is_replaced(tmp_path, undisturbed_epochs):
    run = trained(tmp_path, epoch_steps=2, disturb=on("present", "aggregator-0-0", "dies", 1))
    assert run.digests == undisturbed_epochs
    assert run.left == [("aggregator-0-0", "died")]
    assert [each.aggregators[0].member_id for each in run.stage.rosters] == [
        "aggregator-0-0",
        "aggregator-0-0",
        "aggregator-0-1",
    ]


def test_a_run_whose_policy_asks_for_hardware_refuses_simulated_workers(tmp_path):
    """By name, with exit code 3, and before anything is charged; the simulator's root being known changes nothing."""
    run = whole_run(tmp_path)
    known = run.session.policy
    accepted = {
        "accepted_classes": (EvidenceClass.INTEL_TDX,),
        "anchors": (*known.anchors, INTEL_TDX_ANCHOR),
        "tdx": known.tdx.model_copy(update=dict.fromkeys(("rtmr0", "rtmr1", "rtmr2", "rtmr3"), "any")),
    }
    run.change(policy=known.model_copy(update=accepted))
    with pytest.raises(RefusedError) as refusal:
        run.train()
    assert (refusal.value.code, refusal.value.exit_code) == ("too_few_workers", 3)
    assert {code for _, code in run.left} == {"simulator_not_allowed"}
    assert run.stage.calls("charge") == []
