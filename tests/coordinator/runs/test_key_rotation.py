"""A ledger's key is rotated while a run is under way: the run ends by the refusal's name, charged for what it did."""

from contextlib import closing

import pytest

from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.metrics.errors import BudgetError
from tests.protocol import RENYI, whole_run


def test_a_rotation_ends_the_run_under_way_and_the_next_run_pays_beside_it(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"

    def rotate(call):
        if (call.method, call.index) == ("step", 1):
            with closing(PrivacyLedger(url)) as ledger:
                ledger.rotate_key()

    run = whole_run(tmp_path, disturb=rotate, steps=3, dp_config=RENYI)
    with pytest.raises(BudgetError, match="ledger_key_rotated"):
        run.train()
    with closing(PrivacyLedger(url, create=False)) as ledger:
        (account,) = ledger.view().accounts
        # Its second step was charged before, and released nothing: its vectors were not bound.
        assert [each.charged_steps for each in account.runs] == [2]
        bound = [each.event.step for each in ledger.history() if each.kind == "vectors_bound"]
        assert bound == [0]
    later = whole_run(tmp_path, secret="cd" * 32, steps=3, ledger={"account": account.name}, dp_config=RENYI)
    later.train()
    with closing(PrivacyLedger(url, create=False)) as ledger:
        assert [each.charged_steps for each in ledger.view().accounts[0].runs] == [2, 3]
        assert ledger.verify().keys.current == later.finished.manifest.ledger_key
