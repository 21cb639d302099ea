"""The checks of a worker before it computes, and the limits of what it lets out."""

import pickle
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from raycloak.attestation.appraisal.mutual import present_orchestrator
from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.evidence import Challenge
from raycloak.attestation.core.keys import IdentityKey, Purpose, derive
from raycloak.attestation.core.messages import Envelope, open_envelope, parse, seal
from raycloak.attestation.core.roster import MaskCircle, Member, Roster
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.orchestrator.data_commitments import DataCommitments
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.metrics.errors import (
    DatasetError,
    EvidenceError,
    ModelError,
    ProtocolError,
    RaycloakError,
    RefusedError,
    RunFailedError,
)
from raycloak.metrics.registry import WORKER_PHASES
from raycloak.workers.device.step_clock import StepUsage
from raycloak.workers.messages import StepReply, StepRequest
from raycloak.workers.run_member import check_partition
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.manifest import TensorSpec
from raycloak.workers.terms.model_digest import model_digest, tensor_digests
from raycloak.workers.terms.public_sums import PublicSums
from raycloak.workers.terms.receipt import Receipt, data_root
from raycloak.workers.train_worker import TrainWorker
from raycloak.workers.vectors.payload import Header, VectorRange
from raycloak.workers.vectors.ring import decode
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from raycloak.workers.workload import PlannedWorkload
from tests.protocol import VIRTUAL_WORKERS, HandRun, computer, config, correlation, open_workload, worker_setup

COMPUTATION_CHANGES = {
    "numerics": lambda c: {"numerics": c.numerics.model_copy(update={"cpu_capability": "ANOTHER"})},
    "num_examples": lambda c: {"mechanism": c.mechanism.model_copy(update={"num_examples": 41})},
    "unit": lambda c: {"mechanism": c.mechanism.model_copy(update={"unit": "patient_id"})},
    "rows_per_unit": lambda c: {"mechanism": c.mechanism.model_copy(update={"rows_per_unit": 2})},
    "max_participations": lambda c: {
        "mechanism": c.mechanism.model_copy(update={"max_participations": 3, "sample_rate": 1.0})
    },
    "mechanism": lambda c: {"mechanism": c.mechanism.model_copy(update={"private": False})},
    "loss": lambda c: {"loss": LossSpec.of("mse")},
    "tensors": lambda c: {"tensors": (*c.tensors[:-1], TensorSpec(name="another", shape=(3,)))},
    "model_code": lambda c: {"model_code": bytes(32)},
    "loss_code": lambda c: {"loss_code": bytes(32)},
    "initial_parameters": lambda c: {"initial_parameters": bytes(32)},
    "augment_code": lambda c: {"augment_code": bytes(32)},
    "frozen": lambda c: {"frozen": bytes(32)},
    "dataset": lambda c: {"dataset": bytes(32)},
}


@pytest.fixture
def hand(tmp_path) -> HandRun:
    return HandRun(tmp_path)


@pytest.fixture(scope="module")
def still(tmp_path_factory) -> HandRun:
    """Return a run whose workers are asked for nothing but what they refuse, so that they stay where they are."""
    return HandRun(tmp_path_factory.mktemp("still"))


@pytest.fixture(scope="module")
def roster(still) -> Envelope:
    return still.roster()


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """Return the virtual workers whose vectors are computed, in order."""
    seen: list[int] = []
    genuine = VirtualWorkerComputer.vector

    def spy(self, v, *arguments):
        seen.append(v)
        return genuine(self, v, *arguments)

    monkeypatch.setattr(VirtualWorkerComputer, "vector", spy)
    return seen


def members(roster: Envelope) -> tuple[Member, ...]:
    return Roster.model_validate_json(roster.body).members


def refused(function, *arguments) -> str:
    with pytest.raises(RaycloakError) as error:
        function(*arguments)
    return error.value.code


# --- what leaves


def test_an_answer_is_a_signed_header_and_one_masked_vector_per_range(tmp_path):
    hand = HandRun(tmp_path, aggregators=3)
    reply, vectors = hand.ask("worker-1", hand.request(hand.roster()))
    assert reply.code == "ok"
    header = Header.model_validate_json(reply.header.body)
    assert header.sender == "worker-1"
    assert header.virtual_workers == hand.hosting["worker-1"]
    assert [len(vector) for vector in vectors] == [part.length for part in hand.vector_ranges]
    assert {vector.dtype for vector in vectors} == {np.dtype("<u4")}


def test_an_answer_tells_the_time_of_every_phase(hand):
    reply, _ = hand.ask("worker-0", hand.request(hand.roster()))
    spent = reply.usage.seconds()
    assert tuple(spent) == WORKER_PHASES
    assert min(spent.values()) > 0
    assert sum(spent.values()) <= reply.seconds
    assert reply.usage.gpu_memory_peak_bytes is None


