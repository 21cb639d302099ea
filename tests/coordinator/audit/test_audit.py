"""`raycloak audit`: it flags each seeded defect, and never a correct build.

All audits here state a confidence of 1 - 3e-8. Fewer than thirty are of a correct build, so one of them is flagged with
a chance below 1e-6. Coins and run secrets are fixed.
"""

import json
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.coordinator.audit.audit import audit
from raycloak.coordinator.audit.canaries import CanaryTask, canary_signs
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.planning.dry_run import mechanism_of, plan_of
from raycloak.coordinator.planning.plan import plan_mechanism
from raycloak.coordinator.planning.references import descriptor
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import BudgetError, ConfigError, ModelError, RunFailedError
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.inputs.datasets import ArrayDataset, CanaryDataset
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.models.models import ModelSource, build_model, read_flat
from raycloak.workers.run_member import RunMember
from tests.coordinator.audit import audit_cases as cases
from tests.coordinator.audit.audit_cases import audited, coins_of, small_config
from tests.protocol import examples
from tests.rounds import rounds
from tests.tiny_text import write_bert, write_gpt2, write_reviews

ONE_WORKERS_NOISE = {"virtual_workers": 64, "canaries": 4000}
"""So many that the defect shows by a wide margin under the keys of every instruction set."""
LARGE_BATCHES = {"virtual_workers": 4}
billed = partial(small_config, virtual_workers=4)
"""The configuration of audits that are about accounts: those are charged the same for few virtual workers."""
LONG_COLUMN = {"bands": 9, "steps": 18, "sample_rate": 1.0, "canaries": 2500}
"""Two rounds, of which each canary is in every one. The last ends with the run."""
FULL_BATCHES = {"sample_rate": 0.1, "steps": 16, "virtual_workers": 8, "canaries": 3000}


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    features, labels = examples(cases.EXAMPLES)
    np.savez(folder / "examples.npz", features=features, labels=labels)
    return folder


# --- a correct build


@pytest.mark.parametrize("seed", range(rounds(3)))
def test_a_correct_build_stays_below_the_ledgers_epsilon(tmp_path, seed):
    result = audited(tmp_path, seed)
    assert result.epsilon_lower < result.epsilon <= 1
    assert 0.99 < result.sensitivity < 1
    assert not result.contradicted


def test_a_model_that_puts_one_example_into_the_place_of_another_is_flagged(tmp_path, monkeypatch):
    """The idiom of recurrent models, in a build whose checks find nothing."""
    cases.checks_that_find_nothing(monkeypatch)
    result = audited(tmp_path, 0, canaries=32, model="tests.coordinator.audit.audit_cases:sorted_model")
    assert result.epsilon_lower < result.epsilon
    assert result.sensitivity > 1.5
    assert result.contradicted


def test_such_a_model_is_refused_before_an_audit_charges_anything(tmp_path):
    with pytest.raises(ModelError, match=r"moved_rows|mixing_layer"):
        audited(tmp_path, 0, canaries=32, model="tests.coordinator.audit.audit_cases:sorted_model")


@pytest.mark.parametrize("settings", [ONE_WORKERS_NOISE, LARGE_BATCHES, FULL_BATCHES], ids=lambda s: str(len(s)))
def test_a_correct_build_stays_below_it_in_the_other_settings_too(tmp_path, settings):
    assert not audited(tmp_path, 0, **settings).contradicted


def test_a_correct_build_stays_below_the_epsilon_of_a_patient(tmp_path):
    result = audited(tmp_path, 0, **cases.OF_PATIENTS)
    assert result.epsilon_lower < result.epsilon <= 1
    assert 0.99 < result.sensitivity < 1
    assert not result.contradicted


def test_a_correct_build_with_correlated_noise_stays_below_it(tmp_path):
    """Rounds of three steps, and key epochs of five, so that some rounds are cut."""
    assert not audited(tmp_path, 0, bands=3, steps=12, epoch_steps=5).contradicted


