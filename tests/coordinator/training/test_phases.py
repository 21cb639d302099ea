"""Whole runs in one process: accounted to the cap, masked on every way; exactness has a file of its own."""

from dataclasses import replace

import numpy as np
import pytest

from raycloak.attestation.core.messages import open_envelope
from raycloak.coordinator.accounting.calibration import epsilon_against
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.training.phases import Phase
from raycloak.metrics.errors import BudgetError, ConfigError, DatasetError, ModelError
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.receipt import Receipt
from tests.models import wide_model
from tests.protocol import (
    VIRTUAL_WORKERS,
    WholeRun,
    computer,
    correlation,
    examples,
    keys_of,
    on_machines,
    trained,
    whole_run,
)


def failure(kind, home, **arguments) -> tuple[Exception, WholeRun]:
    run = whole_run(home, **arguments)
    with pytest.raises(kind) as error:
        run.train()
    assert run.coordinator.phase is Phase.FAILED
    return error.value, run


def test_the_public_split_is_opened_once_workers_were_asked_to_open_their_data(tmp_path):
    """So that no worker waits for it; what is wrong with it still ends the run before anything is charged."""
    asked: list[int] = []
    run = whole_run(tmp_path)

    def build() -> None:
        asked.append(len(run.stage.calls("prepare")))
        raise DatasetError("dataset_unreadable", "no split.", "Give one.")

    run.coordinator.order = replace(run.coordinator.order, public=build)
    with pytest.raises(DatasetError, match="no split"):
        run.train()
    assert asked == [3]
    assert not run.stage.calls("charge")


# --- accounted


CAPPED = {"steps": 6, "overrides": ["dp_config.epsilon_cap=3.0"]}


def test_the_cap_ends_a_run_cleanly(tmp_path, undisturbed):
    """The last step within the cap is committed, the one beyond computes nothing, and the verdict is ready."""
    run = trained(tmp_path, **CAPPED)
    finished = run.finished
    assert 1 < finished.steps < 6
    assert finished.steps == finished.plan.steps_within_cap == len(run.digests) == len(finished.outcomes)
    assert finished.charged_epsilon <= 3.0
    assert epsilon_against(finished.plan.mechanism, 0, finished.plan.delta, finished.steps + 1) > 3.0
    assert max(call.arguments[1] for call in run.stage.calls("charge")) == finished.steps
    assert len(run.stage.calls("step")) == 3 * finished.steps
    committed = [body for kind, body in run.evidence if kind == "committed"]
    assert [body["step"] for body in committed] == list(range(finished.steps))
    assert [body["released_digest"] for body in committed] == run.digests
    assert run.evidence[-1][0] == "finished"
    assert run.coordinator.phase is Phase.DONE
    assert run.metric("raycloak_steps_refused_total") == 1
    assert finished.plan.warnings


def test_a_repeat_of_a_capped_run_ends_at_the_same_step(tmp_path):
    first = trained(tmp_path, **CAPPED)
    before = first.entries
    second = trained(tmp_path, num_workers=2, **CAPPED)
    assert second.digests == first.digests
    assert second.entries == before


def test_a_shared_account_pays_for_many_runs_up_to_its_cap(tmp_path):
    def shared(secret: str) -> dict:
        return {"secret": secret, "overrides": ["ledger.account=patients"]}

    ledger = PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    ledger.open_account("patients", OpeningTerms(3.0, 1e-5))
    ledger.close()
    first = trained(tmp_path, **shared("ab" * 32))
    second = whole_run(tmp_path, **shared("cd" * 32))
    warnings, reporter = [], second.coordinator._reporter
    reporter.to = replace(reporter.to, warned=warnings.append)
    second.train()
    assert first.finished.steps == 3
    assert 0 < second.finished.steps < 3
    # As `raycloak plan` says it, but no part of the plan: a claim may rest on nothing that other runs charge.
    spent = epsilon_text(first.finished.charged_epsilon)
    fits = f"{second.finished.steps} of 3 steps fit, and the run will end there."
    assert f"account 'patients' has spent epsilon {spent} of 3: {fits}" in warnings
    assert not any("steps fit" in warning for warning in second.finished.plan.warnings)
    # Its repeat is paid for, so nothing that it needs is missing.
    again = whole_run(tmp_path, **shared("cd" * 32))
    again.coordinator._reporter.to = replace(again.coordinator._reporter.to, warned=warnings.append)
    told = len(warnings)
    again.train()
    assert again.digests == second.digests
    assert not any("steps fit" in warning for warning in warnings[told:])
    assert first.finished.charged_epsilon < second.finished.charged_epsilon <= 3.0
    error, run = failure(BudgetError, tmp_path, **shared("ef" * 32))
    assert error.code == "cap_exceeded"
    assert run.stage.calls("step") == []


