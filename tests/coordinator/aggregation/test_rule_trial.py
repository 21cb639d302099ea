"""Update rules and schedules of the user's own: exact, and equal to torch's own loop, or refused by name."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from raycloak.attestation.core.evidence import Presentation
from raycloak.attestation.core.messages import parse
from raycloak.coordinator.aggregation.aggregator import MaskedAggregator
from raycloak.coordinator.aggregation.ranges import split_ranges
from raycloak.coordinator.aggregation.rule_trial import try_rule
from raycloak.coordinator.aggregation.update_rules import Optimizer, own_rule, require_source
from raycloak.coordinator.config.sections import OptimizerConfig, ParameterGroupConfig
from raycloak.coordinator.planning.manifest import optimizer_spec
from raycloak.metrics.errors import ConfigError, EvidenceError, ProtocolError, RunFailedError
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.terms.manifest import OptimizerSpec, TensorSpec
from tests.own_code import Lion
from tests.protocol import HandRun

TENSORS = tuple(TensorSpec(name=name, shape=shape) for name, shape in (("w", (30, 4)), ("b", (4,)), ("scale", ())))
BASE = Path(__file__).parent
"""A folder without modules that those of `tests.own_code` import."""
SIZE = sum(tensor.size for tensor in TENSORS)
STEPS = 5


def spec(name: str = "Lion", **fields) -> OptimizerSpec:
    own = name if ":" in name else f"tests.own_code:{name}"
    return optimizer_spec(OptimizerConfig(name=own, learning_rate=0.05, **fields), BASE)


def drawn() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1 + STEPS, SIZE)).astype(np.float32)


def test_guarantee_an_own_rule_is_what_torch_computes_for_any_ranges() -> None:
    """Also when its state travels as arrays between two instances, as in every step and in a resume."""
    own = spec(settings={"beta": 0.5}, schedule="tests.own_code:ramp")
    start, *gradients = drawn()
    leaves = [torch.from_numpy(part.copy()) for part in np.split(start, [120, 124])]
    leaves = [leaf.reshape(tensor.shape) for leaf, tensor in zip(leaves, TENSORS, strict=True)]
    rule = own_rule(own, BASE)({tensor.name: leaf for tensor, leaf in zip(TENSORS, leaves, strict=True)}, 1.0, own)
    assert isinstance(rule, Lion)
    for step, gradient in enumerate(gradients):
        for leaf, part in zip(leaves, np.split(gradient, [120, 124]), strict=True):
            leaf.grad = torch.from_numpy(part).reshape(leaf.shape)
        rule.param_groups[0]["lr"] = 0.05 * (step + 1) / STEPS
        rule.step()
    expected = b"".join(leaf.numpy().tobytes() for leaf in leaves)
    for count in (1, 2, 3):
        ranges = split_ranges(TENSORS, count)
        parts, states = [start[each.start : each.stop] for each in ranges], [{} for _ in ranges]
        for step, gradient in enumerate(gradients):
            for index, each in enumerate(ranges):
                part = Optimizer(own, each.tensors, STEPS, BASE)
                cut = gradient[each.start : each.stop]
                parts[index], states[index] = part.update(parts[index], cut, states[index], step)
        assert np.concatenate(parts).tobytes() == expected
        assert {key for state in states for key in state} == {"w/momentum", "b/momentum", "scale/momentum"}


def grouped(*groups: dict, **fields) -> OptimizerSpec:
    return spec(groups=[ParameterGroupConfig(**group) for group in groups], **fields)


def test_guarantee_an_own_rule_takes_the_settings_of_a_tensors_groups_for_any_ranges() -> None:
    own = grouped(
        {"params": "*", "learning_rate": 0.5},
        {"params": ["b", "scale"], "settings": {"beta": 0.25}},
        {"params": "b", "learning_rate": 0.125},
        settings={"beta": 0.5},
        schedule="tests.own_code:ramp",
    )
    terms = {"w": (0.5, 0.5), "b": (0.125, 0.25), "scale": (0.5, 0.25)}
    start, *gradients = drawn()
    leaves = dict(zip(terms, map(torch.from_numpy, np.split(start.copy(), [120, 124])), strict=True))
    rules = {name: Lion([leaf], lr=0.0, beta=terms[name][1]) for name, leaf in leaves.items()}
    for step, gradient in enumerate(gradients):
        for (name, rule), part in zip(rules.items(), np.split(gradient, [120, 124]), strict=True):
            leaves[name].grad = torch.from_numpy(part)
            rule.param_groups[0]["lr"] = terms[name][0] * ((step + 1) / STEPS)
            rule.step()
    expected = np.concatenate([leaf.numpy() for leaf in leaves.values()]).tobytes()
    for count in (1, 2, 3):
        ranges = split_ranges(TENSORS, count)
        parts, states = [start[each.start : each.stop] for each in ranges], [{} for _ in ranges]
        for step, gradient in enumerate(gradients):
            for index, each in enumerate(ranges):
                part = Optimizer(own, each.tensors, STEPS, BASE)
                cut = gradient[each.start : each.stop]
                parts[index], states[index] = part.update(parts[index], cut, states[index], step)
        assert np.concatenate(parts).tobytes() == expected


def test_an_own_rule_is_told_the_name_of_each_tensor() -> None:
    """As torch tells it of named parameters, so that a rule of the user's own can treat biases in another way."""
    rule = Optimizer(spec("OfBiases"), TENSORS, STEPS, BASE)
    moved = rule.update(drawn()[0], drawn()[1], {}, 0)[0] != drawn()[0]
    assert moved.tolist() == [False] * 120 + [True] * 4 + [False]
    # In its trial, too, which meets the names of the model.
    try_rule(spec("OfBiases"), TENSORS, STEPS, BASE)
    with pytest.raises(ConfigError, match="keeps state outside"):
        try_rule(spec("OfBiases", settings={"counts": True}), TENSORS, STEPS, BASE)