def test_an_answer_says_nothing_of_data_but_times_and_codes(hand):
    """Counts of examples, losses and norms are private: one field alone could carry any, and it is of public runs."""
    assert list(StepReply.model_fields) == [
        "member_id", "code", "header", "seconds", "usage", "leaving", "counted",
    ]  # fmt: skip
    assert [field.name for field in fields(StepUsage)] == [
        "copy_seconds", "model_seconds", "sums_seconds", "words_seconds", "masks_seconds", "out_seconds",
        "gpu_memory_peak_bytes",
    ]  # fmt: skip
    assert set(Header.model_fields) == {
        "run_id", "manifest_digest", "step", "attempt", "roster_digest", "input_digest", "sender",
        "virtual_workers", "vector_tags", "sum_tags", "payloads", "ring_bits",
    }  # fmt: skip


def test_no_exact_sum_over_examples_leaves_under_a_mechanism_that_is_private(hand, monkeypatch):
    request = hand.request(hand.roster())
    reply, _ = hand.ask("worker-0", request)
    assert (reply.code, reply.counted) == ("ok", None)
    genuine = VirtualWorkerComputer.vector

    def counting(self, *given):
        return replace(genuine(self, *given), counted=PublicSums(47.11, 4711, None))

    monkeypatch.setattr(VirtualWorkerComputer, "vector", counting)
    reply, vectors = hand.ask("worker-1", request)
    assert reply == StepReply(member_id="worker-1", code="not_public")
    assert [vector.size for vector in vectors] == [0]


def test_a_worker_and_its_keys_cannot_be_pickled(hand):
    with pytest.raises(TypeError):
        pickle.dumps(hand.workers["worker-0"])


def test_masked_vectors_of_all_workers_add_up_to_the_clear_sum(hand):
    _, (vectors,) = hand.compute(hand.roster())
    clear = [hand.clear_vector(v) for v in range(VIRTUAL_WORKERS)]
    assert np.array_equal(sum(vectors[1:], vectors[0]), sum(clear[1:], clear[0]))


def test_parameters_that_change_after_they_were_verified_reach_no_gradient(hand, monkeypatch):
    """They may lie in memory that other processes can write to: a second model would meet the first one's noise."""
    expected = sum(hand.clear_vector(v) for v in hand.hosting["worker-0"])
    genuine = VirtualWorkerComputer.vector

    def changed_meanwhile(self, *arguments):
        hand.parameters[0][:] = np.nan
        return genuine(self, *arguments)

    monkeypatch.setattr(VirtualWorkerComputer, "vector", changed_meanwhile)
    assert hand.ask("worker-0", hand.request(hand.roster()))[0].code == "ok"
    assert np.array_equal(hand.workers["worker-0"]._stage._hosted._words[0].vector, expected)


def test_every_step_has_vectors_of_its_own(hand):
    """Vectors kept for another attempt of a step do not serve the next step."""
    commit = hand.advance(hand.roster())
    _, (vectors,) = hand.compute(hand.roster(1, commit=commit), 1)
    clear = [hand.clear_vector(v, step=1) for v in range(VIRTUAL_WORKERS)]
    assert np.array_equal(sum(vectors[1:], vectors[0]), sum(clear[1:], clear[0]))


def test_a_failure_inside_is_a_code_and_nothing_else(hand, monkeypatch, capfd):
    def fail(*_):
        print("patient 4711")
        raise ValueError("index 4711 is out of bounds")

    monkeypatch.setattr(VirtualWorkerComputer, "vector", fail)
    reply, vectors = hand.ask("worker-0", hand.request(hand.roster()))
    assert reply == StepReply(member_id="worker-0", code="worker_error")
    assert [vector.size for vector in vectors] == [0]
    assert "4711" not in "".join(capfd.readouterr())


