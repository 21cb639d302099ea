"""The extract of one account: all of it, nothing of any other, and no way to leave something out."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from raycloak.attestation.core.data_marks import NO_MARKS, DataMarks
from raycloak.attestation.core.keys import IdentityKey
from raycloak.coordinator.ledger.export import check_extract
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.metrics.errors import BudgetError
from tests.coordinator.ledger.ledger_cases import CAP, DELTA, MANIFEST, PARAMETERS, mechanism, register

PEOPLE = DataMarks(fingerprint=b"f" * 32)


@pytest.fixture
def ledger(tmp_path: Path):
    """Return a ledger whose accounts were used in turns."""
    ledger = PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    for name, data in (("patients", NO_MARKS), ("nurses", NO_MARKS), ("study", PEOPLE), ("cohort", PEOPLE)):
        ledger.open_account(name, OpeningTerms(CAP, DELTA), data=data, also=name == "cohort")
    for name in ("patients", "nurses"):
        register(ledger, f"run-of-{name}", mechanism(), account=name)
    for step in range(3):
        for name in ("patients", "nurses"):
            ledger.charge(f"run-of-{name}", step, PARAMETERS, MANIFEST)
            ledger.bind_vectors(f"run-of-{name}", "gradient", step, MANIFEST, bytes([step]) * 32)
    yield ledger
    ledger.close()


def broken(lines: list[bytes], key: bytes) -> str:
    with pytest.raises(BudgetError, match="chain_broken") as refused:
        check_extract(lines, key)
    return refused.value.message


def test_an_extract_has_all_of_an_account_and_nothing_of_another(ledger):
    lines = ledger.extract("patients")
    found = check_extract(lines, ledger.public_key)
    assert [*found.audited.accounts] == ["patients"]
    assert [*found.audited.runs] == ["run-of-patients"]
    charged = found.audited.runs["run-of-patients"].charges["gradient"]
    assert [*charged] == [0, 1, 2]
    assert found.stated.sequence == ledger.view().head.sequence
    assert b"nurses" not in b"".join(lines)
    assert b"study" not in b"".join(lines)
    assert tuple(found.entries.values()) == ledger.history("patients")


def test_an_account_that_epsilon_was_moved_to_comes_with_it(ledger):
    ledger.transfer("study", "cohort", 1.0)
    found = check_extract(ledger.extract("cohort"), ledger.public_key)
    assert found.stated.accounts == ("cohort", "study")
    assert found.audited.accounts["cohort"].terms.epsilon_cap == CAP + 1


@pytest.mark.parametrize("left_out", range(10))
def test_no_entry_can_be_left_out_without_the_ledgers_key(ledger, left_out):
    lines = ledger.extract("patients")
    assert len(lines) == 10
    del lines[left_out]
    broken(lines, ledger.public_key)


def edited(**fields: object) -> Callable[[list[bytes]], list[bytes]]:
    def edit(lines: list[bytes]) -> list[bytes]:
        line = json.loads(lines[4]) | fields
        return [*lines[:4], json.dumps(line, sort_keys=True, separators=(",", ":")).encode(), *lines[5:]]

    return edit


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]], "was not charged before|second time|later one"),
        (lambda lines: [*lines[:4], lines[4], *lines[4:]], "later one"),
        (lambda lines: lines[:-1], "does not end in a statement"),
        (lambda lines: [*lines, lines[-1]], "cannot be read"),
        (lambda lines: [], "does not end in a statement"),
        (edited(signature="00" * 64), "not signed"),
        (edited(previous="00" * 32), "does not follow"),
        (edited(kind="step_charged"), "content does not match"),
        (edited(sequence=1), "later one"),
        (edited(sequence=-1), "later one"),
        (edited(sequence=2**64), "no chain is as long"),
    ],
)
def test_an_extract_that_was_changed_names_what_is_wrong(ledger, change, says):
    assert re.search(says, broken(change(ledger.extract("patients")), ledger.public_key))


def test_an_older_statement_does_not_cover_later_entries_nor_one_of_another_account(ledger):
    older, others = ledger.extract("patients"), ledger.extract("nurses")
    ledger.charge("run-of-patients", 3, PARAMETERS, MANIFEST)
    newer = ledger.extract("patients")
    assert len(newer) == len(older) + 1
    broken([*newer[:-1], older[-1]], ledger.public_key)
    broken([*older[:-1], newer[-1]], ledger.public_key)
    broken([*older[:-1], others[-1]], ledger.public_key)
    check_extract(older, ledger.public_key)


def test_an_extract_of_another_ledger_is_refused(ledger):
    broken(ledger.extract("patients"), IdentityKey.generate().public)
    with pytest.raises(BudgetError, match=r"account_unknown.*open nobody --epsilon-cap E"):
        ledger.extract("nobody")
