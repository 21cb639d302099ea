"""Frozen parameters and buffers are in the keys: another model never meets the same noise."""

import numpy as np
import pytest
import torch

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.metrics.errors import BudgetError, ConfigError
from raycloak.workers.inputs.datasets import slice_ids
from raycloak.workers.train_worker import TrainWorker
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.sampling import draw_ids
from tests.protocol import RENYI, VIRTUAL_WORKERS, WholeRun, config, examples, on, settle, trained, whole_run
from tests.table_models import WORDS, Frozen

WITH_TABLE = {
    "model": "tests.table_models:with_table",
    "dataset": {"kind": "npz", "path": "examples.npz", "features": "features", "vocabulary": WORDS},
    "steps": 1,
}
UNSEEN = 101
"""An id that examples have and the public draws of the known answer have not."""
OTHERS = {
    "rows": Frozen.rows.index_fill(0, torch.tensor([UNSEEN]), 0.5),
    "shift": torch.full((4,), 0.25),
    "table": Frozen.rows.flip(0),
}
NAMES = {"rows": "0.weight", "shift": "1.shift"}


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Return examples of six ids each."""
    return np.random.default_rng(2).integers(0, WORDS, (40, 6)), examples()[1]


class Kept:
    """Keeps the stream keys that workers of a run get, by virtual worker."""

    def __init__(self) -> None:
        self.streams: dict[int, Secret] = {}

    def __call__(self, worker: TrainWorker, _: str) -> None:
        accept = worker.accept_keys

        def accepted(release):
            commitments = accept(release)
            self.streams |= {v: keys.stream for (_, v), keys in worker._stage._keys.items()}
            return commitments

        worker.accept_keys = accepted


def ready(home, **arguments) -> WholeRun:
    return whole_run(home, data=tokens(), **WITH_TABLE | arguments)


def noise_of(stream: Secret) -> np.ndarray:
    values = np.zeros(75, np.uint32)
    NoiseSampler(1000.0, 32).add_to(values, derive(stream, Purpose.NOISE, "gradient", 0, b"p" * 32, b"d" * 32))
    return values


def drawn_by(stream: Secret, v: int) -> list[int]:
    key = derive(stream, Purpose.SAMPLING, "gradient", 0, b"p" * 32, b"d" * 32)
    return list(draw_ids(key, slice_ids(v, VIRTUAL_WORKERS, 4000), 0.5, 500))


@pytest.mark.parametrize("part", NAMES)
def test_another_frozen_tensor_gives_other_keys_noise_and_sampling(tmp_path, monkeypatch, part):
    """Under one run secret, policy and ledger key, on a second ledger file: nothing but the tensor differs."""
    streams, released, answers = [], [], []
    for home in ("a", "b"):
        kept = Kept()
        run = ready(tmp_path / home, tamper=kept)
        run.train()
        streams.append(kept.streams)
        released.append(run.finished.parameters)
        answers.append(run.finished.manifest.known_answer)
        monkeypatch.setattr(Frozen, part, OTHERS[part])
    assert UNSEEN in tokens()[0]
    assert (len(set(answers)) == 1) == (part == "rows"), "one row is in no digest but that of the frozen tensors"
    first, second = streams
    assert set(first) == set(second) == set(range(VIRTUAL_WORKERS))
    for v in range(VIRTUAL_WORKERS):
        assert first[v].reveal() != second[v].reveal()
        # Two independent draws agree in 500 sampled ids with a chance below 1e-100.
        assert not np.array_equal(noise_of(first[v]), noise_of(second[v]))
        assert drawn_by(first[v], v) != drawn_by(second[v], v)
    moved = released[0] - released[1]
    assert (moved != 0).all(), "the noise of every coordinate is another, not the gradient alone"
    assert np.std(moved) > 0.1 * np.std(released[0])


@pytest.mark.parametrize("part", NAMES)
def test_another_frozen_tensor_is_refused_by_the_ledger_that_knows_the_run(tmp_path, monkeypatch, part):
    ready(tmp_path).train()
    monkeypatch.setattr(Frozen, part, OTHERS[part])
    run = ready(tmp_path)
    with pytest.raises(BudgetError, match="run_mismatch"):
        run.train()
    assert run.stage.calls("step") == []


def other_ledger(home) -> dict[str, object]:
    home.mkdir()
    PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}").close()
    return {}


def other_account(home) -> dict[str, object]:
    settle(home)
    ledger = PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}")
    ledger.open_account("patients", OpeningTerms(20.0, 1e-5))
    ledger.close()
    return {"ledger": {"account": "patients"}, "dp_config": RENYI}


@pytest.fixture(scope="module")
def one_run(tmp_path_factory) -> tuple[WholeRun, dict[int, Secret]]:
    """Return a run that was trained, and its stream keys."""
    kept = Kept()
    run = ready(tmp_path_factory.mktemp("one"), tamper=kept, dp_config=RENYI)
    run.train()
    return run, kept.streams


@pytest.mark.parametrize("what", ["account", "policy", "ledger"])
def test_another_account_policy_or_ledger_gives_other_keys(tmp_path, one_run, what):
    """Under one run secret, for the same data, model and mechanism."""
    (first, streams), kept = one_run, Kept()
    prepared = {"account": other_account, "ledger": other_ledger}.get(what, lambda home: {})
    run = ready(tmp_path / "b", tamper=kept, **{"dp_config": RENYI} | prepared(tmp_path / "b"))
    if what == "policy":
        run.change(policy=run.session.policy.model_copy(update={"evidence_lifetime_s": 600}))
    run.train()
    one, other = first.finished.manifest, run.finished.manifest
    assert one.computation == other.computation
    differ = {name for name in type(one).model_fields if getattr(one, name) != getattr(other, name)}
    assert differ == {"key_commitments", {"policy": "policy_digest", "ledger": "ledger_key"}.get(what, what)}
    assert not set(map(Secret.reveal, streams.values())) & set(map(Secret.reveal, kept.streams.values()))
    assert first.digests != run.digests


def differing(part: str, other: str | None = None):
    """Let a worker build the model from another tensor."""

    def prepare(self: TrainWorker, setup):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Frozen, part, OTHERS[other or part])
            return TrainWorker.prepare(self, setup)

    return prepare


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> list[str]:
    """Return the digests of workers that agree."""
    run = ready(tmp_path_factory.mktemp("honest"))
    run.train()
    return run.digests


@pytest.mark.parametrize("part", NAMES)
def test_a_founder_with_another_model_is_refused_by_the_name_of_the_tensor(tmp_path, honest, part):
    def tamper(worker: TrainWorker, member_id: str) -> None:
        if member_id == "worker-0":
            worker.prepare = differing(part).__get__(worker)

    run = ready(tmp_path, tamper=tamper)
    run.train()
    assert run.left == [("worker-0", "model_mismatch")]
    assert f"tensor '{NAMES[part]}'" in run.departures[0].message
    assert run.digests == honest


def test_a_newcomer_with_another_model_is_refused_by_the_name_of_the_tensor(tmp_path):
    def tamper(worker: TrainWorker, member_id: str) -> None:
        if member_id == "worker-3":
            worker.prepare = differing("rows").__get__(worker)

    run = ready(tmp_path, tamper=tamper, disturb=on("step", "worker-1", "dies"), steps=4)
    run.reports = Slow(run)
    run.train()
    assert run.left == [("worker-1", "died"), ("worker-3", "model_mismatch")]
    assert "tensor '0.weight'" in run.departures[1].message


class Slow(list):
    """A progress that lets time pass after each step, so that newcomers are started."""

    def __init__(self, run: WholeRun) -> None:
        super().__init__()
        self._run = run

    def append(self, report) -> None:
        super().append(report)
        self._run.stage.time.sleep(5)


def test_a_worker_that_hides_its_frozen_tensors_is_refused_by_its_known_answer(tmp_path):
    def hiding(self: TrainWorker, setup):
        facts = differing("rows", "table")(self, setup)
        honest = TrainWorker("other", self._attester._source, lambda: 0.0).prepare(setup)
        self._stage.facts = facts.model_copy(update={"contents": honest.contents})
        return self._stage.facts

    def tamper(worker: TrainWorker, member_id: str) -> None:
        if member_id == "worker-0":
            worker.prepare = hiding.__get__(worker)

    run = ready(tmp_path, tamper=tamper)
    run.train()
    assert run.left == [("worker-0", "manifest_mismatch")]
    assert "known_answer" in run.departures[0].message


def test_a_measurement_computes_with_the_very_base_that_keys_and_manifest_name(tmp_path, monkeypatch):
    """Its module is a twin of the one whose tensors were hashed, so files that changed since are read by nobody."""

    def exchange(call) -> None:
        if call.method == "compute_known_answer":
            monkeypatch.setattr(Frozen, "rows", OTHERS["rows"])

    evaluation = {"evaluation": {"every": 1, "noise_multiplier": 2.0, "loss_bound": 4}}
    runs = [
        ready(tmp_path / name, disturb=disturb, measurements=evaluation)
        for name, disturb in (("a", None), ("b", exchange))
    ]
    for run in runs:
        run.train()
    assert runs[0].finished.manifest.known_answer == runs[1].finished.manifest.known_answer


def test_integer_features_without_a_vocabulary_are_refused_before_a_run_and_in_it(tmp_path):
    dataset = {"kind": "npz", "path": "examples.npz", "features": "features"}
    run = whole_run(tmp_path, data=tokens(), **WITH_TABLE | {"dataset": dataset})
    with pytest.raises(ConfigError, match="vocabulary"):
        run.train()
    with pytest.raises(ConfigError, match="vocabulary"):
        plan_of(config(**WITH_TABLE | {"dataset": dataset}), tmp_path / "data")


def test_a_run_trains_on_ids_of_its_whole_vocabulary(tmp_path):
    assert len(trained(tmp_path, data=tokens(), **WITH_TABLE).digests) == 1
