"""Runs that did not go straight: killed and resumed, stopped, without a worker, without privacy."""

import json
from contextlib import closing

import pytest

from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.keys.run_secret import run_id_of
from raycloak.attestation.log.evidence_log import check_exported_log
from raycloak.attestation.orchestrator.revocations import revoke
from raycloak.attestation.orchestrator.state import state_file
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.ledger.cap_authority import CapAuthorisation, authorise
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.proof import run_claims
from raycloak.coordinator.proof.claims import ClaimOutcome, NotThere
from raycloak.coordinator.proof.verify import verify_parts
from raycloak.coordinator.training.assignment import NewRun, ResumedRun
from raycloak.coordinator.training.pace import StopRequest
from raycloak.workers.terms.manifest import BY_HAND, Manifest
from tests.coordinator.proof.proof_cases import (
    CHECKPOINT,
    STEPS,
    Proved,
    established_case,
    joined,
    lengthened,
    packed,
    parts_of,
    proved,
    relogged,
    train,
    whole,
)
from tests.coordinator.training.test_sealed_evaluation import sealed
from tests.protocol import NOW, RENYI, SECRET, on, settle


class Killed(BaseException):
    """An error that stands for a driver that ends without any of its handlers."""


def said(record: Proved) -> dict[str, str]:
    """Return the sentences of all claims, none of which failed; those not covered in brackets."""
    report = verify_parts(record.parts, record.trust)
    assert not report.failed, [(claim.name, claim.record, claim.says) for claim in report.failed]
    return {each.name: each.says if each.outcome is ClaimOutcome.PROVED else f"({each.says})" for each in report.claims}


def test_a_run_that_was_killed_and_resumed_is_proved_from_its_first_step(tmp_path):
    def kill(call):
        if (call.method, call.index) == ("step", 3):
            raise Killed

    first = whole(tmp_path, disturb=kill, measurements={})
    with pytest.raises(Killed):
        first.train()
    manifest = Manifest.model_validate_json((first.folder / "manifest.json").read_bytes())
    second = whole(tmp_path, measurements={}, assignment=ResumedRun(manifest, packed(tmp_path)))
    second.train()
    # A run on Ray is resumed in the same directory.
    (second.folder / "manifest.json").write_bytes((first.folder / "manifest.json").read_bytes())
    assert second.finished.steps == STEPS
    found = said(proved(tmp_path, second))
    assert found["contract"].startswith("2 sessions")
    assert found["steps"].startswith(f"{STEPS} steps, each charged")
    assert found["released model"].endswith(f"after step {STEPS}")


def test_several_ranges_are_signed_one_by_one_and_put_together_on_the_word_of_others(tmp_path):
    found = said(proved(tmp_path, train(tmp_path, aggregators=2)))
    assert found["lineage"].startswith("7 results, each signed by the aggregators of its roster")
    assert "the word of ledger and orchestrator" in found["lineage"]


def test_a_loop_by_hand_has_nobody_who_answers_for_its_parameters(tmp_path):
    case = established_case(proved(tmp_path, train(tmp_path)))
    assert run_claims.lineage(case) == "7 results, each signed by the aggregators of its roster"
    computation = case.manifest.computation
    rule = computation.optimizer.model_copy(update={"name": BY_HAND})
    own = computation.model_copy(update={"optimizer": rule})
    case.__dict__["manifest"] = case.manifest.model_copy(update={"computation": own})
    with pytest.raises(NotThere, match="by hand"):
        run_claims.lineage(case)


def test_a_member_that_was_revoked_may_have_a_namesake_in_the_next_session(tmp_path):
    """One revocation is in the log of its session, and one came after the last moment at which it could be."""

    def disturb(call):
        names = {("open_step", 1): "worker-1", ("bind_vectors", 3): "worker-2"}
        if (name := names.get((call.method, call.index))) is not None:
            state = state_file(tmp_path / "orchestrator", first.session.run_id)
            revoke(state, "member", name, reason="stolen", now=NOW)
        if name == "worker-2":
            raise Killed

    first = whole(tmp_path, disturb=disturb, measurements={})
    with pytest.raises(Killed):
        first.train()
    assert first.left == [("worker-1", "revoked")]
    manifest = Manifest.model_validate_json((first.folder / "manifest.json").read_bytes())
    second = whole(tmp_path, measurements={}, assignment=ResumedRun(manifest, packed(tmp_path)))
    second.train()
    assert second.left == []
    (second.folder / "manifest.json").write_bytes((first.folder / "manifest.json").read_bytes())
    assert said(proved(tmp_path, second))["contract"].startswith("2 sessions")