def test_a_rule_is_tried_with_the_settings_of_every_group() -> None:
    try_rule(grouped({"params": "w", "learning_rate": 1.0}), TENSORS, STEPS, BASE)
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'gamma'\.") as caught:
        try_rule(grouped({"params": "scale", "settings": {"gamma": 1}}), TENSORS, STEPS, BASE)
    assert caught.value.code == "update_rule"


def test_the_reader_is_told_which_tensors_a_group_takes() -> None:
    own = grouped({"params": ["b", "scale"], "learning_rate": 0.5}, {"params": "s*", "settings": {"beta": 0.1}})
    assert try_rule(own, TENSORS, STEPS, BASE) == (
        "learning rate 0.5 for b (1 of 3 tensors)",
        'learning rate 0.5, settings {"beta":0.1} for scale (1 of 3 tensors)',
    )
    assert try_rule(spec(), TENSORS, STEPS, BASE) == ()


def test_a_group_that_takes_no_tensor_is_refused_by_its_pattern() -> None:
    for rule in ("sgd", "tests.own_code:Lion"):
        groups = [ParameterGroupConfig(params=["w", "W"], learning_rate=1.0)]
        given = optimizer_spec(OptimizerConfig(name=rule, groups=groups), BASE)
        with pytest.raises(ConfigError, match="no trained tensor has a name like 'W'; there are w, b, scale") as caught:
            try_rule(given, TENSORS, STEPS, BASE)
        assert caught.value.code == "parameter_groups"


@pytest.mark.parametrize("name", ["Lion", "torch.optim:RMSprop", "torch.optim:NAdam"])
def test_a_rule_that_repeats_passes_its_trial(name: str) -> None:
    try_rule(spec(name), TENSORS, STEPS, BASE)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Draws", "gives other bytes for the same input"),
        ("CountsOutside", "keeps state outside self.state"),
        ("CountsInWholeNumbers", "keeps 'steps' as int"),
        ("KeepsAverages", "names its state 'averaged_weights'"),
        ("Couples", "lets one tensor's update depend on another"),
        ("Explodes", "infinite or not a number"),
        ("no_rule", "is no class of torch.optim.Optimizer"),
    ],
)
def test_guarantee_a_rule_that_a_run_could_not_repeat_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        try_rule(spec(name), TENSORS, STEPS, BASE)
    assert caught.value.code == "update_rule"


def test_coupled_tensors_of_one_shape_are_found() -> None:
    with pytest.raises(ConfigError, match="lets one tensor's update depend on another"):
        try_rule(spec("Couples"), (TENSORS[1], TENSORS[1]), STEPS, BASE)


