"""Update rules are pure, follow `torch.optim`, and give the same bytes for any number of ranges."""

import math

import numpy as np
import pytest
import torch

from raycloak.coordinator.aggregation import update_rules
from raycloak.coordinator.aggregation.ranges import split_ranges
from raycloak.coordinator.aggregation.update_rules import Optimizer, State, learning_rate
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.terms.manifest import OptimizerSpec, ParameterGroup, TensorSpec

TENSORS = tuple(
    TensorSpec(name=name, shape=shape)
    for name, shape in (
        ("0.weight", (17, 9)),
        ("0.bias", (17,)),
        ("scale", ()),
        ("1.weight", (5, 3, 3, 3)),
        ("1.bias", (5,)),
    )
)
SIZE = sum(tensor.size for tensor in TENSORS)
STEPS = 6
NAMES = ("sgd", "adam", "adamw", "adafactor")


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


def spec_of(name: str, **changes) -> OptimizerSpec:
    values = {
        "name": name,
        "learning_rate": 0.05,
        "momentum": 0.9 if name == "sgd" else 0.0,
        "weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "schedule": "cosine",
        "warmup_steps": 2,
    }
    return OptimizerSpec.model_validate({**values, **changes})


def start() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)


def gradients() -> list[np.ndarray]:
    return list(np.random.default_rng(1).standard_normal((STEPS, SIZE)))