def test_running_out_of_memory_has_a_code_of_its_own(hand, monkeypatch):
    monkeypatch.setattr(VirtualWorkerComputer, "vector", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    assert hand.code("worker-0", hand.request(hand.roster())) == "out_of_memory"


def test_a_worker_that_failed_answers_the_next_attempt(hand, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(VirtualWorkerComputer, "vector", lambda *_: 1 / 0)
        assert hand.code("worker-0", hand.request(hand.roster())) == "worker_error"
    assert hand.code("worker-0", hand.request(hand.roster())) == "ok"


# --- preparing


@pytest.mark.parametrize(
    ("overrides", "kind", "code"),
    [
        (["dataset.path=absent.npz"], DatasetError, "dataset_unreadable"),
        (["dataset.labels=absent"], DatasetError, "dataset_array"),
        (["model=tests.models:with_batch_norm"], ModelError, "mixing_layer"),
    ],
)
def test_what_cannot_be_trained_on_is_the_users_error(tmp_path, overrides, kind, code):
    worker = TrainWorker("worker-0", None, lambda: 0.0)
    with pytest.raises(kind) as error:
        worker.prepare(worker_setup(config(overrides), tmp_path))
    assert error.value.code == code


def test_what_is_asked_out_of_order_is_answered_by_a_code(still):
    worker = TrainWorker("worker-9", still.source, still.clock)
    challenge = still.orchestrator.challenge("worker-9", "worker")
    assert refused(worker.compute_known_answer, still.mechanism) == "worker_error"
    assert refused(worker.present, challenge, still.admission) == "worker_error"
    worker.prepare(still.setup)
    assert refused(worker.present, challenge, still.admission) == "worker_error"
    worker.compute_known_answer(still.mechanism)
    assert (
        refused(worker.accept_keys, KeyRelease(package=Envelope(body=b"", signature=b""), proof=b"")) == "worker_error"
    )
    asked = still.request(Envelope(body=b"", signature=b""))
    reply, _ = worker.step(
        asked.receipt,
        StepRequest(
            roster=asked.roster, presentations=asked.presentations, commitments=asked.commitments, ranges=asked.ranges
        ),
    )
    assert reply.code == "worker_error"
    assert worker.evaluate(Envelope(body=b"", signature=b"")).code == "evaluation_unknown"


@pytest.mark.parametrize("field", COMPUTATION_CHANGES)
def test_a_manifest_of_anything_but_what_runs_here_is_refused_by_name(still, field):
    computation = still.manifest.computation
    changed = computation.model_copy(update=COMPUTATION_CHANGES[field](computation))
    admission = still.admission.model_copy(
        update={"manifest": still.manifest.model_copy(update={"computation": changed})}
    )
    challenge = still.orchestrator.challenge("worker-0", "worker")
    with pytest.raises(ProtocolError, match=f"manifest's {field} is not") as error:
        still.workers["worker-0"].present(challenge, admission)
    assert error.value.code == "manifest_mismatch"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {"gamma_log2": m.gamma_log2 - 1},
        lambda m: {"sigma": m.sigma * (1 - 1e-9)},
        lambda m: {"sigma": m.sigma / 1000, "honest_share": 1.1e6},
        lambda m: {"max_grad_norm": -m.max_grad_norm},
    ],
)
def test_a_grid_that_the_noise_does_not_pay_for_is_refused(still, change):
    """By whoever reads of it: in the known answer's call, and in the manifest."""
    worker, computation = still.workers["worker-0"], still.manifest.computation
    challenge = still.orchestrator.challenge("worker-0", "worker")
    short = still.mechanism.model_copy(update=change(still.mechanism))
    stated = still.manifest.model_copy(update={"computation": computation.model_copy(update={"mechanism": short})})
    assert (
        refused(worker.present, challenge, still.admission.model_copy(update={"manifest": stated}))
        == "mechanism_bounds"
    )
    with pytest.raises(ProtocolError, match="mechanism_bounds"):
        PlannedWorkload(worker._stage.planned.workload, short, ())


@pytest.mark.parametrize(
    "change",
    [
        {"honest_share": 1.1e6},
        {"virtual_workers": 8_000_000},
        {"num_examples": 8},
        {"max_participations": 1},
        {"max_grad_norm": 1e-3},
        {"sample_rate": 0.1},
    ],
)
def test_a_measurement_with_a_thousandth_of_the_noise_that_it_claims_is_refused(tmp_path, change):
    """Each of these numbers once thinned the noise or the charge of a measurement, and workers computed it."""
    counts = {"class_counts": {"classes": 3, "noise_multiplier": 5.0}}
    run = HandRun(tmp_path, measurements=counts, ring={"bits": 64})
    (measured,), worker = run.measurements, run.workers["worker-0"]
    thin = measured.mechanism.model_copy(update={"sigma": measured.mechanism.sigma / 1000} | change)
    released = measured.model_copy(update={"mechanism": thin})
    with pytest.raises(RefusedError, match=r"mechanism_bounds|malformed"):
        PlannedWorkload(worker._stage.planned.workload, run.mechanism, (released,))
    computation = run.manifest.computation.model_copy(update={"measurements": (released,)})
    stated = run.manifest.model_copy(update={"computation": computation})
    challenge = run.orchestrator.challenge("worker-0", "worker")
    found = refused(worker.present, challenge, run.admission.model_copy(update={"manifest": stated}))
    assert found in ("mechanism_bounds", "malformed")


def test_what_was_presented_stays_what_runs(still):
    worker, quiet = still.workers["worker-0"], still.mechanism.model_copy(update={"private": False})
    assert refused(worker.compute_known_answer, quiet) == "already_presented"
    assert refused(worker.prepare, still.setup) == "already_presented"
    other = still.admission.model_copy(update={"manifest": still.manifest.model_copy(update={"account": "another"})})
    challenge = still.orchestrator.challenge("worker-0", "worker")
    assert refused(worker.present, challenge, other) == "already_presented"


