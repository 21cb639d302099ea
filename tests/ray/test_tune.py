"""A search by Ray Tune: the one of docs/tune.md, on a real Ray."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.search_cost import search_of
from tests.test_snippets import ROOT, as_program, blocks_of

pytest.importorskip("pandas", reason="needs pandas (pip install 'raycloak[tune]')")


def test_guarantee_every_trial_is_charged_to_one_account_before_it_starts(ray_cluster, run_python, raycloak_home):
    """Two trials, of which ASHA stops one: both are charged in full, as `plan --trials` says, and the winner tells."""
    blocks = blocks_of((ROOT / "docs" / "tune.md").read_text(), "docs/tune.md")
    path = run_python.folder / "search.yaml"
    (body,) = (block.body for block in blocks if block.language == "yaml")
    path.write_text(body)
    raycloak_home.mkdir(mode=0o700)
    with closing(PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}")) as ledger:
        ledger.open_account("digits-search", OpeningTerms(8.0, 1e-5))
        cost = search_of(plan_of(load_config(path), path.parent), 2)
        program = as_program([block for block in blocks if block.language == "python"])
        (run_python.folder / "tune.py").write_text(program)
        done = run_python("tune.py", environment=ray_cluster.environment)
        assert done.code == 0, done.stderr[-4000:]
        ledger.verify()
        (account,) = ledger.view().accounts
        kinds = [entry.kind for entry in ledger.history() if entry.kind != "vectors_bound"]
    assert [(run.prepaid, run.charged_steps, run.planned_steps) for run in account.runs] == [(True, 4, 4), (True, 2, 4)]
    assert kinds == ["account_opened", *_charges(4), *_charges(2)]
    assert account.spent_epsilon == pytest.approx(cost.epsilon)
    results = [_results(each) for each in sorted(run_python.folder.glob("*/*/result.json"))]
    assert sorted([each["step"] for each in result] for result in results) == [[2], [2, 4]]
    assert {each["privacy_epsilon"] for result in results for each in result} == {account.epsilon_cap}
    last = max(each["privacy_epsilon_charged"] for result in results for each in result)
    assert last == pytest.approx(account.spent_epsilon)
    assert "'optimizer.learning_rate': 1.0" in done.stdout
    assert done.stdout.rstrip().endswith(" 8.0")


def _charges(steps: int) -> list[str]:
    return ["run_prepaid", "data_bound", *["step_charged"] * steps]


def _results(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]