def test_a_correct_build_with_a_long_column_stays_below_it(tmp_path, monkeypatch):
    cases.coefficients_of_a_long_column(monkeypatch)
    assert not audited(tmp_path, 0, **LONG_COLUMN).contradicted


# --- seeded defects


def flagged(tmp_path, **settings):
    result = audited(tmp_path, 0, **settings)
    assert result.contradicted
    assert result.epsilon_lower > 1.1 * result.epsilon
    return result


def test_a_run_without_noise_is_flagged(tmp_path, monkeypatch):
    cases.without_noise(monkeypatch)
    flagged(tmp_path)


def test_noise_without_the_norm_of_the_coefficients_is_flagged(tmp_path, monkeypatch):
    cases.coefficients_of_a_long_column(monkeypatch)
    cases.noise_without_the_norm_of_the_coefficients(monkeypatch)
    flagged(tmp_path, **LONG_COLUMN)


def test_the_noise_of_one_virtual_worker_alone_is_flagged(tmp_path, monkeypatch):
    cases.noise_of_one_virtual_worker_only(monkeypatch)
    flagged(tmp_path, **ONE_WORKERS_NOISE)


def test_sigma_divided_by_virtual_workers_once_too_often_is_flagged(tmp_path, monkeypatch):
    cases.sigma_divided_by_virtual_workers_once_more(monkeypatch)
    flagged(tmp_path)


def test_clipping_after_averaging_is_flagged(tmp_path, monkeypatch):
    cases.clipping_after_averaging(monkeypatch)
    flagged(tmp_path, **LARGE_BATCHES)


def test_clipping_a_patient_s_rows_one_by_one_is_flagged(tmp_path, monkeypatch):
    """A canary's eight rows, each clipped to C, move the sum by 8 C together."""
    cases.clipping_rows_in_the_place_of_their_unit(monkeypatch)
    assert flagged(tmp_path, canaries=4000, **cases.OF_PATIENTS).sensitivity > 7.9


def test_one_worker_that_does_not_clip_is_flagged(tmp_path, monkeypatch):
    cases.one_worker_that_does_not_clip(monkeypatch)
    flagged(tmp_path)


@pytest.mark.parametrize("sample_rate", [0.5, 1.0])
def test_a_noise_key_reused_across_steps_is_flagged(tmp_path, monkeypatch, sample_rate):
    """Only the differences of consecutive releases show it."""
    cases.noise_key_reused_across_steps(monkeypatch)
    assert flagged(tmp_path, sample_rate=sample_rate).score == "difference"


def test_every_example_in_every_batch_accounted_at_a_tenth_is_flagged(tmp_path, monkeypatch):
    cases.every_example_in_every_batch(monkeypatch)
    assert flagged(tmp_path, **FULL_BATCHES).sample_rate == pytest.approx(0.1)


# --- what is audited, and what it costs


@pytest.mark.parametrize("length", [{"steps": 4}, {"steps": None, "epochs": 2.0}], ids=lambda length: str(list(length)))
def test_the_audited_mechanism_is_that_of_the_configuration(home, length):
    config = small_config()
    plan = plan_of(config, home)
    audited_as = parse_config({**config.model_dump(mode="json"), **length})
    reports: list[StepReport] = []
    result = audit(audited_as, home, canaries=100, progress=reports.append)
    # The cap may end a longer plan at the same step.
    assert {report.steps for report in reports} == {config.steps}
    assert result.sample_rate == pytest.approx(plan.mechanism.sample_rate, rel=1e-12)
    assert result.noise_multiplier == plan.mechanism.noise_multiplier
    assert (result.steps, result.delta) == (config.steps, config.dp_config.target_delta)
    assert result.epsilon == pytest.approx(plan.epsilon, rel=1e-3)