def test_another_known_answer_or_policy_is_refused(still):
    worker, challenge = still.workers["worker-0"], still.orchestrator.challenge("worker-0", "worker")
    foreign = still.manifest.model_copy(update={"known_answer": bytes(32)})
    assert (
        refused(worker.present, challenge, still.admission.model_copy(update={"manifest": foreign}))
        == "manifest_mismatch"
    )
    lax = still.policy.model_copy(update={"evidence_lifetime_s": 1})
    assert refused(worker.present, challenge, still.admission.model_copy(update={"policy": lax})) == "policy_mismatch"


def test_nothing_is_sent_before_the_orchestrators_own_evidence_was_accepted(still):
    worker, challenge = still.workers["worker-0"], still.orchestrator.challenge("worker-0", "worker")
    stranger = LocalPlatform(SimulatedVendor.create().platform())
    evidence = {
        "root_unknown": still.orchestrator._session.present(stranger),
        "nonce_foreign": still.presentations["worker-1"],
        "peer_not_bound": present_orchestrator(
            IdentityKey.generate(), still.run_id, still.manifest.digest(), still.source
        ),
        "evidence_malformed": Envelope(body=b"{}", signature=b""),
    }
    for code, envelope in evidence.items():
        assert refused(worker.present, challenge, still.admission.model_copy(update={"orchestrator": envelope})) == code


def test_a_challenge_for_somebody_else_is_not_answered(still):
    challenge = still.orchestrator.challenge("worker-1", "worker")
    assert refused(still.workers["worker-0"].present, challenge, still.admission) == "challenge_mismatch"


# --- keys


def test_keys_for_another_member_or_from_another_signer_are_refused(still):
    foreign = still.orchestrator.release("worker-1", 0, (0,))
    assert refused(still.workers["worker-0"].accept_keys, foreign) == "key_package_mismatch"
    unsigned = {"signature": IdentityKey.generate().sign(foreign.package.body)}
    forged = foreign.model_copy(update={"package": foreign.package.model_copy(update=unsigned)})
    assert refused(still.workers["worker-1"].accept_keys, forged) == "signature"


def test_without_a_key_there_is_no_vector(hand, computed):
    hosting = {"worker-0": (0, 1, 3, 6), "worker-1": (4, 7), "worker-2": (2, 5)}
    roster = hand.roster()
    members = Roster.model_validate_json(roster.body).members
    members = [each.model_copy(update={"virtual_workers": hosting.get(each.member_id, ())}) for each in members]
    assert hand.code("worker-0", hand.request(hand.forged(roster, members))) == "release_denied"
    assert 1 not in computed


def test_keys_of_a_past_epoch_are_dropped(tmp_path):
    hand = HandRun(tmp_path, epoch_steps=1)
    for name in hand.workers:
        hand.admit(name)
    hand.place(hand.hosting, epoch=1)
    assert hand.code("worker-0", hand.request(hand.roster())) == "release_denied"


def test_commitments_to_data_are_signed_and_keyed(still):
    """Without the key, nobody can tell a guessed slice from another by its commitment."""
    worker = still.workers["worker-2"]
    envelope = worker.accept_keys(still.orchestrator.release("worker-2", 0, (2,), worker._stage._watch.length))
    member = next(each for each in members(still.roster()) if each.member_id == "worker-2")
    body = open_envelope(DataCommitments, envelope, member.identity_key)
    slice_digest = computer(still.mechanism).slice(2).digest
    commitment = derive(still.computation_keys(2).data, Purpose.DATA_COMMITMENT, slice_digest).reveal()
    assert (body.virtual_workers, body.commitments) == ((2,), (commitment,))
    assert slice_digest != commitment


# --- data


def test_nothing_is_computed_for_a_receipt_of_other_data(hand, computed):
    """An altered record changes the commitment of its host; the driver may state what it likes."""
    roster = hand.roster()
    own, others = hand.hosting["worker-0"], hand.hosting["worker-1"]

    def stated(v: int) -> tuple[bytes, ...]:
        return tuple(b"x" * 32 if each == v else commitment for each, commitment in enumerate(hand.commitments))

    wrong = {
        "the receipt names another root": hand.request(roster, receipt=hand.receipt(data_root=b"x" * 32)),
        "the driver states other commitments": hand.request(roster, commitments=stated(others[0])),
        "too few are stated": hand.request(
            roster, commitments=hand.commitments[:-1], receipt=hand.receipt(data_root=data_root(hand.commitments[:-1]))
        ),
        "the ledger was told of other data than this worker's": hand.request(
            roster, commitments=stated(own[-1]), receipt=hand.receipt(data_root=data_root(stated(own[-1])))
        ),
    }
    assert {name: hand.code("worker-0", asked) for name, asked in wrong.items()} == dict.fromkeys(
        wrong, "data_mismatch"
    )
    assert computed == []
    assert hand.code("worker-0", hand.request(roster)) == "ok"


# --- receipts