def trained(spec: OptimizerSpec, ranges: int) -> tuple[list[bytes], State]:
    """Return parameters after every step and the last state, of all ranges together."""
    owned = split_ranges(TENSORS, ranges)
    rules = [Optimizer(spec, each.tensors, STEPS) for each in owned]
    parts = [start()[each.start : each.stop] for each in owned]
    states = [rule.initial_state() for rule in rules]
    history = []
    for step, gradient in enumerate(gradients()):
        for index, each in enumerate(owned):
            cut = gradient[each.start : each.stop]
            parts[index], states[index] = rules[index].update(parts[index], cut, states[index], step)
        history.append(np.concatenate(parts).tobytes())
    return history, {key: value for state in states for key, value in state.items()}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_are_updated_in_turns_and_stretches_give_the_bytes_of_whole_ones(name, monkeypatch):
    whole = trained(spec_of(name), 1)
    # 153 values become three stretches, the others share turns.
    monkeypatch.setattr(update_rules, "TURN", 64)
    cut = trained(spec_of(name), 1)
    assert cut[0] == whole[0]
    assert {key: value.tobytes() for key, value in cut[1].items()} == {
        key: value.tobytes() for key, value in whole[1].items()
    }
    assert {key: value.shape for key, value in cut[1].items()} == {key: value.shape for key, value in whole[1].items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_do_not_depend_on_the_number_of_ranges(name: str) -> None:
    whole, state = trained(spec_of(name), 1)
    for ranges in (2, 3, 5):
        parts, part_state = trained(spec_of(name), ranges)
        assert parts == whole
        assert {key: value.tobytes() for key, value in part_state.items()} == {
            key: value.tobytes() for key, value in state.items()
        }


@pytest.mark.parametrize("name", NAMES)
def test_an_average_changes_no_update_and_its_bytes_depend_on_no_cut(name: str, monkeypatch) -> None:
    """Guarantee of `Optimizer`: each value follows from its own former ones."""
    plain, kept = trained(spec_of(name), 1)
    spec = spec_of(name, averaged_weights=True)
    found = [trained(spec, ranges) for ranges in (1, 3)]
    monkeypatch.setattr(update_rules, "TURN", 64)
    found.append(trained(spec, 2))
    average = start()
    for step, parameters in enumerate(plain):
        old = average.astype(np.float64)
        average = (old + (np.frombuffer(parameters, np.float32) - old) * (9 / (10 + step))).astype(np.float32)
    for history, state in found:
        assert history == plain
        values = [state.pop(f"{tensor.name}/averaged_weights") for tensor in TENSORS]
        assert [each.shape for each in values] == [tensor.shape for tensor in TENSORS]
        assert np.concatenate([each.reshape(-1) for each in values]).tobytes() == average.tobytes()
        assert {key: each.tobytes() for key, each in state.items()} == {
            key: each.tobytes() for key, each in kept.items()
        }


@pytest.mark.parametrize("name", NAMES)
def test_the_rule_is_that_of_torch(name: str) -> None:
    spec = spec_of(name)
    leaves = [torch.from_numpy(part.copy()) for part in np.split(start(), np.cumsum([t.size for t in TENSORS])[:-1])]
    leaves = [leaf.reshape(tensor.shape) for leaf, tensor in zip(leaves, TENSORS, strict=True)]
    rule = {
        "sgd": lambda: torch.optim.SGD(leaves, momentum=0.9, weight_decay=0.01),
        "adam": lambda: torch.optim.Adam(leaves, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01),
        "adamw": lambda: torch.optim.AdamW(leaves, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01),
        "adafactor": lambda: torch.optim.Adafactor(leaves, eps=(1e-8, 1e-3), weight_decay=0.01),
    }[name]()
    for step, gradient in enumerate(gradients()):
        begin = 0
        for leaf in leaves:
            leaf.grad = torch.from_numpy(gradient[begin : begin + leaf.numel()]).float().reshape(leaf.shape)
            begin += leaf.numel()
        for group in rule.param_groups:
            group["lr"] = learning_rate(spec, step, STEPS)
        rule.step()
    expected = np.concatenate([leaf.numpy().reshape(-1) for leaf in leaves])
    found = np.frombuffer(trained(spec, 1)[0][-1], np.float32)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


GROUPS = (
    ParameterGroup(params=("1.*",), learning_rate=0.5, weight_decay=None, settings="{}"),
    ParameterGroup(params=("*.bias", "scale"), learning_rate=None, weight_decay=0.0, settings="{}"),
    ParameterGroup(params=("0.weight", "sc?le"), learning_rate=0.25, weight_decay=None, settings="{}"),
)
RATES = {"0.weight": 0.25, "0.bias": 0.05, "scale": 0.25, "1.weight": 0.5, "1.bias": 0.5}
DECAYS = {"0.weight": 0.01, "0.bias": 0.0, "scale": 0.0, "1.weight": 0.01, "1.bias": 0.0}


@pytest.mark.parametrize("name", NAMES)
def test_guarantee_groups_are_torchs_parameter_groups_for_any_ranges(name: str) -> None:
    """Rate and decay of a tensor come from the last group that has it and gives them: to the bit, in any cut."""
    spec = spec_of(name, groups=GROUPS)
    whole = trained(spec, 1)
    parts = split_ranges(TENSORS, len(TENSORS))
    for each in parts:
        tensor = each.tensors[0]
        alone = spec_of(name, learning_rate=RATES[tensor.name], weight_decay=DECAYS[tensor.name])
        rule, values, state = Optimizer(alone, each.tensors, STEPS), start()[each.start : each.stop], {}
        for step, gradient in enumerate(gradients()):
            values, state = rule.update(values, gradient[each.start : each.stop], state, step)
        assert np.frombuffer(whole[0][-1], np.float32)[each.start : each.stop].tobytes() == values.tobytes()
    for ranges in (2, 3, 5):
        cut = trained(spec, ranges)
        assert cut[0] == whole[0]
        assert {key: value.tobytes() for key, value in cut[1].items()} == {
            key: value.tobytes() for key, value in whole[1].items()
        }


def test_what_applies_to_a_tensor_follows_from_its_name() -> None:
    spec = spec_of("adamw", groups=GROUPS)
    found = {tensor.name: spec.of_tensor(tensor.name) for tensor in TENSORS}
    assert {name: terms.learning_rate for name, terms in found.items()} == RATES
    assert {name: terms.weight_decay for name, terms in found.items()} == DECAYS
    assert all(terms.groups == () for terms in found.values())
    assert spec_of("sgd").of_tensor("w") == spec_of("sgd")


@pytest.mark.parametrize("name", NAMES)
def test_an_update_changes_no_argument_and_repeats_exactly(name: str) -> None:
    rule = Optimizer(spec_of(name), TENSORS, STEPS)
    parameters, state = rule.update(start(), gradients()[0], rule.initial_state(), 0)
    gradient = gradients()[1]
    arguments = {"p": parameters, "g": gradient, **state}
    before = {key: value.tobytes() for key, value in arguments.items()}
    for value in arguments.values():
        value.setflags(write=False)
    once, again = (rule.update(parameters, gradient, state, 1) for _ in range(2))
    assert {key: value.tobytes() for key, value in arguments.items()} == before
    assert once[0].tobytes() == again[0].tobytes()
    assert once[0].dtype == np.float32
    assert {key: value.tobytes() for key, value in once[1].items()} == {
        key: value.tobytes() for key, value in again[1].items()
    }
    assert not any(np.shares_memory(once[0], value) for value in arguments.values())
    assert all(value.dtype == np.float32 for value in once[1].values())


def test_float32_and_float64_gradients_that_round_alike_give_the_same_bytes() -> None:
    rule = Optimizer(spec_of("adam"), TENSORS, STEPS)
    wide = gradients()[0]
    found = [rule.update(start(), each, {}, 0)[0].tobytes() for each in (wide, wide.astype(np.float32))]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_a_non_finite_result_stops_the_run(name: str, bad: float) -> None:
    gradient = gradients()[0]
    gradient[20] = bad
    with pytest.raises(RunFailedError) as caught:
        Optimizer(spec_of(name), TENSORS, STEPS).update(start(), gradient, {}, 3)
    assert caught.value.code == "non_finite_parameters"
    assert caught.value.step == 3


def test_a_non_finite_state_stops_the_run() -> None:
    gradient = gradients()[0]
    gradient[20] = 1e30
    with pytest.raises(RunFailedError):
        Optimizer(spec_of("adam", weight_decay=0.0), TENSORS, STEPS).update(start(), gradient, {}, 0)


def test_settings_a_rule_does_not_have_are_refused() -> None:
    for spec in (spec_of("adam", momentum=0.9), spec_of("sgd", warmup_steps=STEPS + 1)):
        with pytest.raises(ConfigError) as caught:
            Optimizer(spec, TENSORS, STEPS)
        assert caught.value.code == "optimizer"


@pytest.mark.parametrize("name", ["adam", "adamw", "adafactor"])
def test_the_specified_eps_is_used(name: str) -> None:
    first, other = (trained(spec_of(name, eps=eps), 1)[0][-1] for eps in (1e-8, 2.0))
    assert first != other


def test_schedules_follow_their_formulas() -> None:
    def rates(schedule: str, warmup: int, total: int = 10) -> list[float]:
        spec = spec_of("sgd", schedule=schedule, warmup_steps=warmup, learning_rate=2.0)
        return [learning_rate(spec, step, total) for step in range(total)]

    assert rates("constant", 0) == [2.0] * 10
    assert rates("constant", 4) == [0.5, 1.0, 1.5] + [2.0] * 7
    assert rates("linear", 0) == pytest.approx([2.0 * (1 - step / 10) for step in range(10)])
    assert rates("linear", 5) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0, 1.6, 1.2, 0.8, 0.4])
    assert rates("cosine", 0) == pytest.approx([1 + math.cos(math.pi * step / 10) for step in range(10)])
    assert rates("cosine", 2)[1:3] == [2.0, 2.0]
    assert rates("cosine", 10)[-1] == 2.0