def test_a_run_that_was_stopped_while_a_resume_repeated_its_steps_fails_nothing(tmp_path):
    """Its model and its verdict are of an earlier step than the last one that the log has; so neither is proved.

    A measurement was told before the kill, and would have been committed with the step that the kill came to.
    """
    seldom = CHECKPOINT.model_copy(update={"checkpoint_frequency": 100})
    archive = Archive(seldom, run_id_of(Secret(bytes.fromhex(SECRET))), tmp_path, lambda line: None)
    stop = StopRequest()

    def kill(call):
        if (call.method, call.index) == ("charge", 4):
            raise Killed

    def ask(call):
        if call.method == "reduce":
            stop.make()

    first = whole(tmp_path, disturb=kill, assignment=NewRun(archive))
    with pytest.raises(Killed):
        first.train()
    manifest = Manifest.model_validate_json((first.folder / "manifest.json").read_bytes())
    resumed = ResumedRun(manifest, archive, stop)
    second = whole(tmp_path, disturb=ask, assignment=resumed, folder=first.folder)
    second.train()
    assert second.finished.steps == 1
    record = proved(tmp_path, second)
    found = said(record)
    assert found["steps"].startswith("2 steps")
    assert found["released model"].startswith("(it has the parameters of step 1, not 2, ")
    assert "it is of step 1, not 2" in found["verdict.json"]
    assert "1 releases, each" in found["measurements"]
    assert "1 that a resume has to repeat" in found["measurements"]


def test_a_run_that_lost_a_worker_is_proved_with_every_attempt(tmp_path):
    record = proved(tmp_path, train(tmp_path, disturb=on("step", "worker-1", "dies", 1), measurements={}))
    found = said(record)
    assert int(found["rosters"].split()[0]) > STEPS
    assert found["rosters"].endswith("virtual workers once, by 2 or more")
    assert found["steps"].startswith(f"{STEPS} steps")


def test_a_run_that_was_stopped_is_proved_as_far_as_it_came(tmp_path):
    stop = StopRequest()

    def ask(call):
        if (call.method, call.index) == ("reduce", 1):
            stop.make()

    run = train(tmp_path, disturb=ask, measurements={}, assignment=NewRun(packed(tmp_path), stop))
    found = said(proved(tmp_path, run))
    assert found["evidence log"].endswith("not ended: the run may be resumed")
    assert found["steps"].startswith("2 steps")


def test_a_run_claims_its_plan_as_far_as_the_cap_reached_also_after_the_cap_was_raised(tmp_path):
    """Neither what little of it was charged when somebody stopped it, nor what a later cap allows."""
    authority, stop = IdentityKey.generate(), StopRequest()
    ledger_url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    with closing(PrivacyLedger(ledger_url)) as ledger:
        ledger.open_account("patients", OpeningTerms(2.5, 1e-5), authority=authority.public)

    def ask(call):
        if call.method == "reduce":
            stop.make()

    options = {"measurements": {}, "dp_config": {**RENYI, "epsilon_cap": 2.5}, "ledger": {"account": "patients"}}
    run = train(tmp_path, disturb=ask, assignment=NewRun(packed(tmp_path), stop), **options)
    plan = run.finished.plan
    assert run.finished.steps < plan.steps_within_cap < STEPS
    record = proved(tmp_path, run)
    verdict = json.loads(record.contents["verdict.json"])
    assert verdict["privacy_epsilon"] == plan.epsilon_outsiders > verdict["privacy_epsilon_if_stop_was_blind"]
    verdict["privacy_epsilon"] = verdict["privacy_epsilon_if_stop_was_blind"]
    forged = parts_of(record.contents | {"verdict.json": json.dumps(verdict).encode() + b"\n"})
    assert [claim.name for claim in verify_parts(forged, record.trust).failed] == ["verdict.json"]
    with closing(PrivacyLedger(ledger_url)) as ledger:
        (account,) = ledger.view().accounts
        raised = CapAuthorisation(
            account="patients",
            ledger_key=ledger.public_key,
            old_cap=2.5,
            new_cap=20.0,
            follows=account.terms_hash,
            expires_at=2**40,
        )
        ledger.change_cap("patients", 20.0, authorise(raised, authority))
        record.contents["ledger.jsonl"] = joined(ledger.extract("patients"))
    assert said(record)["packages"].startswith("1 packages")