def receipts(still: HandRun) -> Iterator[tuple[str, Envelope]]:
    honest = still.receipt()
    stranger = IdentityKey.generate()
    yield "signature", seal(Receipt.model_validate_json(honest.body), stranger)
    yield "signature", honest.model_copy(update={"body": honest.body.replace(b'"fencing":1', b'"fencing":2')})
    yield "receipt_mismatch", still.receipt(step=1)
    yield "receipt_mismatch", still.receipt(run_id="another")
    yield "receipt_mismatch", still.receipt(input_digest=bytes(32))
    yield "receipt_mismatch", still.receipt(manifest_digest=bytes(32))
    yield "receipt_mismatch", still.receipt(account="another")
    yield "receipt_mismatch", still.receipt(mechanism_digest=bytes(32))
    yield "receipt_mismatch", still.receipt(lineage=None)
    yield "signature", still.roster()


def test_nothing_is_computed_without_the_receipt_for_exactly_this_step(still, roster, computed):
    for code, receipt in receipts(still):
        assert still.code("worker-0", still.request(roster, receipt=receipt)) == code
    assert computed == []


def test_nothing_is_computed_for_other_parameters_than_were_charged(still, roster, computed):
    (parameters,) = still.parameters
    changed = parameters.copy()
    changed[7] = np.nextafter(changed[7], np.float32(2))
    assert still.code("worker-0", still.request(roster), [changed]) == "receipt_mismatch"
    assert still.code("worker-0", still.request(roster), [parameters[:-1]]) == "proof_bound"
    assert computed == []


def test_step_zero_starts_from_the_manifests_parameters_even_if_others_were_charged(hand, computed):
    roster = hand.roster()
    parameters = hand.parameters[0] + np.float32(1)
    model = model_digest(hand.facts.tensors, tensor_digests(parameters, hand.facts.tensors))
    request = hand.request(roster, receipt=hand.receipt(input_digest=model))
    assert hand.code("worker-0", request, [parameters]) == "parameters_mismatch"
    assert computed == []


def test_a_receipt_of_an_older_ledger_instance_is_refused(hand):
    assert hand.code("worker-0", hand.request(hand.roster(), receipt=hand.receipt(fencing=5))) == "ok"
    roster = hand.roster()
    assert hand.code("worker-0", hand.request(roster, receipt=hand.receipt(fencing=4))) == "receipt_fenced"
    assert hand.code("worker-0", hand.request(roster, receipt=hand.receipt(fencing=5))) == "ok"


# --- rosters


def hosted_by(roster: Envelope, hosting: dict[str, tuple[int, ...]]) -> tuple[Member, ...]:
    return tuple(
        member.model_copy(update={"virtual_workers": hosting.get(member.member_id, ())})
        for member in members(roster)
        if member.role == "aggregator" or member.member_id in hosting
    )


@pytest.mark.parametrize(
    ("hosting", "code"),
    [
        ({"worker-0": (0, 3, 6), "worker-1": (1, 4, 7), "worker-2": (2,)}, "roster_cover"),
        ({"worker-0": (0, 3, 6), "worker-1": (0, 1, 4, 7), "worker-2": (2, 5)}, "roster_cover"),
        ({"worker-0": (0, 3, 6), "worker-1": (1, 4, 7), "worker-2": (2, 2)}, "roster_cover"),
        ({"worker-0": tuple(range(8))}, "roster_too_small"),
    ],
    ids=["leaves one out", "names one twice", "one twice, one never", "a lone worker"],
)
def test_a_roster_that_covers_wrongly_is_refused_by_the_worker_itself(still, roster, computed, hosting, code):
    forged = still.forged(roster, hosted_by(roster, hosting))
    assert still.code("worker-0", still.request(forged)) == code
    assert computed == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"run_id": "another"}, "roster_mismatch"), ({"manifest_digest": bytes(32)}, "roster_mismatch")],
)
def test_a_roster_of_another_run_is_refused(still, roster, changes, code):
    assert still.code("worker-0", still.request(still.forged(roster, **changes))) == code


def test_a_circle_that_leaves_out_too_many_masks_is_refused_by_the_worker_itself(still, roster, computed):
    circle = MaskCircle(seed=bytes(32), reach=1, colluding_workers=1)
    assert still.code("worker-0", still.request(still.forged(roster, circle=circle))) == "mask_graph"
    assert computed == []


def test_a_roster_that_the_orchestrator_did_not_sign_is_refused(still, roster):
    forged = seal(Roster.model_validate_json(roster.body), IdentityKey.generate())
    assert still.code("worker-0", still.request(forged)) == "signature"


@pytest.mark.parametrize("field", ["member_id", "mask_key", "identity_key"])
def test_two_members_with_one_id_or_key_are_refused(still, roster, field):
    first, second, *others = members(roster)
    copied = second.model_copy(update={field: getattr(first, field)})
    assert still.code("worker-0", still.request(still.forged(roster, (first, copied, *others)))) == "roster_duplicate"