def test_an_account_that_does_not_exist_is_refused(tmp_path):
    error, run = failure(BudgetError, tmp_path, overrides=["ledger.account=nobody"])
    assert error.code == "account_unknown"
    assert run.stage.calls("release") == []


def test_a_warning_of_the_plan_comes_before_anything_is_charged(tmp_path):
    run = whole_run(tmp_path, overrides=["dp_config.target_delta=0.1"])
    charged, warnings = [], []

    def warned(warning):
        charged.extend(run.stage.calls("charge"))
        warnings.append(warning)

    reporter = run.coordinator._reporter
    reporter.to = replace(reporter.to, warned=warned)
    run.train()
    warning, padding = warnings
    assert warning.startswith("delta 0.1 is not below 1/N = ")
    assert "rows for each that it expects" in padding
    assert run.stage.calls("charge")
    assert charged == []
    assert warnings == list(run.finished.plan.warnings)


def test_receipts_are_for_the_parameters_of_their_step(plain):
    digests = [plain.finished.manifest.computation.initial_parameters.hex(), *plain.digests]
    for call in plain.stage.calls("step"):
        receipt = open_envelope(Receipt, call.arguments[0], plain.finished.manifest.ledger_key)
        assert receipt.input_digest.hex() == digests[receipt.step]
        assert receipt.manifest_digest == plain.finished.manifest.digest()


# --- masked


def test_no_aggregator_receives_an_unmasked_vector(tmp_path):
    """Each of the 18 vectors against the clear one of its worker, and of each virtual worker it hosts.

    Correlation of 1,500 to 3,500 words stays below 7 standard errors: a false alarm below 3e-12 each, 1e-9 in all.
    That the clear vectors are the right ones is seen in their sum, which is that of the masked ones.
    """
    run = trained(tmp_path, model="tests.models:wide_model", aggregators=2, steps=3)
    manifest = run.finished.manifest
    vectors = computer(manifest.computation.mechanism, model=wide_model)
    calls = run.stage.calls("reduce")
    assert len(calls) == 6
    (root,) = {
        open_envelope(Receipt, call.arguments[0], manifest.ledger_key).data_root for call in run.stage.calls("step")
    }
    received = 0
    for step in range(3):
        (request, *_), roster = calls[2 * step].arguments, run.stage.rosters[step]
        parameters = np.concatenate([call.arguments[2] for call in calls[2 * step : 2 * step + 2]])
        context = manifest.key_context
        clear = {
            v: vectors.vector(v, keys_of(context, v), step, request.input_digest, root, parameters).values
            for v in range(VIRTUAL_WORKERS)
        }
        for part, call in zip(request.ranges, calls[2 * step : 2 * step + 2], strict=True):
            cut = slice(part.offset, part.offset + part.length)
            _, _, _, _, *masked = call.arguments
            for worker, vector in zip(roster.workers, masked, strict=True):
                hosted = [clear[v][cut] for v in worker.virtual_workers]
                assert correlation(vector, sum(hosted[1:], hosted[0])) < 7
                assert all(correlation(vector, each) < 7 for each in hosted)
                received += 1
            whole = [each[cut] for each in clear.values()]
            assert np.array_equal(sum(masked[1:], masked[0]), sum(whole[1:], whole[0]))
    assert received == 18


def test_nothing_but_refs_headers_and_masked_vectors_passes_the_driver(plain):
    """Workers answer with small messages and ring words, never with a float array but the public start of the run."""
    for call, references in plain.stage.log:
        if call.member_id.startswith("worker") and call.method != "initial_parameters":
            for reference in references:
                value = reference.value
                assert not isinstance(value, np.ndarray) or value.dtype == np.uint32, call.method


def test_the_one_worker_epsilon_is_larger_and_both_can_be_stated(tmp_path):
    run = trained(tmp_path, tamper=on_machines(tmp_path, lambda member_id: member_id))
    plan, finished = run.finished.plan, run.finished
    outsiders = epsilon_against(plan.mechanism, 0, plan.delta, finished.steps)
    one_worker = epsilon_against(plan.mechanism, finished.most_hosted, plan.delta, finished.steps)
    assert finished.most_hosted == 3
    assert outsiders <= finished.charged_epsilon < one_worker


