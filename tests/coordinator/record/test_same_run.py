"""A resumed run must match the run that was begun."""

import pytest

from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.coordinator.record.same_run import (
    OPERATIONAL,
    differences,
    require_ledger,
    require_same_config,
    require_same_manifest,
)
from raycloak.metrics.errors import BudgetError, RefusedError
from tests.protocol import HandRun, config


def refused(kind, call, *arguments):
    with pytest.raises(kind) as refusal:
        call(*arguments)
    return refusal.value


def test_another_configuration_is_refused_with_both_values():
    error = refused(RefusedError, require_same_config, config(), config(steps=4, seed=1))
    assert error.code == "resume_differs"
    assert "steps was 3, now 4" in error.message
    assert "seed was 0, now 1" in error.message
    assert (
        "ledger.account" in refused(RefusedError, require_same_config, config(), config(["ledger.account=x"])).message
    )
    nested = refused(RefusedError, require_same_config, config(), config(["optimizer.learning_rate=0.25"]))
    assert "optimizer.learning_rate was 0.5, now 0.25" in nested.message


def test_how_and_where_may_be_another():
    changed = config(
        [
            "failure.step_deadline_s=1",
            "placement.strategy=SPREAD",
            "checkpoint.num_to_keep=5",
            "metrics.bind='[::1]:0'",
            "ledger.witness=/mnt/other",
        ],
        num_workers=4,
        min_workers=3,
        max_workers=5,
        aggregators=2,
    )
    assert set(config().model_dump()) > OPERATIONAL
    require_same_config(config(), changed)


def test_another_manifest_is_refused_with_both_values(tmp_path):
    manifest = HandRun(tmp_path).manifest
    require_same_manifest(manifest, manifest)
    numerics = manifest.computation.numerics
    cases = {
        "computation.numerics.torch": (numerics.torch, "2.12.0"),
        "computation.model_code": (manifest.computation.model_code.hex(), "00" * 32),
        "computation.dataset": (manifest.computation.dataset.hex(), "00" * 32),
        "ledger_key": (manifest.ledger_key.hex(), "00" * 32),
        "policy_digest": (manifest.policy_digest.hex(), "00" * 32),
    }
    for path, (before, now) in cases.items():
        raw = manifest.model_dump(mode="json")
        *parents, last = path.split(".")
        node = raw
        for parent in parents:
            node = node[parent]
        node[last] = now
        other = type(manifest).model_validate_json(__import__("json").dumps(raw))
        error = refused(RefusedError, require_same_manifest, manifest, other)
        assert f"{path} was {before}, now {now}" in error.message
        # A newer raycloak is another policy under the simulator.
        assert ("another version of raycloak" in error.message) == (path == "policy_digest")


def test_differences_reach_every_leaf():
    before = {"a": 1, "b": {"c": [1, {"d": 2}], "e": None}, "gone": "x" * 100}
    now = {"a": 1, "b": {"c": [1, {"d": 3}], "e": 0}, "new": [1]}
    assert differences(before, before) == []
    assert differences(before, now) == [
        "b.c[1].d was 2, now 3",
        "b.e was None, now 0",
        f"gone was {'x' * 77}..., now None",
        "new was None, now [1]",
    ]
    assert differences([1], [1, 2], "list") == ["list was [1], now [1, 2]"]


def commit(step, sequence):
    return StepCommit(
        step=step, released_digest=bytes(32), attempts=1, ledger_sequence=sequence, ledger_hash=bytes([sequence]) * 32
    )


def test_a_ledger_that_was_put_back_is_refused():
    commits = [commit(1, 5), commit(0, 2)]
    require_ledger(commits, {5: bytes([5]) * 32}.get)
    require_ledger([], {}.get)
    for found, named in ((None, "no such entry"), (bytes(32), "0" * 64)):
        error = refused(BudgetError, require_ledger, commits, {2: bytes([2]) * 32, 5: found}.get)
        assert error.code == "ledger_rolled_back"
        assert f"step 1 bound by the ledger's entry 5 with hash {'05' * 32}" in error.message
        assert named in error.message
