"""`bench step --against opacus`: the peer trains the same model, and its turns are in no figure of the run."""

import types

import numpy as np
import pytest
import torch

from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.planning.plan import plan_mechanism
from raycloak.coordinator.planning.references import descriptor
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.augmentation import WORDS, Augmentation, Versions
from raycloak.workers.inputs.datasets import dataset_form
from raycloak.workers.models.models import build_model, read_flat
from raycloak_lab.bench import opacus_steps, step
from raycloak_lab.bench.opacus_steps import OpacusPeer, OpacusTraining, Seconds, Steps
from raycloak_lab.bench.step import BLOCK_STEPS, WARM_UP_STEPS, bench_step

EXAMPLES, CLIP, RATE = 12, 1.5, 2.0
DATA = {"kind": "npz", "path": "data.npz", "features": "features", "labels": "labels"}


@pytest.fixture(autouse=True)
def _torch_as_before():
    mode = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(mode)


@pytest.fixture
def task(tmp_path):
    random = np.random.default_rng(3)
    features = random.standard_normal((EXAMPLES, 5), np.float32)
    np.savez(tmp_path / "data.npz", features=features, labels=np.arange(EXAMPLES) % 3)
    (tmp_path / "small_model.py").write_text(
        "import torch\ndef model():\n    return torch.nn.Linear(5, 3)\n"
        "def moved(row, generator):\n    return row + generator.standard_normal(5, 'float32')\n"
    )
    return tmp_path


def config(**fields):
    given = {
        "num_workers": 2,
        "virtual_workers": 2,
        "expected_batch_size": EXAMPLES,
        "micro_batch_size": 5,
        "steps": 12,
        "model": "small_model:model",
        "dataset": DATA,
        "optimizer": {"name": "sgd", "learning_rate": RATE},
        "dp_config": {"noise_multiplier": 30.0, "epsilon_cap": 8.0, "accountant": "rdp", "max_grad_norm": CLIP},
    }
    return parse_config({**given, **fields})


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("copies", [1, 2])
def test_a_step_of_the_peer_is_the_runs_own_without_its_noise(task, copies):
    augment = {"kind": "small_model:moved", "copies": copies}
    wanted = config(dataset=DATA | ({"augment": augment} if copies > 1 else {}))
    mechanism = plan_mechanism(wanted, EXAMPLES, 18).model_copy(update={"noise_multiplier": 0.0})
    training = OpacusTraining(wanted, task, mechanism)
    training.step()

    module = build_model(model_source(wanted.model), task, wanted.seed)
    total, are_cut = np.zeros(18), set()
    with np.load(task / "data.npz") as data:
        features, labels = data["features"].repeat(copies, 0), data["labels"]
    if copies > 1:
        words = np.random.default_rng(torch.initial_seed()).integers(0, 2**64, (len(features), WORDS), np.uint64)
        form = dataset_form(descriptor(wanted.dataset).open(task))
        features = Versions(Augmentation(**augment), form, task).of(features, words)
    for x, y in zip(features.reshape(-1, copies, 5), labels.repeat(copies).reshape(-1, copies), strict=True):
        loss = torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(y))
        parts = torch.autograd.grad(loss, list(module.parameters()))
        gradient = np.concatenate([part.numpy().reshape(-1) for part in parts])
        share = min(1.0, CLIP / np.linalg.norm(gradient))
        total, are_cut = total + gradient * share, are_cut | {share < 1}
    assert are_cut == {True, False}, "a mean or a sum of versions makes a difference"
    expected = read_flat(module) - RATE * total / EXAMPLES
    assert read_flat(training.module) == pytest.approx(expected, abs=1e-5)
    assert np.abs(expected - read_flat(module)).max() > 1e-3, "the step moves the model"


@pytest.mark.parametrize(("field", "value"), [("clipping", "normalised"), ("unit", "patient")])
def test_a_mechanism_that_opacus_does_not_have_is_refused(task, field, value):
    mechanism = plan_mechanism(config(), EXAMPLES, 18).model_copy(update={field: value})
    with pytest.raises(ConfigError, match="bench_peer"):
        OpacusTraining(config(), task, mechanism)


def test_an_update_rule_that_torch_does_not_have_is_refused(task):
    wanted = config(optimizer={"name": "torch.optim:RMSprop", "learning_rate": 0.1})
    with pytest.raises(ConfigError, match="bench_peer"):
        OpacusTraining(wanted, task, plan_mechanism(wanted, EXAMPLES, 18))


def test_an_unknown_peer_is_refused(task):
    with pytest.raises(ConfigError, match="bench_peer"):
        bench_step(config(), config_dir=task, against="nobody")


def test_the_peers_turns_are_in_no_figure_of_the_run(task, monkeypatch):
    now, asked = [100.0], []

    class Process:
        """A peer whose start takes 3 s and whose steps take 2 s."""

        def __init__(self, target):
            self.target = target

        def __enter__(self):
            return self

        def __exit__(self, *_):
            asked.append("closed")

        def call(self, message, kind, *, by):
            if isinstance(message, OpacusPeer):
                now[0] += 3.0
                return kind(steps=())
            asked.append(message.number)
            now[0] += 2.0 * message.number
            return kind(steps=(2.0,) * message.number)

    monkeypatch.setattr(step, "Child", Process)
    monkeypatch.setattr(step, "_mechanism", lambda: plan_mechanism(config(), EXAMPLES, 18))
    monkeypatch.setattr(step, "_process_seconds", lambda: 20.0)
    monkeypatch.setattr(step, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    peer = step._Opacus(config(), task)
    steps = 3 * BLOCK_STEPS
    for number in range(1, steps + 1):
        now[0] += 0.5
        peer.take_turn(types.SimpleNamespace(step=number, steps=steps, seconds=0.4))
    assert asked == [WARM_UP_STEPS, BLOCK_STEPS, BLOCK_STEPS, "closed"]
    assert peer.loop == pytest.approx([500.0] * (steps - WARM_UP_STEPS))
    assert (peer.start_seconds, peer.peer_start_seconds) == pytest.approx((19.6, 3.0))


def test_a_peer_in_a_process_of_its_own_takes_the_steps_that_it_is_asked_for(task):
    wanted = config()
    plain = wanted.model_dump(mode="json", exclude_unset=True)
    peer = OpacusPeer(config=plain, base=task, mechanism=plan_mechanism(wanted, EXAMPLES, 18))
    with Child(f"{opacus_steps.__name__}:take_steps") as child:
        assert child.call(peer, Seconds, by=Deadline(300)).steps == ()
        assert len(child.call(Steps(number=2), Seconds, by=Deadline(300)).steps) == 2