def test_an_audit_keeps_the_bands_of_a_plan_and_a_named_account_pays_once_a_round(home, raycloak_home):
    """The coefficients are chosen again: the audit's update rule has no momentum."""
    raycloak_home.mkdir()
    ledger = PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}")
    ledger.open_account("hospital", OpeningTerms(1.5, cases.DELTA))
    config = billed(bands=2, steps=8, ledger={"account": "hospital"})
    planned = mechanism_of(config, home)
    result = audit(config, home, canaries=100)
    found = RunFolder.open(result.run_dir).manifest().computation.mechanism
    assert found.bands == planned.bands == 2
    assert found.coefficients != planned.coefficients
    assert (found.steps, found.noise_multiplier) == (planned.steps, planned.noise_multiplier)
    assert found.sample_rate == pytest.approx(planned.sample_rate, rel=1e-12)
    (account,) = ledger.view().accounts
    ledger.close()
    # An account that others might share pays at fewer orders.
    assert result.epsilon == pytest.approx(1.0, rel=1e-3)
    assert account.spent_epsilon < 1.1


def test_a_batch_that_is_left_to_the_plan_is_audited_as_planned(home):
    left = {"expected_batch_size": None, "steps": None, "epochs": 2.0}
    dp_config = {"target_epsilon": 1.0, "noise": {"correlated": "auto"}}
    config = parse_config({**billed().model_dump(mode="json"), **left, "dp_config": dp_config})
    planned = plan_of(config, home).mechanism
    result = audit(config, home, canaries=100)
    assert result.steps == planned.steps
    assert result.sample_rate == pytest.approx(planned.sample_rate, rel=1e-12)
    assert result.noise_multiplier == planned.noise_multiplier


def test_the_noise_is_that_of_the_run_where_epsilon_pays_for_cut_draws(home):
    """Micro-batches that are measured cut other draws than assumed ones, and the noise pays for it."""
    features, labels = examples(300)
    np.savez(home / "examples.npz", features=features, labels=labels)
    tight = {"target_epsilon": 4.0, "target_delta": 1e-5}
    config = small_config(virtual_workers=2, expected_batch_size=150, micro_batch_size=None, dp_config=tight)
    planned = plan_of(config, home).mechanism.noise_multiplier
    assumed = plan_mechanism(config, 300, 1).noise_multiplier
    assert audit(config, home, canaries=100).noise_multiplier == planned > assumed


def test_the_noise_is_that_of_the_account_that_pays(home, raycloak_home):
    raycloak_home.mkdir()
    ledger = PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}")
    ledger.open_account("hospital", OpeningTerms(4.0, 1e-5, "rdp"))
    ledger.close()
    open_choice = {"target_epsilon": 4.0, "target_delta": 1e-5}
    config = small_config(dp_config=open_choice, ledger={"account": "hospital"})
    planned = plan_of(config, home).mechanism
    result = audit(config, home, canaries=100)
    assert planned.accountant == "rdp"
    assert (result.noise_multiplier, result.steps) == (planned.noise_multiplier, planned.steps)


def test_what_is_measured_beside_the_gradients_is_left_out_and_their_noise_stays_the_planned_one(home, raycloak_home):
    config = small_config(sample_rate=0.1, measurements={"class_counts": {"classes": 3, "noise_multiplier": 20.0}})
    # Before the audit, which leaves the account of this data no room for another run.
    planned, alone = plan_of(config, home).mechanism, plan_of(small_config(sample_rate=0.1), home).mechanism
    result = audit(config, home, canaries=100)
    assert result.noise_multiplier == planned.noise_multiplier
    assert result.noise_multiplier > 1.01 * alone.noise_multiplier
    assert result.epsilon < 0.99
    ledger = PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}", create=False)
    (run,) = ledger.view().accounts[0].runs
    ledger.close()
    assert [each.query for each in run.queries] == ["gradient"]


def test_an_audit_of_private_data_is_charged_like_a_run_and_leaves_a_record(home, raycloak_home):
    result = audit(billed(), home, canaries=100)
    ledger = PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}", create=False)
    (account,) = ledger.view().accounts
    ledger.close()
    assert account.name == result.account
    assert account.spent_epsilon == result.epsilon > 0.9
    assert [run.charged_steps for run in account.runs] == [4]
    assert json.loads((result.run_dir / "audit.json").read_text())["epsilon"] == result.epsilon
    assert (result.run_dir / "manifest.json").exists()


