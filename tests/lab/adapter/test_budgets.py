"""Token budgets: for ever, for all clients and each, whatever happens to the process."""

import subprocess
import sys
import threading

import pytest

from raycloak.metrics.errors import BudgetError, ConfigError
from raycloak_lab.adapter.budgets import TokenBudgets


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budgets.sqlite"


def test_a_projection_has_a_budget_for_each_client_and_one_for_all(path):
    budgets = TokenBudgets(path, 300, 200)
    budgets.charge("a", ["q", "v"], 100)
    budgets.charge("a", ["q"], 100)
    assert [budgets.left("a", ["q"]), budgets.left("a", ["v"]), budgets.left("a", ["q", "v"])] == [0, 100, 0]
    assert budgets.left("b", ["q"]) == 100
    budgets.charge("b", ["q"], 100)
    with pytest.raises(BudgetError) as refusal:
        budgets.charge("b", ["q"], 1)
    assert refusal.value.code == "tokens_spent"
    budgets.charge("b", ["v"], 200)
    budgets.close()


def test_a_refused_charge_spends_nothing_of_any_projection(path):
    budgets = TokenBudgets(path, 300, 100)
    budgets.charge("a", ["v"], 100)
    with pytest.raises(BudgetError):
        budgets.charge("a", ["q", "v"], 50)
    assert budgets.left("a", ["q"]) == 100
    budgets.close()


def test_no_number_of_threads_and_files_spends_more_than_there_is(path):
    granted = []

    def spend():
        budgets = TokenBudgets(path, 1000, 1000)
        for _ in range(20):
            try:
                budgets.charge("a", ["q"], 10)
                granted.append(10)
            except BudgetError:
                pass
        budgets.close()

    threads = [threading.Thread(target=spend) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sum(granted) == 1000


def test_a_charge_outlives_the_process_that_was_killed_right_after_it(path):
    program = (
        "import os, signal, sys; from pathlib import Path;"
        "from raycloak_lab.adapter.budgets import TokenBudgets;"
        f"TokenBudgets(Path({str(path)!r}), 100, 100).charge('a', ['q'], 60);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == -9
    budgets = TokenBudgets(path, 100, 100)
    assert budgets.left("a", ["q"]) == 40
    budgets.close()


def test_a_file_that_is_no_database_is_refused(path):
    path.write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError) as refusal:
        TokenBudgets(path, 1, 1)
    assert refusal.value.code == "token_budgets"