@pytest.mark.parametrize("field", ["mask_key", "identity_key", "evidence_digest", "role"])
def test_a_roster_that_states_other_facts_about_the_worker_is_refused(still, roster, field):
    own, other, *rest = members(roster)
    if field == "role":
        own = own.model_copy(update={"role": "aggregator", "virtual_workers": ()})
        other = other.model_copy(update={"virtual_workers": (0, 1, 3, 4, 6, 7)})
    else:
        own = own.model_copy(update={field: b"\5" * 32})
    assert still.code("worker-0", still.request(still.forged(roster, (own, other, *rest)))) == "roster_own_entry"


def test_a_worker_that_is_not_in_the_roster_does_not_answer(still, roster):
    hosting = {"worker-1": (0, 1, 2, 3), "worker-2": (4, 5, 6, 7)}
    forged = still.forged(roster, hosted_by(roster, hosting))
    assert still.code("worker-0", still.request(forged)) == "roster_member"


# --- attempts


def test_a_repeat_of_an_attempt_gets_the_same_bytes(hand, computed):
    request = hand.request(hand.roster())
    first, vectors = hand.ask("worker-0", request)
    computed.clear()
    again, same = hand.ask("worker-0", request)
    assert again == first
    assert [vector.tobytes() for vector in same] == [vector.tobytes() for vector in vectors]
    assert computed == []


def test_another_roster_for_an_answered_attempt_is_refused(hand):
    """Two answers of one attempt under two rosters would use one position twice."""
    roster = hand.roster()
    assert hand.code("worker-0", hand.request(roster)) == "ok"
    for changes in ({"nonce": b"\1" * 32}, {"ratchet": 5}):
        assert hand.code("worker-0", hand.request(hand.forged(roster, **changes))) == "step_fenced"
    moved = hosted_by(roster, {"worker-0": (0,), "worker-1": (1, 3, 4, 6, 7), "worker-2": (2, 5)})
    assert hand.code("worker-0", hand.request(hand.forged(roster, moved))) == "step_fenced"


def test_an_older_attempt_step_or_ratchet_is_over(hand):
    old = hand.roster()
    commit = hand.advance(hand.roster())
    late = hand.roster(1, commit=commit)
    assert hand.code("worker-0", hand.request(old)) == "step_fenced"
    rewound = hand.forged(late, ratchet=0)
    assert hand.code("worker-0", hand.request(late, 1)) == "ok"
    assert hand.code("worker-0", hand.request(hand.forged(rewound, attempt=7), 1)) == "step_fenced"
    assert hand.code("worker-0", hand.request(hand.forged(late, attempt=8), 1)) == "ok"
    assert hand.code("worker-0", hand.request(hand.forged(late, attempt=7), 1)) == "step_fenced"


def test_keys_and_vectors_of_a_virtual_worker_are_dropped_when_another_hosts_it(hand):
    worker, own = hand.workers["worker-0"], hand.hosting["worker-0"]
    assert hand.code("worker-0", hand.request(hand.roster())) == "ok"
    elsewhere = hand.hosting | {"worker-0": own[1:], "worker-1": tuple(sorted((own[0], *hand.hosting["worker-1"])))}
    hand.place({"worker-1": own[:1]})
    assert hand.code("worker-0", hand.request(hand.roster(hosting=elsewhere))) == "ok"
    assert {v for _, v in worker._stage._keys} == set(worker._stage._hosted.tags) == set(own[1:])
    assert hand.code("worker-0", hand.request(hand.roster())) == "release_denied", "it has no key to compute it again"


def test_a_new_attempt_masks_the_kept_vectors_anew(hand, computed):
    """Survivors recompute nothing; the moved virtual workers alone are computed, and all bytes on the wire differ."""
    _, (first,) = hand.compute(hand.roster())
    computed.clear()
    hosting = {"worker-0": (0, 3, 6, 7), "worker-2": (1, 2, 4, 5)}
    hand.place({"worker-0": (7,), "worker-2": (1, 4)})
    _, (second,) = hand.compute(hand.roster(hosting=hosting))
    assert sorted(computed) == [1, 4, 7]
    assert not any(np.array_equal(a, b) for a in first for b in second)
    assert np.array_equal(sum(first[1:], first[0]), sum(second[1:], second[0]))


def test_kept_vectors_are_those_of_the_same_parameters_only(hand, computed):
    """No ledger signs two receipts for a step; if one did, nothing of the first model would leave under the second."""
    tensors = hand.facts.tensors
    for moved in (1, 2):
        hand.parameters = tuple(part + np.float32(moved) for part in hand.parameters)
        hand.digest = model_digest(tensors, tensor_digests(np.concatenate(hand.parameters), tensors))
        assert hand.code("worker-0", hand.request(hand.roster(1), step=1)) == "ok"
    assert computed == [*hand.hosting["worker-0"]] * 2