def test_a_named_account_pays_to_its_cap_and_only_this_runs_epsilon_is_compared(home, raycloak_home):
    raycloak_home.mkdir()
    url = f"sqlite:///{raycloak_home / 'ledger.sqlite'}"
    ledger = PrivacyLedger(url)
    ledger.open_account("hospital", OpeningTerms(1.5, cases.DELTA))
    ledger.close()
    config = billed(ledger={"account": "hospital"})
    first, second = audit(config, home, canaries=100), audit(config, home, canaries=100)
    assert first.account == "hospital"
    assert second.epsilon == first.epsilon
    third = audit(config, home, canaries=100)
    assert third.steps < config.steps
    assert third.epsilon < first.epsilon


def fingerprinted(home, dataset):
    """The fingerprint of the data that a configuration names, under a key that is made for it."""
    key = home / "data.key"
    key.touch(mode=0o600)
    key.write_text("0f" * 32)
    described = descriptor(small_config(dataset=dataset).dataset)
    return data_marks(described, described.open_slices(home), home).fingerprint


def test_an_account_that_is_bound_to_a_file_pays_for_its_audit_and_for_no_other(home, raycloak_home, tmp_path):
    dataset = {"kind": "npz", "path": "examples.npz", "features": "features", "fingerprint_key": "data.key"}
    config = billed(dataset=dataset, ledger={"account": "hospital", "witness": str(tmp_path / "witness")})
    fingerprint = fingerprinted(home, dataset)
    raycloak_home.mkdir()
    (tmp_path / "witness").mkdir()
    ledger = PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}", witness=str(tmp_path / "witness"))
    ledger.open_account("hospital", OpeningTerms(5.0, cases.DELTA), data=DataMarks(fingerprint=fingerprint))
    ledger.close()
    assert audit(config, home, canaries=100).account == "hospital"
    assert any((tmp_path / "witness").rglob("*"))
    features, labels = examples(cases.EXAMPLES)
    np.savez(home / "examples.npz", features=features + 1, labels=labels)
    with pytest.raises(BudgetError, match="dataset_mismatch"):
        audit(config, home, canaries=100)


def test_guarantee_every_audit_of_one_dataset_is_charged_to_one_account(home, raycloak_home):
    """Its examples come from a function, and each audit draws other coins for its canaries."""
    (home / "mine.py").write_text(
        "import numpy as np\n"
        "from raycloak.workers.inputs.datasets import ArrayDataset\n"
        "def rows():\n"
        "    content = np.load('examples.npz')\n"
        "    return ArrayDataset(content['features'], content['labels'])\n".replace("'examples", f"'{home}/examples")
    )
    dataset = {"kind": "module", "function": "mine:rows", "fingerprint_key": "data.key"}
    fingerprinted(home, dataset)
    # A cap with room for two, and the accountant that several runs may share.
    shared = billed(dataset=dataset).dp_config.model_dump() | {"epsilon_cap": 5.0, "accountant": "rdp"}
    results = [audit(billed(dataset=dataset, dp_config=shared), home, canaries=100) for _ in range(2)]
    ledger = PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}", create=False)
    (account,) = ledger.view().accounts
    ledger.close()
    assert {result.account for result in results} == {account.name}
    assert len(account.runs) == 2


def test_guarantee_no_audit_of_data_that_an_account_pays_for_is_free(home, raycloak_home):
    audit(billed(), home, canaries=100)
    dataset = billed().dataset.model_dump() | {"public": True}
    with pytest.raises(BudgetError, match="account_known"):
        audit(billed(dataset=dataset), home, canaries=100)