def test_settings_that_a_rule_does_not_take_are_told_in_its_own_words() -> None:
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'gamma'\.") as caught:
        try_rule(spec(settings={"gamma": 1}), TENSORS, STEPS, BASE)
    assert caught.value.code == "update_rule"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("falls_below_zero", "gives -1.0 at step 2 of 5"),
        ("of_one", "at step 0 of 5, tests.own_code:of_one fails with TypeError"),
        ("moves", "for step 0 of 5"),
    ],
)
def test_a_schedule_that_gives_no_factor_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        try_rule(spec("Lion", schedule=f"tests.own_code:{name}"), TENSORS, STEPS, BASE)
    assert caught.value.code == "schedule"


def test_guarantee_only_the_source_that_the_manifest_states_is_applied(tmp_path) -> None:
    source = "import torch\n\n\nclass Rule(torch.optim.SGD):\n    pass\n\n\nhalf = lambda step, steps: 0.5\n"
    (tmp_path / "rules.py").write_text(source)
    stated = optimizer_spec(OptimizerConfig(name="rules:Rule", schedule="rules:half"), tmp_path)
    require_source(stated, tmp_path)
    (tmp_path / "rules.py").write_text(source + "# changed\n")
    for named in (stated, stated.model_copy(update={"name": "sgd"})):
        with pytest.raises(ProtocolError, match="manifest_mismatch"):
            require_source(named, tmp_path)


SOURCE = """
import torch
from bundled_half import half

class Rule(torch.optim.SGD):
    pass

def schedule(step, steps):
    return half()
"""


@pytest.mark.parametrize("own", [{"name": "bundled_rules:Rule"}, {"schedule": "bundled_rules:schedule"}])
def test_guarantee_a_rule_or_schedule_comes_from_the_bundle_that_the_contract_states(
    tmp_path, own_imports, own
) -> None:
    """Not even a file that changes once it was compared is executed."""
    (tmp_path / "bundled_rules.py").write_text(SOURCE)
    (tmp_path / "bundled_half.py").write_text("def half():\n    return 0.5\n")
    listed = CodeBundle.read(tmp_path).digest
    stated = optimizer_spec(OptimizerConfig(**own), tmp_path)
    for name in ("bundled_half", "bundled_rules"):
        sys.modules.pop(name, None)
    with pytest.raises(EvidenceError, match=f"code_unlisted: bundled_rules:.*{listed.hex()}"):
        require_source(stated, tmp_path, b"x" * 32)
    require_source(stated, tmp_path, listed)
    for name in ("bundled_rules", "bundled_half"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit\n")
    rule = Optimizer(stated, TENSORS, STEPS, tmp_path)
    vector, gradient, *_ = drawn()
    assert not np.array_equal(rule.update(vector, gradient, {}, 0)[0], vector)
    with pytest.raises(EvidenceError, match="code_unlisted"):
        require_source(stated, tmp_path, CodeBundle.read(tmp_path).digest)


@pytest.mark.usefixtures("own_imports")
def test_an_aggregator_presents_itself_only_with_a_rule_of_the_bundle_that_the_contract_states(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bundled_rules.py").write_text("import torch\n\nclass Rule(torch.optim.SGD):\n    pass\n")
    monkeypatch.chdir(tmp_path / "data")
    hand = HandRun(tmp_path, optimizer={"name": "bundled_rules:Rule", "learning_rate": 0.5})
    listed = CodeBundle.read(Path()).digest
    actor = MaskedAggregator("aggregator-9", hand.source)
    for code in (b"x" * 32, listed):
        stated = hand.manifest.model_copy(update={"code": code})
        challenge = hand.orchestrator.challenge("aggregator-9", "aggregator")
        of_stated = challenge.model_copy(update={"manifest_digest": stated.digest()}), stated, hand.ranges[0]
        if code == listed:
            assert parse(Presentation, actor.present(*of_stated).body).code == listed
        else:
            with pytest.raises(EvidenceError, match="code_unlisted: bundled_rules:Rule"):
                actor.present(*of_stated)


def test_a_rule_that_fails_in_a_step_is_told_with_the_step() -> None:
    rule = Optimizer(spec(settings={"gamma": 1}), TENSORS, STEPS, BASE)
    with pytest.raises(RunFailedError, match=r"in step 3, tests\.own_code:Lion fails with TypeError") as caught:
        rule.update(*drawn()[:2], {}, 3)
    assert (caught.value.code, caught.value.step) == ("update_rule", 3)