def test_a_run_that_was_evaluated_on_a_sealed_split_is_proved_with_its_orders(tmp_path):
    record = proved(tmp_path, train(tmp_path, evaluation=sealed(tmp_path), measurements={}))
    said(record)

    def forged(**fields):
        def edit(entries):
            next(body for kind, body in entries if kind == "evaluation_ordered").update(fields)

        parts = parts_of(relogged(record, edit))
        return {claim.name: claim.says for claim in verify_parts(parts, record.trust).failed}

    assert "another digest" in forged(digest="00" * 32)["rosters"]
    assert "not among the documents" in forged(members="00" * 32)["rosters"]
    assert "not committed" in forged(finished_steps=1)["rosters"]


def test_a_run_on_public_data_is_proved_without_an_epsilon(tmp_path):
    dataset = {"kind": "npz", "path": "examples.npz", "features": "features", "public": True}
    alone = {"num_workers": 1, "secure_aggregation": False}
    public = {"dp_config": {"enabled": False}, "dataset": dataset, "measurements": {}, "steps": 2, **alone}
    found = said(proved(tmp_path, train(tmp_path, **public)))
    assert found["epsilon"] == "(the account paid for nothing private)"
    assert found["rosters"].endswith("by one worker alone, whose vectors nothing masks")
    assert found["steps"].startswith("2 steps")


def long_run(home, steps: int) -> Proved:
    """Return a run of so many planned steps that was stopped after the first."""
    stop = StopRequest()

    def ask(call):
        if call.method == "reduce":
            stop.make()

    private = {"accountant": "rdp", "noise_multiplier": 100.0, "epsilon_cap": 20.0}
    options = {"steps": steps, "epoch_steps": steps, "measurements": {}, "dp_config": private, "disturb": ask}
    return proved(home, train(home, assignment=NewRun(packed(home), stop), **options))


def test_a_run_of_100_steps_is_proved_whole(tmp_path):
    """`benchmarks/verify.py` measures 10,000."""
    record = long_run(tmp_path, 100)
    report = verify_parts(parts_of(lengthened(record, 100)), record.trust)
    (says,) = (claim.says for claim in report.claims if claim.name == "steps")
    assert {claim.name for claim in report.failed} <= {"packages"}, report.facts()
    assert says.startswith("100 steps, each charged, bound and committed once and in order")


def test_a_trial_of_a_search_is_proved_while_its_account_pays_for_the_next(tmp_path):
    """A registration that pays for a whole plan states no epsilon, and comes after the last charge that does."""
    search = {"measurements": {}, "ledger": {"account": "search", "prepaid": True}, "steps": 2}
    settle(tmp_path)
    with closing(PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")) as ledger:
        ledger.open_account("search", OpeningTerms(20.0, 1e-5, "rdp"))
    first = train(tmp_path, **search)
    second = whole(tmp_path, secret="cd" * 32, **search, disturb=_killed_at_once)
    with pytest.raises(Killed):
        second.train()
    assert said(proved(tmp_path, first))["epsilon"]


def _killed_at_once(call):
    """Kill the driver as it asks for the first charge: its run is registered."""
    if call.method == "charge":
        raise Killed


def test_a_run_that_was_charged_and_released_nothing_claims_nothing(tmp_path):
    """What its log and ledger have is proved; a model or a verdict would be somebody else's."""
    record = proved(tmp_path, train(tmp_path, steps=1, measurements={}))
    first = next(
        i
        for i, entry in enumerate(check_exported_log(record.lines("evidence.jsonl"), record.manifest.log_owner).entries)
        if entry.kind == "roster"
    )

    def edit(entries):
        del entries[first:]

    without = {name: content for name, content in relogged(record, edit).items() if "packages/" not in name}
    failed = {claim.name: claim.says for claim in verify_parts(parts_of(without), record.trust).failed}
    assert failed.keys() == {"documents", "released model", "verdict.json"}
    assert "committed no step" in failed["verdict.json"]
