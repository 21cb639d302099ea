"""The plan and the claim of a run whose examples a client sends."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.coordinator.accounting.accountants import accountant_of
from raycloak.coordinator.audit.canaries import CanaryTask
from raycloak.coordinator.cli.views.plan import plan_rows
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.config.sections import DatasetConfig
from raycloak.coordinator.planning.claim import claimed_epsilon, epsilon_if_stop_was_blind
from raycloak.coordinator.planning.cross_check import checked
from raycloak.coordinator.planning.data_check import check_data
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.payer import PayingAccount, data_name
from raycloak.coordinator.planning.plan import Plan, make_plan
from raycloak.coordinator.planning.references import descriptor
from raycloak.coordinator.planning.sealing import SealTerms, seal_for
from raycloak.coordinator.runs.by_hand import by_hand
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.workers.inputs.datasets import dataset_form
from raycloak.workers.terms.mechanism import AccountantName
from tests.coordinator.ledger.ledger_cases import MANIFEST, PARAMETERS, affordable, opened

SLOTS, BOUND, STEPS, DIMENSION = 64, 4, 200, 5000
DATASET: dict[str, Any] = {
    "kind": "sent",
    "shape": [64],
    "classes": 10,
    "max_participations": BOUND,
    "max_examples_per_step": SLOTS,
}

NO_SENT = dict.fromkeys(DATASET) | {"kind": "digits"}


def config(dataset: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    raw = {
        "model": "raycloak_models:build",
        "dataset": DATASET | (dataset or {}),
        "expected_batch_size": 48.0,
        "steps": STEPS,
        "dp_config": {"target_epsilon": 2.0},
    }
    return parse_config(raw | changes)


def planned(dataset: dict[str, Any] | None = None, account: PayingAccount | None = None, **changes: Any) -> Plan:
    return make_plan(config(dataset, **changes), SLOTS, DIMENSION, account)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_noise_is_solved_for_as_many_gaussians_as_one_example_is_in(accountant: AccountantName):
    dp = {"target_epsilon": 2.0, "accountant": accountant}
    plan, every_step = (planned(dataset, dp_config=dp) for dataset in ({}, {"max_participations": STEPS}))
    assert 0.997 * 2.0 <= plan.epsilon <= 2.0
    # Gaussians compose exactly, so noise grows with the root of their number.
    ratio = every_step.mechanism.noise_multiplier / plan.mechanism.noise_multiplier
    assert ratio == pytest.approx(math.sqrt(STEPS / BOUND), rel=2e-3)
    assert plan.releases[0].count == BOUND
    assert (plan.steps_within_cap, plan.mechanism.steps) == (STEPS, STEPS)
    assert accountant_of(accountant).curve([plan.releases], 0.99e-5, None)[0] == pytest.approx(plan.epsilon, rel=1e-6)


def test_a_plan_of_fewer_steps_than_the_bound_pays_for_its_steps():
    assert planned({"max_participations": 1000}) == planned({"max_participations": 1000})
    few, all_of_them = planned(steps=3), planned({"max_participations": 1000}, steps=3)
    assert few.mechanism.noise_multiplier == all_of_them.mechanism.noise_multiplier
    assert few.releases[0].count == 3


def test_every_place_of_a_step_is_computed_and_none_is_cut():
    mechanism = planned().mechanism
    assert (mechanism.sample_rate, mechanism.num_examples, mechanism.overflow_probability) == (1.0, SLOTS, 0.0)
    assert mechanism.max_participations == BOUND
    places = mechanism.virtual_workers * mechanism.micro_batch_size * mechanism.micro_batches
    assert places >= SLOTS
    assert planned().delta_terms.batch_overflow == 0.0
    small = planned(micro_batch_size=3, virtual_workers=3).mechanism
    assert (small.micro_batch_size, small.micro_batches) == (3, 8)


def test_the_claim_is_the_plans_and_steps_beyond_the_bound_add_nothing_to_it():
    plan = planned()
    (claimed,) = {claimed_epsilon(plan, {"gradient": steps}) for steps in (0, 1, BOUND, STEPS)}
    assert claimed == pytest.approx(plan.epsilon_outsiders, rel=1e-12)
    blind = [epsilon_if_stop_was_blind(plan, {"gradient": steps}) for steps in (1, 2, BOUND, BOUND + 1, STEPS)]
    assert blind[0] < blind[1] < blind[2] == blind[3] == blind[4] == claimed
    one = planned({"max_participations": 1}, dp_config={"noise_multiplier": 4.0, "epsilon_cap": 2.0})
    assert one.epsilon_one_worker is not None
    assert one.epsilon < one.epsilon_one_worker


def test_a_cap_that_admits_less_than_the_bound_ends_the_run_there():
    dp = {"noise_multiplier": 2.0, "epsilon_cap": 2.0}
    plan = planned(dp_config=dp)
    assert plan.steps_within_cap < BOUND
    assert any("the run will end there" in warning for warning in plan.warnings)
    # A cap that admits one example's share admits every step.
    assert planned({"max_participations": plan.steps_within_cap}, dp_config=dp).steps_within_cap == STEPS


def test_the_five_accountants_check_what_is_claimed():
    found = checked(planned()).epsilon_by_accountant
    assert len(found) == 5
    assert max(found.values()) < 1.2 * min(found.values())


def test_a_plan_says_whose_word_the_bound_is_and_that_no_amplification_is_claimed():
    rows = dict(plan_rows(planned()))
    assert rows["examples"] == "64 at most in a step, 48 expected"
    assert rows["amplification"].startswith("none is claimed")
    assert rows["participations"].startswith("4 of 200 steps at most, and ε pays for 4: by the word of the service")
    assert "sample rate" not in rows
    assert "cut batches 0 (more are refused)" in rows["δ slack"]
    assert planned().as_json()["max_participations"] == BOUND


def test_delta_is_compared_with_all_that_could_ever_be_sent():
    one_over = 1 / (STEPS * SLOTS)
    for delta, warned in ((one_over * 1.01, True), (one_over * 0.99, False)):
        plan = planned(dp_config={"target_epsilon": 2.0, "target_delta": delta})
        assert any("not below 1/N" in warning for warning in plan.warnings) == warned


def test_a_batch_that_no_step_has_room_for_is_refused_with_the_field():
    with pytest.raises(ConfigError, match=r"batch_too_large: .* 64 examples of one step.*max_examples_per_step"):
        planned(expected_batch_size=65.0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dataset": DATASET | {"public": True}}, "dataset: data that a client sends is private"),
        ({"dataset": DATASET | {"path": "x.npz"}}, "path belongs to all kinds but digits, module and sent"),
        ({"dataset": DATASET | {"scale": 2.0}}, "scale does not belong to kind sent"),
        ({"dataset": DATASET | {"fingerprint_key": "k"}}, "fingerprint_key does not belong to kind sent"),
        ({"dataset": DATASET | {"max_participations": None}}, "max_participations belongs to kind sent"),
        ({"dataset": DATASET | {"max_participations": 0}}, "dataset.max_participations"),
        ({"dataset": DATASET | {"max_examples_per_step": None}}, "max_examples_per_step belongs to kind sent"),
        ({"dataset": DATASET | {"shape": None}}, "shape belongs to kind sent, and is needed there"),
        ({"dataset": DATASET | {"shape": [0]}}, "dataset.shape.0"),
        ({"dataset": DATASET | {"classes": None}}, "label_kind class needs the number of classes"),
        ({"dataset": DATASET | {"shape": [2**12, 2**13]}}, "an example has at most 16777216 values"),
        ({"dataset": DATASET | {"shape": [2**20] * 8}}, "an example has at most 16777216 values"),
        ({"dataset": DATASET | {"label_kind": "token"}}, "label_kind token needs a vocabulary"),
        ({"dataset": DATASET | {"label_kind": "number"}}, "label_kind number has no classes"),
        ({"dataset": NO_SENT | {"max_participations": 2}}, "max_participations belongs to kind sent"),
        ({"dataset": NO_SENT | {"label_kind": "number"}}, "label_kind belongs to kind sent"),
        ({"steps": None, "epochs": 2}, "epochs: nobody knows"),
        ({"measurements": {"class_counts": {"classes": 10, "noise_multiplier": 20}}}, "none can be measured"),
        ({"measurements": {"evaluation": {"noise_multiplier": 20}}}, "none can be measured"),
        ({"evaluation": {"dataset": DATASET}}, "evaluation.dataset: kind sent is for training"),
        ({"dp_config": {"enabled": False}}, "dp_config.enabled: data that a client sends is private"),
    ],
)
def test_what_does_not_fit_sent_data_is_refused_by_name(changes: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as refused:
        config(**changes)
    assert (refused.value.code, problem in refused.value.message) == ("config", True), refused.value.message


@pytest.mark.parametrize(
    ("dataset", "feature", "label"),
    [
        ({}, ((64,), "float32"), ((), "int64")),
        ({"shape": [1, 28, 28]}, ((1, 28, 28), "float32"), ((), "int64")),
        ({"classes": None, "label_kind": "number"}, ((64,), "float32"), ((), "float32")),
        ({"vocabulary": 500}, ((64,), "int64"), ((), "int64")),
        ({"vocabulary": 500, "classes": None, "label_kind": "token"}, ((64,), "int64"), ((64,), "int64")),
    ],
)
def test_the_form_of_the_examples_is_known_before_any_is_sent(dataset: dict[str, Any], feature: Any, label: Any):
    described = descriptor(DatasetConfig.model_validate(DATASET | dataset))
    examples = described.open(Path())
    form = dataset_form(examples)
    assert form == described.sent
    assert ((form.feature_shape, form.feature_dtype), (form.label_shape, form.label_dtype)) == (feature, label)
    assert form.num_examples == len(examples) == SLOTS
    with pytest.raises(DatasetError, match="not_sent"):
        examples.batch(np.zeros(1, np.int64))


def test_another_form_is_another_dataset_and_other_kinds_keep_their_identity():
    described = descriptor(DatasetConfig.model_validate(DATASET))
    other = descriptor(DatasetConfig.model_validate(DATASET | {"max_examples_per_step": 65}))
    assert described.identity_digest() != other.identity_digest()
    digits = descriptor(DatasetConfig(kind="digits"))
    assert b'"sent"' not in digits.encode()
    # As it was before there was such a kind: resumed runs compare it with their manifest.
    assert digits.digest().hex() == "b651ea03f79ca0e39af64494724c8e7ede033a448bac305d990d31824237d16e"


def test_a_configuration_survives_being_written_down():
    assert parse_config(config().model_dump(mode="json")) == config()


def test_the_command_plans_for_examples_that_are_not_there_yet(tmp_path: Path):
    """Model, loss and rows are tried on synthetic examples of the form; the account is new."""
    (tmp_path / "linear_of_64.py").write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(64, 10)\n")
    plan = plan_of(config(model="linear_of_64:build"), tmp_path)
    assert plan.account is not None
    assert (plan.account.name, plan.account.is_new, plan.account.steps) == ("data-sent", True, STEPS)
    assert plan.mechanism == make_plan(config(), SLOTS, 650, largest_rows=64).mechanism
    with pytest.raises(ConfigError, match=r"batch_too_large: .* 262144 rows in a step, over 131072"):
        plan_of(config({"max_examples_per_step": 2**21}, model="linear_of_64:build"), tmp_path)


@pytest.mark.parametrize(("others", "steps"), [(10, STEPS), (affordable() - 2, 2)])
def test_a_shared_account_needs_room_for_the_bound_and_not_for_every_step(others: int, steps: int, tmp_path: Path):
    """16 releases at this noise fit the account, and a client's example takes part in four at most."""
    (tmp_path / "linear_of_64.py").write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(64, 10)\n")
    home.home_path().mkdir(parents=True, exist_ok=True)
    with closing(opened(home.home_path() / "ledger.sqlite", "other")) as ledger:
        for step in range(others):
            ledger.charge("other", step, PARAMETERS, MANIFEST)
    dp = {"noise_multiplier": 2.6, "epsilon_cap": 8.0}
    plan = plan_of(config(model="linear_of_64:build", dp_config=dp, ledger={"account": "patients"}), tmp_path)
    assert plan.account is not None
    assert plan.account.steps == steps
    assert any("the run will end there" in warning for warning in plan.warnings) == (steps < STEPS)


def test_sent_data_that_names_no_account_shares_one(tmp_path: Path):
    assert data_name(config().dataset, tmp_path) == "data-sent" == data_name(config({"shape": [3]}).dataset, tmp_path)


def test_what_reads_examples_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="sent_data: a check reads examples"):
        check_data(config(), tmp_path)
    with pytest.raises(ConfigError, match="sent_data: sealing reads examples"):
        seal_for(config(), tmp_path, tmp_path / "key", tmp_path / "out", SealTerms("training", None))
    with pytest.raises(ConfigError, match="sent_data: an audit reads examples"):
        CanaryTask.of(config(), tmp_path, [True])
    with pytest.raises(ConfigError, match="sent_data: a run of its own reads examples"):
        Trainer(config(), config_dir=tmp_path)
    with (
        pytest.raises(ConfigError, match="sent_data: a loop by hand reads examples"),
        by_hand(config(), config_dir=tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