# --- robust


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_example_is_silent_and_the_run_continues(tmp_path, poison, capfd):
    features, labels = examples()
    features[5] = poison
    run = trained(tmp_path, data=(features, labels), overrides=["dataset.allow_void=true"])
    assert len(run.digests) == 3
    assert run.left == []
    assert np.isfinite(run.finished.parameters).all()
    assert "".join(capfd.readouterr()) == ""
    assert {call.arguments[1].roster.body.count(b"attempt") for call in run.stage.calls("step")} == {1}


def small_data(count: int):
    features, labels = examples()
    return features[:count], labels[:count]


@pytest.mark.parametrize(
    ("kind", "code", "arguments"),
    [
        (ModelError, "mixing_layer", {"model": "tests.models:with_batch_norm"}),
        (ModelError, "mixing_layer", {"model": "tests.models:with_centred_batches", "micro_batch_size": 8}),
        (DatasetError, "dataset_too_small", {"data": small_data(7)}),
        (DatasetError, "dataset_empty", {"data": small_data(0)}),
        (ConfigError, "aggregators", {"aggregators": 5}),
        (ConfigError, "ring_capacity", {"overrides": ["ring.bits=32", "ring.clamp=1e-30"]}),
        (ConfigError, "cap_too_small", {"overrides": ["dp_config.epsilon_cap=0.2", "dp_config.noise_multiplier=0.5"]}),
    ],
    ids=[
        "BatchNorm",
        "mixing at the physical size",
        "fewer examples than V",
        "no examples",
        "more ranges than tensors",
        "no ring",
        "no step",
    ],
)
def test_bad_input_is_named_and_nothing_is_charged_or_left_behind(tmp_path, kind, code, arguments):
    error, run = failure(kind, tmp_path, **arguments)
    assert error.code == code
    assert error.exit_code == 2
    assert run.stage.calls("charge") == []
    assert sorted(path.name for path in run.folder.iterdir()) == ["metrics.jsonl"]


# --- what is left


def test_the_run_folder_holds_manifest_evidence_log_and_events(plain):
    text = (plain.folder / "manifest.json").read_bytes()
    assert Manifest.model_validate_json(text) == plain.finished.manifest
    kinds = [kind for kind, _ in plain.evidence]
    assert kinds[0] == "session"
    assert kinds.count("admitted") == 4
    assert kinds.count("released") == 3
    assert kinds.count("data") == VIRTUAL_WORKERS
    assert kinds.count("roster") == kinds.count("committed") == 3
    session = dict(plain.evidence)["session"]
    assert session["manifest_digest"] == plain.finished.manifest.digest().hex()
    steps = [event for event in plain.told if event["event"] == "step"]
    assert [event["model_digest"] for event in steps] == plain.digests
    assert [event["masked_bytes"] for event in steps] == [3 * 83 * 4] * 3


def test_no_secret_is_in_anything_that_a_run_leaves_behind(plain):
    """Keys of the run in files: only the secret's own file holds them."""
    manifest = plain.finished.manifest
    computation = manifest.key_context
    secrets = [bytes.fromhex("ab" * 32)]
    secrets += [keys_of(computation, v).stream.reveal() for v in range(VIRTUAL_WORKERS)]
    secrets += [keys_of(computation, v).data.reveal() for v in range(VIRTUAL_WORKERS)]
    for path in plain.home.rglob("*"):
        if path.is_file() and path.suffix != ".secret":
            content = path.read_bytes()
            for secret in secrets:
                assert secret not in content, path
                assert secret.hex().encode() not in content, path


def test_a_generated_secret_is_destroyed_at_the_end_unless_it_is_to_be_kept(tmp_path):
    run = trained(tmp_path / "run", secret=None)
    assert not list((tmp_path / "run" / "orchestrator").glob("*.secret"))
    assert run.evidence[-1] == ("finished", {"secret_destroyed": True})
    kept = trained(tmp_path / "keep", secret=None, secret_retention="keep")
    (path,) = (tmp_path / "keep" / "orchestrator").glob("*.secret")
    assert path.stem == kept.session.run_id
    again = trained(tmp_path / "again", secret=path.read_text().strip())
    assert again.digests == kept.digests


def test_phases_follow_each_other(tmp_path):
    run = whole_run(tmp_path)
    seen: list[Phase] = []

    def watch(call) -> None:
        if not seen or seen[-1] is not run.coordinator.phase:
            seen.append(run.coordinator.phase)

    run.stage.disturb = watch
    run.train()
    assert [*seen, run.coordinator.phase] == [
        Phase.PREPARING, Phase.ADMITTING, Phase.TRAINING, Phase.FINISHING, Phase.DONE,
    ]  # fmt: skip
    assert [phase for phase in Phase if phase.is_terminal] == [Phase.DONE, Phase.FAILED]