def test_an_audit_of_public_data_charges_nothing(home, raycloak_home):
    dataset = {"kind": "npz", "path": "examples.npz", "features": "features", "public": True}
    result = audit(billed(dataset=dataset), home, canaries=100)
    assert result.account is None
    assert result.epsilon > 0.9
    assert not (raycloak_home / "ledger.sqlite").exists()


def test_the_canaries_of_a_text_model_have_axes_of_their_own(tmp_path):
    """With an adapter, and the ids of the model's own tokenizer."""
    write_gpt2(tmp_path / "model")
    (tmp_path / "text").write_text("the film was very fine " * 40)
    data = {"kind": "text_blocks", "path": "text", "max_length": 8}
    model = {"hf": "model", "task": "causal_lm", "lora": {"rank": 2}}
    raw = {"expected_batch_size": 20, "model": model, "dataset": data, "dp_config": {"target_epsilon": 8}}
    canaries = CanaryTask.of(parse_config(raw), tmp_path, coins_of(0, 40).tolist())
    assert canaries.vocabulary == 16
    assert len(canaries.make_dataset()) > 40


def test_an_audit_of_an_adapter_flags_a_run_without_noise_and_no_correct_one(tmp_path, monkeypatch):
    write_bert(tmp_path / "model", num_hidden_layers=1)
    write_reviews(tmp_path / "text.tsv", cases.EXAMPLES)
    task = {
        "model": {"hf": "model", "task": "sequence_classification", "classes": 2, "lora": {"rank": 2}},
        "dataset": {"kind": "text", "path": "text.tsv", "max_length": 8, "public": True},
        # Enough for 1.4 times the epsilon where there is no noise at all.
        "canaries": 300,
    }
    assert not audited(tmp_path, 0, **task).contradicted
    cases.without_noise(monkeypatch)
    flagged(tmp_path, **task)


def test_a_named_account_pays_for_its_audit_even_if_the_data_is_declared_public(home, raycloak_home):
    """It may be bound to this very data; the models in the run directory show as much of it as any other."""
    dataset = {"kind": "npz", "path": "examples.npz", "features": "features", "fingerprint_key": "data.key"}
    fingerprint = fingerprinted(home, dataset)
    raycloak_home.mkdir()
    ledger = PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}")
    ledger.open_account("hospital", OpeningTerms(5.0, cases.DELTA), data=DataMarks(fingerprint=fingerprint))
    ledger.open_account("others", OpeningTerms(5.0, cases.DELTA), data=DataMarks(fingerprint=b"o" * 32))
    declared = {"dataset": {**dataset, "public": True}}
    result = audit(billed(**declared, ledger={"account": "hospital"}), home, canaries=100)
    assert result.account == "hospital"
    with pytest.raises(BudgetError, match="dataset_mismatch"):
        audit(billed(**declared, ledger={"account": "others"}), home, canaries=100)
    spent = {account.name: account.spent_epsilon for account in ledger.view().accounts}
    ledger.close()
    assert spent["hospital"] >= result.epsilon > 0.9
    assert spent["others"] == 0


def test_what_cannot_be_audited_is_refused_before_anything_is_charged(home, raycloak_home):
    public = {"kind": "npz", "path": "examples.npz", "features": "features", "public": True}
    with pytest.raises(ConfigError, match="nothing_to_audit"):
        audit(small_config(dataset=public, dp_config={"enabled": False}), home, canaries=100)
    with pytest.raises(ConfigError, match="labels_beyond_head"):
        audit(small_config(dataset={**public, "public": False, "classes": 4}), home, canaries=100)
    with pytest.raises(ConfigError, match="audit_canaries"):
        audit(small_config(), home, canaries=5)
    with pytest.raises(ConfigError, match="audit_confidence"):
        audit(small_config(), home, canaries=100, confidence=1.0)
    with pytest.raises(ConfigError, match="needs both dataset and model"):
        audit(small_config(model=None), home, canaries=100)
    assert not (raycloak_home / "ledger.sqlite").exists()


