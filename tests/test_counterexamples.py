"""Attacks that shaped the design: each works when its rule is taken away, and fails against the code as it is.

Seeds and virtual workers' keys are fixed. Members' keys are drawn anew; what depends on them could come out otherwise
with probability below 1e-9. Errors are relative: 0 is exact knowledge, and one honest release of the small run is off
by more than 1.
"""

import json
import math

import numpy as np
import pytest
import torch

from raycloak.attestation.core.keys import AgreementKey, derive
from raycloak.attestation.core.roster import Member, Roster
from raycloak.coordinator.accounting.calibration import epsilon_against, epsilon_of
from raycloak.coordinator.planning.manifest import run_terms
from raycloak.metrics.errors import BudgetError
from raycloak.workers import virtual_worker
from raycloak.workers.device.words import CpuWords
from raycloak.workers.gradients.clipping import ClippedSum, GradientEngine
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.parts import DensePart
from raycloak.workers.gradients.sum_engines import ClassCountEngine
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.known_answer import known_answer
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import ModelSource, build_model
from raycloak.workers.run_member import RunMember
from raycloak.workers.train_worker import TrainWorker
from raycloak.workers.vectors import masks
from raycloak.workers.vectors.masks import PairSecret, masked_sum, roster_masks
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.ring import decode
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.coordinator.ledger.ledger_cases import MANIFEST, PARAMETERS, opened
from tests.drawn import spare_of
from tests.models import wide_model
from tests.noise import draws
from tests.protocol import (
    DATA_ROOT,
    VIRTUAL_WORKERS,
    HandRun,
    SilentWords,
    computer,
    examples,
    initial_parameters,
    keys_of,
    mechanism,
    on_machines,
    trained,
)
from tests.workers.terms.test_measurement import measurement

DELTA = 1e-5
RUN = b"c" * 32
START = initial_parameters()
KEYS = keys_of(RUN, 0)
HONEST = pytest.mark.parametrize("rule", ["kept", "removed"])


def release(chosen, *, noise=True, data=None, computation=RUN, model=b"p" * 32, parameters=START) -> np.ndarray:
    """Return what the aggregator decodes for step 0: the noised sum of all virtual workers, in real units."""
    vectors = computer(chosen, data, words=None if noise else SilentWords())
    total = np.zeros(chosen.dimension, f"<u{chosen.ring_bits // 8}")
    for v in range(VIRTUAL_WORKERS):
        total += vectors.vector(v, keys_of(computation, v), 0, model, DATA_ROOT, parameters).values
    return decode(total, chosen.gamma_log2)