def test_a_recomputed_vector_has_the_tag_of_the_first(hand):
    def tag_of(envelope: Envelope, v: int) -> bytes:
        header = Header.model_validate_json(envelope.body)
        return header.vector_tags[header.virtual_workers.index(v)]

    request, _ = hand.compute(hand.roster())
    hosting = {"worker-0": (0, 3, 6, 7), "worker-1": (1, 4), "worker-2": (2, 5)}
    hand.place({"worker-0": (7,)})
    again, _ = hand.compute(hand.roster(hosting=hosting))
    assert tag_of(request.headers[1], 7) == tag_of(again.headers[0], 7)
    assert tag_of(request.headers[1], 7) != tag_of(request.headers[1], 4)


def test_ranges_that_do_not_cut_the_parameters_into_pieces_are_refused(hand):
    whole = hand.mechanism.dimension
    for number, ranges in enumerate(
        [
            (VectorRange(index=0, offset=0, length=whole - 1),),
            (VectorRange(index=0, offset=0, length=whole + 1),),
            (VectorRange(index=0, offset=1, length=whole - 1),),
            (VectorRange(index=1, offset=0, length=whole),),
            (VectorRange(index=0, offset=0, length=40), VectorRange(index=1, offset=39, length=whole - 39)),
            (VectorRange(index=0, offset=0, length=whole), VectorRange(index=1, offset=whole, length=0)),
            (),
        ]
    ):
        with pytest.raises(ProtocolError, match="range_mismatch"):
            check_partition(ranges, whole)
        request = hand.request(hand.roster(), ranges=ranges)
        reply, _ = hand.ask("worker-0", request)
        assert (number, reply.code) == (number, "range_mismatch")
    check_partition(
        (VectorRange(index=0, offset=0, length=40), VectorRange(index=1, offset=40, length=whole - 40)), whole
    )


# --- peers


def test_a_member_without_shown_evidence_refuses_the_step(still, roster, computed):
    for absent in ("worker-1", "aggregator-0"):
        shown = tuple(envelope for name, envelope in still.presentations.items() if name != absent)
        assert still.code("worker-2", still.request(roster, presentations=shown)) == "peer_not_bound"
    assert computed == []


def test_keys_that_a_members_evidence_does_not_bind_are_refused(still, roster):
    own, peer, *others = members(roster)
    for field in ("mask_key", "identity_key"):
        swapped = peer.model_copy(update={field: b"\7" * 32})
        assert still.code("worker-0", still.request(still.forged(roster, (own, swapped, *others)))) == "key_not_bound"


def test_evidence_of_one_member_does_not_serve_another(hand):
    """Also when it was appraised before: worker-2's evidence makes no aggregator and no worker-1."""
    roster = hand.roster()
    assert hand.code("worker-0", hand.request(roster)) == "ok"
    own, peer, third, aggregator = members(hand.roster())
    peer = peer.model_copy(update={"virtual_workers": (1, 2, 4, 5, 7)})
    evidence = {name: getattr(third, name) for name in ("mask_key", "identity_key", "evidence_digest")}
    posing = aggregator.model_copy(update=evidence)
    forged = hand.forged(hand.roster(), (own, peer, posing))
    assert hand.code("worker-0", hand.request(forged)) == "peer_not_bound"
    renamed = third.model_copy(update={"member_id": "worker-9"})
    forged = hand.forged(hand.roster(), (own, members(roster)[1], renamed, aggregator))
    assert hand.code("worker-0", hand.request(forged)) == "peer_not_bound"


def test_evidence_under_another_root_is_refused(still, roster):
    vendor = SimulatedVendor.create()
    stranger = Attester("worker-1", LocalPlatform(vendor.platform()))
    challenge = Challenge(
        nonce=b"n" * 32,
        run_id=still.run_id,
        member_id="worker-1",
        role="worker",
        manifest_digest=still.manifest.digest(),
        expires_at=0,
    )
    shown = stranger.present(challenge, still.manifest.digest(), still.known_answer)
    own, peer, *others = members(roster)
    entry = {
        "mask_key": stranger.agreement.public,
        "identity_key": stranger.identity.public,
        "evidence_digest": stranger.evidence_digest,
    }
    forged = still.forged(roster, (own, peer.model_copy(update=entry), *others))
    presentations = (*still.presentations.values(), shown)
    assert still.code("worker-0", still.request(forged, presentations=presentations)) == "root_unknown"


def test_a_worker_keeps_the_evidence_of_its_newest_roster_alone(hand):
    for _ in range(3):
        hand.admit("worker-1")
        roster = hand.roster()
        assert hand.code("worker-0", hand.request(roster)) == "ok"
    members = parse(Roster, roster.body).members
    assert set(hand.workers["worker-0"]._peers._appraisals) == {member.evidence_digest for member in members}
    assert hand.code("worker-0", hand.request(hand.roster(), presentations=())) == "ok"