def test_an_audit_that_fails_is_over_for_good(home, raycloak_home, monkeypatch):
    """The charge stays, and nothing is left to resume."""
    genuine, asked = RunMember._compute, []

    def compute(self, *arguments):
        asked.append(self)
        if len(asked) > 2:  # both workers have computed the first step
            raise RuntimeError("a defect")
        genuine(self, *arguments)

    monkeypatch.setattr(RunMember, "_compute", compute)
    with pytest.raises(RunFailedError, match="worker_error"):
        audit(small_config(), home, canaries=100)
    (run_dir,) = (raycloak_home / "runs").iterdir()
    assert RunFolder.open(run_dir).record.status == "void"
    ledger = PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}", create=False)
    assert ledger.view().accounts[0].spent_epsilon > 0
    ledger.close()


# --- canaries


def task_of(home, model="tests.models:small_model", **fields) -> CanaryTask:
    return CanaryTask.of(small_config(model=model, **fields), home, coins_of(0, 40).tolist())


def test_a_canary_is_marked_and_its_content_is_zero():
    included = np.array([True, False])
    dataset = CanaryDataset(ArrayDataset(*examples(5)), included)
    features, labels = dataset.batch(np.array([4, 5, 6]))
    assert len(dataset) == 7
    assert features[:, -1].tolist() == [0, 1, -1]
    assert not features[1:, :-1].any()
    assert not labels[1:].any()
    assert np.array_equal(features[0, :-1], examples(5)[0][4])


def test_the_users_part_of_the_model_starts_as_it_would_without_canaries(home):
    task_of(home).write(home)
    own = read_flat(build_model(ModelSource.of("tests.models:small_model"), home, 0))
    with_canaries = read_flat(build_model(ModelSource.of("raycloak_audit_task:model"), home, 0))
    assert np.array_equal(with_canaries[: len(own)], own)
    assert not with_canaries[len(own) :].any()


def test_the_sign_of_a_canarys_gradient_is_known_from_the_released_model(home):
    """Half of 40 parameters have an odd last bit, or thereabouts; the draw is fixed."""
    task = task_of(home)
    model = task.make_model()
    with torch.no_grad():
        model.canaries.weight.normal_(generator=torch.Generator().manual_seed(1))
    canaries = np.flatnonzero(task.included)
    gradients = GradientParts(model, task.loss)
    features, labels = task.make_dataset().batch(canaries + cases.EXAMPLES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        *_, found = gradients.rows(torch.from_numpy(features), torch.from_numpy(labels))
    signs = canary_signs(model.canaries.weight.detach().numpy())[0]
    assert set(signs) == {-1, 1}
    expected = np.zeros((len(canaries), 40))
    expected[np.arange(len(canaries)), canaries] = task.raw_norm * signs[canaries]
    assert np.array_equal(found[:, 0].numpy(), expected)


def test_integer_features_and_vector_labels_work_too(home):
    np.savez(home / "tokens.npz", tokens=np.ones((50, 3), np.int64), targets=np.zeros((50, 2), np.float32))
    (home / "user_model.py").write_text(
        "from torch import nn\ndef model(): return nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(6, 2))\n"
    )
    dataset = {"kind": "npz", "path": "tokens.npz", "features": "tokens", "labels": "targets", "vocabulary": 4}
    config = small_config(
        model="user_model:model", loss="mse", dataset=dataset, expected_batch_size=20, virtual_workers=4
    )
    assert audit(config, home, canaries=40).steps == 4


def test_a_model_under_which_canaries_would_be_invisible_is_refused(home):
    (home / "user_model.py").write_text(
        "from torch import nn\n"
        "class Normalised(nn.Module):\n"
        "    def forward(self, x): return x / x.norm(dim=1, keepdim=True)\n"
        "def model(): return nn.Sequential(Normalised(), nn.Linear(6, 3))\n"
    )
    with pytest.raises(ModelError, match="canary_gradient"):
        task_of(home, "user_model:model")


def test_the_coins_are_for_this_user_alone(home):
    task_of(home).write(home)
    assert (home / "task.json").stat().st_mode & 0o777 == 0o600