def error(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def forget(monkeypatch, *, query: bool = False, model: bool = False, data: bool = False) -> None:
    """Key sampling and noise without the query, the input digest or the digests of the slice and of all data."""

    def weaker(secret, purpose, name, step, input_digest, slice_digest, root):
        fields = ((name, query), (input_digest, model), (slice_digest, data), (root, data))
        return derive(secret, purpose, step, *(field for field, dropped in fields if not dropped))

    monkeypatch.setattr("raycloak.workers.virtual_worker.derive", weaker)


# --- noise that depends on less than the gradient does


@HONEST
def test_a_second_model_served_for_a_step_takes_the_noise_off(monkeypatch, rule):
    """A model of NaN makes every gradient zero: its release is the noise, if that is keyed by the step alone."""
    if rule == "removed":
        forget(monkeypatch, model=True)
    chosen = mechanism()
    first = release(chosen)
    noise_alone = release(chosen, model=b"q" * 32, parameters=np.full_like(START, np.nan))
    truth = release(chosen, noise=False)
    assert error(first, truth) > 1
    if rule == "removed":
        assert error(first - noise_alone, truth) < 1e-6
    else:
        assert error(first - noise_alone, truth) > 1


@HONEST
def test_a_resume_whose_bytes_diverge_gives_a_difference_without_noise(monkeypatch, rule):
    if rule == "removed":
        forget(monkeypatch, model=True)
    chosen, other = mechanism(), {"model": b"q" * 32, "parameters": START + np.float32(0.1)}
    truth = release(chosen, noise=False) - release(chosen, noise=False, **other)
    found = release(chosen) - release(chosen, **other)
    assert (error(found, truth) < 1e-6) == (rule == "removed")
    assert error(found, truth) < 1e-6 or error(found, truth) > 1


@HONEST
def test_two_queries_of_a_step_under_one_noise_tell_their_difference(monkeypatch, rule):
    """Two counts that the ledger would charge for apart, with keys that do not tell them apart."""
    if rule == "removed":
        forget(monkeypatch, query=True)
    counts = measurement("class_counts", 500)
    renamed = counts.model_copy(update={"mechanism": counts.mechanism.model_copy(update={"query": "evaluation"})})
    data = ArrayDataset(*examples())
    first, second = (
        VirtualWorkerComputer(of.mechanism, ClassCountEngine(counts), data, spare_of(data)).vector(
            0, KEYS, 0, b"p" * 32, DATA_ROOT, START
        )
        for of in (counts, renamed)
    )
    noise_free = np.array_equal(first.values, second.values)
    assert noise_free == (rule == "removed")


def test_the_ledger_charges_no_second_model_for_a_step(tmp_path):
    """The same rule once more, before anything is computed."""
    ledger = opened(tmp_path / "ledger.sqlite")
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    with pytest.raises(BudgetError) as refusal:
        ledger.charge("run-a", 0, b"q" * 32, MANIFEST)
    assert refusal.value.code == "step_already_charged"
    ledger.close()


@HONEST
def test_a_fork_with_doubled_noise_takes_it_off(rule):
    """2 R1 - R2, if both runs draw from one stream. The manifest's computation is in every key, its sigma too."""
    doubled = mechanism(sample_rate=1.0)
    # The smaller one is derived: the plan takes the largest sigma for its number of base draws.
    chosen = doubled.model_copy(update={"sigma": doubled.sigma / 2})
    forked = RUN if rule == "removed" else b"d" * 32
    truth = release(chosen, noise=False)
    found = 2 * release(chosen) - release(doubled, computation=forked)
    assert error(found, truth) < 0.1 if rule == "removed" else error(found, truth) > 1


def test_the_noise_is_in_the_computation_that_keys_derive_from(tmp_path):
    """The fork above would have to keep this equal: another sigma is another digest."""
    computation = HandRun(tmp_path).manifest.computation
    doubled = computation.mechanism.model_copy(update={"sigma": 2 * computation.mechanism.sigma})
    assert computation.model_copy(update={"mechanism": doubled}).digest() != computation.digest()


@HONEST
def test_retraining_without_one_record_gives_its_gradient(monkeypatch, rule):
    """The first step of both runs has the same model; only the digest of the slice keeps their noise apart."""
    if rule == "removed":
        forget(monkeypatch, data=True)
    chosen = mechanism(sample_rate=1.0)
    features, labels = examples()
    features[3] = np.nan
    truth = release(chosen, noise=False) - release(chosen, noise=False, data=(features, labels))
    found = release(chosen) - release(chosen, data=(features, labels))
    assert 0.5 < np.linalg.norm(truth) <= chosen.sensitivity
    assert error(found, truth) < 1e-6 if rule == "removed" else error(found, truth) > 1


@HONEST
def test_fresh_noise_on_the_same_draw_is_one_release_with_less_noise(monkeypatch, rule):
    """Two models draw the same examples, or share about half of a draw, of 40 examples over 10 steps."""
    genuine, drawn = virtual_worker.draw_ids, []
    monkeypatch.setattr(
        virtual_worker, "draw_ids", lambda *given: drawn.append(set(genuine(*given))) or genuine(*given)
    )
    if rule == "removed":

        def by_step(secret, purpose, step, *rest):
            return derive(secret, purpose, step, *(() if "sampling" in purpose else rest))

        monkeypatch.setattr(virtual_worker, "derive", by_step)
    vectors = computer(mechanism())
    for step in range(10):
        for v in range(VIRTUAL_WORKERS):
            for model in (b"p" * 32, b"q" * 32):
                vectors.vector(v, keys_of(RUN, v), step, model, DATA_ROOT, START)
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    share = sum(len(a & b) for a, b in pairs) / sum(len(a) for a, _ in pairs)
    assert share == 1 if rule == "removed" else 0.35 < share < 0.65


def test_the_same_draw_twice_would_cost_far_more_than_two_draws():
    """q .01, z 1, 1000 steps each: two releases on one draw are one release at z / sqrt(2)."""
    independent = epsilon_of(0.01, 1.0, 2000, DELTA)
    same_draw = epsilon_of(0.01, math.sqrt(0.5), 1000, DELTA)
    assert independent < 3 < 5 < same_draw


# --- rosters and attempts


def two_workers(home) -> HandRun:
    """Return two workers; each holds the keys of six of eight virtual workers, so that some can be hosted by either."""
    hand = HandRun(home, workers=2, model="tests.models:wide_model")
    hand.hosting = {"worker-0": (0, 1, 2, 3), "worker-1": (4, 5, 6, 7)}
    hand.place({"worker-0": tuple(range(6)), "worker-1": tuple(range(2, 8))})
    return hand


def with_hosting(hand: HandRun, roster, hosting, **changes):
    members = [
        member.model_copy(update={"virtual_workers": hosting.get(member.member_id, ())})
        for member in Roster.model_validate_json(roster.body).members
    ]
    return hand.forged(roster, members, **changes)


@HONEST
def test_two_hosting_maps_under_one_digest_isolate_a_virtual_worker(tmp_path, monkeypatch, rule):
    """Worker-1 is told another map than worker-0, and each map covers all: virtual worker 3 is summed twice."""
    if rule == "removed":
        genuine = Roster.digest

        def without_map(self):
            blank = [member.model_copy(update={"virtual_workers": ()}) for member in self.members]
            return genuine(self.model_copy(update={"members": tuple(blank)}))

        monkeypatch.setattr(Roster, "digest", without_map)
    hand = two_workers(tmp_path)
    first = hand.roster()
    bent = with_hosting(hand, first, {"worker-0": (0, 1, 2), "worker-1": (3, 4, 5, 6, 7)})
    _, (own,) = hand.ask("worker-0", hand.request(first))
    _, (lied,) = hand.ask("worker-1", hand.request(bent))
    _, ((left, right),) = hand.compute(hand.roster())
    found = own + lied - (left + right)
    isolated = hand.clear_vector(3)
    assert np.array_equal(found, isolated) if rule == "removed" else (found == isolated).mean() < 0.01


def test_an_isolated_virtual_worker_has_a_quarter_of_the_noise_and_one_such_step_costs_epsilon_ten():
    """V = 16, z = 1, q = .01, a single step."""
    assert epsilon_of(0.01, 1 / math.sqrt(16), 1, DELTA) > 10
    assert epsilon_of(0.01, 1.0, 1, DELTA) < 1


@HONEST
def test_an_attempt_counter_that_restarts_shows_a_moved_vector(tmp_path, monkeypatch, rule):
    """The same (step, attempt) under two maps, masked by one worker with one mask: the difference is the moved vector.

    Rules in the way: the orchestrator's counter is on disk, workers fence an answered attempt, and the roster's
    digest is in the mask key.
    """
    hand = two_workers(tmp_path)
    other_map = {"worker-0": (0, 1, 2), "worker-1": (3, 4, 5, 6, 7)}
    first = hand.roster()
    if rule == "removed":
        genuine = masks.keystream_key
        monkeypatch.setattr(RunMember, "_check_position", lambda self, roster: None)
        monkeypatch.setattr(
            masks, "keystream_key", lambda secret, **context: genuine(secret, **{**context, "roster_digest": b""})
        )
    _, (before,) = hand.ask("worker-0", hand.request(first))
    restarted = with_hosting(hand, first, other_map, nonce=b"\1" * 32)
    if rule == "kept":
        assert next_attempt_after_restart(hand) == 1
        assert hand.code("worker-0", hand.request(restarted)) == "step_fenced"
        monkeypatch.setattr(RunMember, "_check_position", lambda self, roster: None)
    _, (after,) = hand.ask("worker-0", hand.request(restarted))
    moved = before - after == hand.clear_vector(3)
    assert moved.all() if rule == "removed" else moved.mean() < 0.01


def next_attempt_after_restart(hand: HandRun) -> int:
    """Return the next attempt of step 0, by an orchestrator that knows its predecessor's state alone."""
    hand.orchestrator.close()
    hand.orchestrator = hand.start_orchestrator()
    hand.orchestrator.begin(run_terms(hand.manifest, hand.policy, hand.collateral), "second")
    challenge = hand.orchestrator.challenge("worker-0", "worker")
    newcomer = TrainWorker("worker-0", hand.source, hand.clock)
    newcomer.prepare(hand.setup)
    newcomer.compute_known_answer(hand.mechanism)
    hand.orchestrator.admit(newcomer.present(challenge, hand.admission))
    package = hand.orchestrator.release("worker-0", 0, tuple(range(8)))
    hand.orchestrator.record_data(newcomer.accept_keys(package))
    roster = hand.orchestrator.open_step(0, {"worker-0": tuple(range(8))}, (), ())
    return Roster.model_validate_json(roster.body).attempt


# --- numerics


CHILD = """
import json, sys
from tests.test_counterexamples import answer_and_vector
answer, vector = answer_and_vector()
json.dump([answer.hex(), vector.tolist()], open(sys.argv[1], "w"))
"""


def answer_and_vector() -> tuple[bytes, np.ndarray]:
    """Return the known answer of this process's numerics class, and a vector under fixed keys."""
    pin_numerics()
    chosen = mechanism(5003, sample_rate=1.0)
    module = build_model(ModelSource.of("tests.models:wide_model"), ".", 0)
    dataset = ArrayDataset(*examples())
    # Not the model's own start: drawing it is a computation that differs as well.
    parameters = np.random.default_rng(3).normal(0, 0.3, 5003).astype(np.float32)
    answer = known_answer(
        chosen, GradientEngine(module, cross_entropy, chosen), dataset, parameters, words=CpuWords(), classes=3
    )
    vectors = computer(chosen, model=wide_model)
    return answer, vectors.vector(0, keys_of(RUN, 0), 0, b"p" * 32, DATA_ROOT, parameters).values


def test_another_instruction_set_gives_another_vector_under_the_same_noise(run_python):
    """Two values under one noise leak their difference, so their machines must not be in one run.

    What keeps them apart is the known answer, which differs as well.
    """
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this CPU has one instruction set only")
    path = run_python.folder / "answer.json"
    done = run_python("-c", CHILD, str(path), environment={"ATEN_CPU_CAPABILITY": "default"})
    assert done.code == 0, done.stderr
    answer, vector = answer_and_vector()
    other_answer, other_vector = json.loads(path.read_text())
    difference = (vector - np.array(other_vector, np.uint32)).view(np.int32)
    assert difference.any()
    assert np.abs(difference).max() < 1e-3 * mechanism().sigma, "the noise is gone from the difference"
    assert answer.hex() != other_answer


# --- what is clipped, and who knows the noise


@HONEST
def test_a_loss_clipped_apart_from_its_gradient_adds_to_the_sensitivity(rule):
    """Appended to the gradient before clipping, both together move the sum by at most C."""
    gradient, loss = torch.full((1, 100), 3.0), torch.full((1, 1), 50.0)
    valid = torch.ones(1, dtype=torch.bool)

    def clipped(*parts):
        total = ClippedSum([part.shape[1] for part in parts], 1.0, torch.device("cpu"))
        total.add([DensePart(part) for part in parts], valid)
        return torch.cat(total.pieces()).numpy()

    if rule == "removed":
        moved = np.concatenate([clipped(gradient), clipped(loss)])
        assert np.linalg.norm(moved) > 1.41
        assert epsilon_of(0.01, math.sqrt(0.5), 1000, DELTA) > 2 * epsilon_of(0.01, 1.0, 1000, DELTA)
    else:
        assert np.linalg.norm(clipped(gradient, loss)) <= 1.0


@HONEST
def test_a_worker_takes_its_own_noise_off(tmp_path, rule):
    """With two workers one of them knows half of the shares; the epsilon against it is stated beside the other."""
    tamper = on_machines(tmp_path, lambda member_id: member_id)
    run = trained(tmp_path, num_workers=2, steps=1, tamper=tamper)
    plan = run.finished.plan
    count = 20_000
    shares = [draws(plan.mechanism.sigma, keys_of(RUN, v).stream, 0, count) for v in range(VIRTUAL_WORKERS)]
    known = sum(shares[:4]) if rule == "removed" else 0
    remaining = np.std(sum(shares) - known) / (plan.mechanism.sigma * math.sqrt(VIRTUAL_WORKERS))
    assert remaining == pytest.approx(math.sqrt(0.5) if rule == "removed" else 1, rel=0.03)
    outsiders = epsilon_against(plan.mechanism, 0, plan.delta, 1)
    one_worker = epsilon_against(plan.mechanism, run.finished.most_hosted, plan.delta, 1)
    assert run.finished.most_hosted == 4
    assert one_worker > 1.2 * outsiders
    assert plan.epsilon_one_worker > plan.epsilon_outsiders


# --- sparse mask graphs


def honest_part_splits(generator: np.random.Generator, degree: int, count: int = 100) -> bool:
    """Return whether a random graph of this degree (a union of matchings) falls apart when half of its nodes
    collude."""
    edges = np.zeros((count, count), bool)
    for _ in range(degree):
        order = generator.permutation(count)
        edges[order[::2], order[1::2]] = edges[order[1::2], order[::2]] = True
    honest = edges[: count // 2, : count // 2]
    reached = np.zeros(count // 2, bool)
    reached[0] = True
    while (grown := reached | honest[reached].any(0)).sum() > reached.sum():
        reached = grown
    return not reached.all()


def test_a_sparse_mask_graph_falls_apart_under_collusion_and_attempts_add_up():
    """Half of 100 workers collude: far too often at degree 7, still not negligibly rarely at degree 10.

    With 4,096 attempts a step, either is certain to happen. The product's graph is complete, see the next test.
    """
    generator = np.random.default_rng(0)
    rates = {k: np.mean([honest_part_splits(generator, k) for _ in range(400)]) for k in (7, 10, 99)}
    assert rates[7] > 0.2
    assert 0 < rates[10] < rates[7]
    assert rates[99] == 0


def team(count: int) -> tuple[list[AgreementKey], Roster]:
    keys = [AgreementKey.generate() for _ in range(count)]
    members = [
        Member(
            member_id=f"worker-{i}",
            role="worker",
            mask_key=key.public,
            identity_key=bytes([i]) * 32,
            evidence_digest=bytes(32),
            virtual_workers=(i,),
            joined=0,
        )
        for i, key in enumerate(keys)
    ]
    fields = {"run_id": "run", "manifest_digest": RUN, "step": 0, "attempt": 0, "ratchet": 0, "nonce": bytes(32)}
    return keys, Roster(**fields, members=tuple(members))


@HONEST
def test_colluders_around_an_honest_worker_unmask_it_unless_honest_workers_share_masks(rule):
    """A ring of six in which every other one colludes; in the complete graph two honest workers share a mask."""
    keys, view = team(6)
    pairs = [
        {
            peer.member_id: PairSecret(key, own, peer, run_id="run", manifest_digest=RUN)
            for peer in view.workers
            if peer is not own
        }
        for key, own in zip(keys, view.workers, strict=True)
    ]
    peers_of = [[peer.member_id for peer in view.workers if peer is not own] for own in view.workers]
    given = [
        roster_masks(
            pairs[i], view, f"worker-{i}", input_digest=RUN, ranges=(VectorRange(index=0, offset=0, length=8),)
        )[0]
        for i in range(6)
    ]
    assert [len(masks_of) for masks_of in given] == [5] * 6, "the product's graph is complete"
    if rule == "removed":
        neighbours = [{f"worker-{(i - 1) % 6}", f"worker-{(i + 1) % 6}"} for i in range(6)]
        given = [
            [mask for peer, mask in zip(peers_of[i], given[i], strict=True) if peer in neighbours[i]] for i in range(6)
        ]
        peers_of = [[peer for peer in peers_of[i] if peer in neighbours[i]] for i in range(6)]
    clear = np.arange(5000, dtype=np.uint32)
    sent = np.empty_like(clear)
    masked_sum([clear], given[0], sent)
    known = [
        (key, -sign)
        for peer, (key, sign) in zip(peers_of[0], given[0], strict=True)
        if peer in ("worker-1", "worker-3", "worker-5")
    ]
    found = np.empty_like(sent)
    masked_sum([sent], known, found)
    assert np.array_equal(found, clear) if rule == "removed" else (found == clear).mean() < 0.01