def test_a_peers_evidence_does_not_last_for_ever(hand):
    roster = hand.roster()
    assert hand.code("worker-0", hand.request(roster)) == "ok"
    hand.clock.now += 24 * 3600
    assert hand.code("worker-0", hand.request(hand.forged(roster, attempt=5))) == "peer_expired"


# --- without secure aggregation


def test_a_lone_worker_sends_the_noised_sum_of_all(tmp_path):
    hand = HandRun(tmp_path, workers=1, secure_aggregation=False)
    _, ((vector,),) = hand.compute(hand.roster())
    clear = [hand.clear_vector(v) for v in range(VIRTUAL_WORKERS)]
    assert np.array_equal(vector, sum(clear[1:], clear[0]))
    noise = np.std(decode(vector, 0)) / (hand.mechanism.sigma * np.sqrt(VIRTUAL_WORKERS))
    assert 0.7 < noise < 1.4


def test_public_vectors_need_no_mask(tmp_path):
    public = {"dp_config": {"enabled": False}, "overrides": ["dataset.public=true"]}
    hand = HandRun(tmp_path, workers=2, secure_aggregation=False, **public)
    _, (vectors,) = hand.compute(hand.roster())
    for vector, hosted in zip(vectors, hand.hosting.values(), strict=True):
        clear = [hand.clear_vector(v) for v in hosted]
        assert np.array_equal(vector, sum(clear[1:], clear[0]))


def test_several_workers_mask_private_vectors_in_any_case(tmp_path):
    """Each carries a share of the noise only. Correlation below 6 standard errors: a false alarm below 2e-9."""
    hand = HandRun(tmp_path, model="tests.models:wide_model", workers=2)
    hand.admission = hand.admission.model_copy(update={"secure_aggregation": False})
    for name in hand.workers:
        hand.admit(name)
    _, (vectors,) = hand.compute(hand.roster())
    for vector, hosted in zip(vectors, hand.hosting.values(), strict=True):
        clear = [hand.clear_vector(v) for v in hosted]
        assert correlation(vector, sum(clear[1:], clear[0])) < 6


def test_an_error_of_ours_leaves_the_other_methods_as_itself_and_any_other_without_its_text(still, monkeypatch):
    worker = still.workers["worker-0"]

    def fail(*_):
        raise KeyError("patient 4711")

    monkeypatch.setattr("raycloak.workers.run_member.open_keys", fail)
    with pytest.raises(RunFailedError) as error:
        worker.accept_keys(KeyRelease(package=Envelope(body=b"", signature=b""), proof=b""))
    assert error.value.code == "worker_error"
    assert "4711" not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__context__ is None
    monkeypatch.undo()
    with pytest.raises((ProtocolError, EvidenceError)):
        worker.accept_keys(KeyRelease(package=Envelope(body=b"", signature=b""), proof=b""))


def test_what_is_as_large_as_the_model_is_not_kept_twice(hand):
    """Beside the module: no masked vector that has left."""
    request = hand.request(hand.roster())
    reply, vectors = hand.ask("worker-0", request)
    assert reply.code == "ok"
    left = weakref.ref(vectors[0])
    del vectors
    assert left() is None


def test_released_parameters_are_checked_at_public_steps_before_anything_is_computed(hand, monkeypatch):
    """Steps 1, 2, 4, 8 and so on; what is refused then is a function of released parameters."""
    planned = hand.workers["worker-0"]._stage.planned
    checked: list[int] = []
    monkeypatch.setattr("raycloak.workers.workload.check_released", lambda *_: checked.append(step))
    for step in range(20):
        planned.check_released(step, hand.start)
    assert checked == [1, 2, 4, 8, 16]


def test_a_model_that_comes_to_mix_rows_ends_the_step_with_a_code(tmp_path, computed):
    hand = HandRun(tmp_path, model="tests.models:with_late_centring")
    commit = hand.advance(hand.roster())
    hand.parameters = tuple(part * 1e4 for part in hand.parameters)
    hand.digest = model_digest(hand.facts.tensors, tensor_digests(np.concatenate(hand.parameters), hand.facts.tensors))
    before = len(computed)
    assert hand.code("worker-0", hand.request(hand.roster(1, commit=commit), 1)) == "mixing_layer"
    assert len(computed) == before


SETS_TORCH = """
import torch
from torch import nn

torch.set_float32_matmul_precision("high")
torch.set_num_threads(2)

def model():
    torch.backends.cudnn.benchmark = True
    return nn.Linear(6, 3)
"""


def test_what_a_module_sets_in_torch_as_it_is_imported_has_no_effect_in_a_run(tmp_path):
    """Such lines stand at the head of many a training script. The class that the worker states is the run's."""
    plain = open_workload(worker_setup(config(), tmp_path / "plain")).facts.numerics
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sets_torch.py").write_text(SETS_TORCH)
    workload = open_workload(worker_setup(config(model="sets_torch:model"), tmp_path))
    assert workload.facts.numerics == plain
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == ("highest", 1)
    assert not torch.backends.cudnn.benchmark
