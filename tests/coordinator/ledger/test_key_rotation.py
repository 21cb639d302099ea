"""The rotation of a ledger's key: all that was charged stays, and readers who trust either key follow the chain."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import open_envelope
from raycloak.coordinator.ledger.audit import audit
from raycloak.coordinator.ledger.cap_authority import CapAuthorisation, authorise
from raycloak.coordinator.ledger.entries import (
    AccountClosed,
    Event,
    Head,
    KeyRotated,
    LedgerEntry,
    LedgerKeys,
    make_entry,
    rotation,
)
from raycloak.coordinator.ledger.export import check_export, check_extract
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.ledger.witness import open_witness
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.binding import Binding
from tests.coordinator.ledger.ledger_cases import (
    CAP,
    DATA,
    DELTA,
    MANIFEST,
    PARAMETERS,
    affordable,
    expected_epsilon,
    mechanism,
    opened,
    receipt_of,
    register,
    spent,
    tamper,
)
from tests.coordinator.ledger.witness_server import witness_server


def charged(url: str | Path, steps: int = 2) -> bytes:
    """Make a ledger with a charged run, close it, and return its key."""
    with closing(opened(url)) as ledger:
        for step in range(steps):
            ledger.charge("run-a", step, PARAMETERS, MANIFEST)
        return ledger.public_key


def rotated(url: str, witness: str | None = None) -> bytes:
    """Rotate the key of a ledger, and return the new one."""
    with closing(PrivacyLedger(url, witness=witness)) as ledger:
        return ledger.rotate_key()


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(BudgetError) as refusal:
        act()
    return refusal.value.code


def test_guarantee_a_rotation_keeps_every_charge_and_the_cap_counts_them(ledger_url: str):
    former = charged(ledger_url)
    new = rotated(ledger_url)
    with closing(PrivacyLedger(ledger_url)) as ledger:
        assert (ledger.public_key, ledger.view().public_key) == (new, new)
        assert new != former
        assert spent(ledger) == pytest.approx(expected_epsilon(2))
        register(ledger, "run-b")
        for step in range(affordable() - 2):
            assert receipt_of(ledger, ledger.charge("run-b", step, PARAMETERS, MANIFEST)).step == step
        assert refused(lambda: ledger.charge("run-b", 19, PARAMETERS, MANIFEST)) == "cap_exceeded"
        bound = ledger.bind_vectors("run-b", "gradient", 0, MANIFEST, b"v" * 32)
        assert open_envelope(Binding, bound, new).vectors_digest == b"v" * 32
        audited = ledger.verify()
        assert audited.keys.since == ((1, former), (7, new))
        assert [entry.kind for entry in ledger.history()].index(KeyRotated.DOMAIN) == 5


def test_guarantee_a_run_of_a_former_key_is_refused_before_it_is_charged(ledger_url: str):
    """Its workers would take no receipt of the new key: the charge would be lost."""
    charged(ledger_url)
    rotated(ledger_url)
    with closing(PrivacyLedger(ledger_url)) as ledger:
        entries, before = ledger.history(), spent(ledger)
        for act in (
            lambda: ledger.charge("run-a", 2, PARAMETERS, MANIFEST),
            # Also what was charged and bound before: its receipt would have the new key.
            lambda: ledger.charge("run-a", 0, PARAMETERS, MANIFEST),
            lambda: ledger.bind_vectors("run-a", "gradient", 0, MANIFEST, b"v" * 32),
            lambda: ledger.bind_data("run-a", MANIFEST, DATA),
            lambda: ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST)),
        ):
            assert refused(act) == "ledger_key_rotated"
        assert (ledger.history(), spent(ledger)) == (entries, before)


def test_guarantee_an_instance_from_before_a_rotation_writes_and_signs_nothing(ledger_url: str):
    charged(ledger_url)
    with closing(PrivacyLedger(ledger_url)) as older, closing(PrivacyLedger(ledger_url, create=False)) as reader:
        register(older, "run-b")
        reader.view()
        new = rotated(ledger_url)
        entries = reader.history()
        for act in (
            lambda: older.charge("run-b", 0, PARAMETERS, MANIFEST),
            lambda: older.charge("run-a", 0, PARAMETERS, MANIFEST),
            lambda: register(older, "run-c"),
            lambda: older.open_account("others", OpeningTerms(CAP, DELTA)),
            lambda: older.close_account("patients"),
            older.rotate_key,
        ):
            assert refused(act) == "ledger_key_rotated"
        assert reader.history() == entries
        # One that only reads goes on, and reads what the new key has signed.
        with closing(PrivacyLedger(ledger_url)) as ledger:
            register(ledger, "run-d")
            ledger.charge("run-d", 0, PARAMETERS, MANIFEST)
        for each in (reader, older):
            assert each.view().public_key == new
            assert [run.charged_steps for run in each.view().accounts[0].runs] == [2, 0, 1]
            each.verify()
        assert check_extract(reader.extract("patients"), new).audited.keys.current == new


def test_the_instance_that_rotates_is_refused_afterwards_too(ledger_url: str):
    charged(ledger_url)
    with closing(PrivacyLedger(ledger_url)) as ledger:
        ledger.rotate_key()
        assert refused(lambda: ledger.close_account("patients")) == "ledger_key_rotated"


@pytest.mark.parametrize("rotations", [1, 2])
def test_guarantee_a_reader_who_trusts_any_key_of_a_ledger_checks_all_of_it(tmp_path: Path, rotations: int):
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    keys = [charged(url)]
    with closing(PrivacyLedger(url)) as ledger:
        ledger.open_account("others", OpeningTerms(CAP, DELTA))
        older = ledger.extract("patients")
    for number in range(rotations):
        keys.append(rotated(url))
        with closing(PrivacyLedger(url)) as ledger:
            register(ledger, f"run-{number}")
            ledger.charge(f"run-{number}", 0, PARAMETERS, MANIFEST)
            ledger.export(tmp_path / f"{number}.jsonl")
            lines = ledger.extract("patients")
    for key in keys:
        found = check_extract(lines, key)
        assert [*found.audited.accounts] == ["patients"]
        assert [each for _, each in found.audited.keys.since] == keys
        assert sum(len(run.charges["gradient"]) for run in found.audited.runs.values()) == 2 + rotations
    checked = check_export(tmp_path / f"{rotations - 1}.jsonl")
    assert all(key in checked.audited.keys for key in keys)
    assert checked.stated.ledger_key == keys[-1]
    assert "another ledger" in str(_broken(lambda: check_extract(lines, IdentityKey.generate().public)))
    # What a former key signed alone proves nothing to who trusts the new one: somebody may have found that key.
    check_extract(older, keys[0])
    _broken(lambda: check_extract(older, keys[-1]))


def _broken(act: Callable[[], object]) -> BudgetError:
    with pytest.raises(BudgetError, match="chain_broken") as refusal:
        act()
    return refusal.value


def test_no_rotation_and_no_entry_before_it_can_be_left_out_of_an_extract_or_changed(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    former = charged(url)
    new = rotated(url)
    with closing(PrivacyLedger(url)) as ledger:
        register(ledger, "run-b")
        lines = ledger.extract("patients")
    assert [json.loads(line).get("kind") for line in lines].index(KeyRotated.DOMAIN) == 5
    for key in (former, new):
        for number in range(len(lines)):
            _broken(lambda number=number, key=key: check_extract(lines[:number] + lines[number + 1 :], key))


@pytest.fixture
def chain() -> tuple[IdentityKey, list[LedgerEntry]]:
    """Return a key, and a chain of one entry that it signed."""
    key = IdentityKey.generate()
    return key, [make_entry(Head(), _closing(), key)]


def _closing() -> AccountClosed:
    return AccountClosed(recorded_at=0, account="patients", epsilon_cap=1.0)


def _after(entries: list[LedgerEntry]) -> Head:
    return Head(entries[-1].sequence, entries[-1].hash)


@pytest.mark.parametrize(
    ("forge", "why"),
    [
        (lambda at, key, new: rotation(at, key.public, new, 0).model_copy(update={"new_key": b"n" * 32}), "new key"),
        (lambda at, key, new: rotation(Head(at.sequence, bytes(32)), key.public, new, 0), "new key did not sign"),
        (lambda at, key, new: rotation(Head(at.sequence + 1, at.hash), key.public, new, 0), "new key did not sign"),
        (lambda at, key, new: rotation(at, new.public, new, 0), "rotates another key"),
        (lambda at, key, new: rotation(at, key.public, key, 0), "returns to a former key"),
    ],
)
def test_guarantee_a_key_follows_only_where_both_keys_signed_that(chain, forge: Callable[..., Event], why: str):
    key, entries = chain
    new, at = IdentityKey.generate(), _after(entries)
    with pytest.raises(BudgetError, match=f"entry 2: .*{why}"):
        LedgerKeys.of((), key.public).after(make_entry(at, forge(at, key, new), key))
    # And the former key signs the entry.
    entry = make_entry(at, rotation(at, key.public, new, 0), new)
    with pytest.raises(BudgetError, match="entry 2: it is not signed"):
        LedgerKeys.of([entry], new.public)
    with pytest.raises(BudgetError, match="not the one that its last rotation names"):
        LedgerKeys.of([make_entry(at, rotation(at, key.public, new, 0), key)], key.public)


def test_an_entry_of_the_former_key_after_a_rotation_is_refused(ledger_url: str):
    with closing(opened(ledger_url)) as ledger:
        key = ledger._store.key
    former, _ = key.public, rotated(ledger_url)
    with closing(PrivacyLedger(ledger_url, create=False)) as ledger:
        entries = list(ledger.history())
    forged = make_entry(_after(entries), _closing(), key)
    with pytest.raises(BudgetError, match="entry 5: it is not signed by the ledger's key"):
        audit([*entries, forged], former)
    with pytest.raises(BudgetError, match="entry 4: it is not signed by the ledger's key"):
        audit([*entries[:3], replace(entries[3], signature=bytes(64))], former)


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("DELETE FROM entries WHERE kind = 'key_rotated'", "it is not signed"),
        ("UPDATE entries SET kind = 'key' WHERE kind = 'key_rotated'", "entry"),
        ("UPDATE meta SET value = :former WHERE name = 'public_key'", "its last rotation names"),
    ],
)
def test_a_store_whose_rotation_was_changed_is_refused(ledger_url: str, statement: str, named: str):
    former = charged(ledger_url)
    rotated(ledger_url)
    tamper(ledger_url, statement, **({"former": former.hex()} if ":former" in statement else {}))
    with pytest.raises(BudgetError, match=named):
        PrivacyLedger(ledger_url)
    with closing(PrivacyLedger(ledger_url, create=False)) as reader, pytest.raises(BudgetError, match="chain_broken"):
        reader.verify()


def test_an_authorisation_for_the_former_key_is_void_and_one_for_the_new_key_counts(ledger_url: str):
    authority = IdentityKey.generate()

    def raised(ledger: PrivacyLedger, key: bytes, cap: float) -> None:
        account = ledger.view().accounts[0]
        change = CapAuthorisation(
            account="patients",
            ledger_key=key,
            old_cap=account.epsilon_cap,
            new_cap=cap,
            follows=account.terms_hash,
            expires_at=4_000_000_000,
        )
        ledger.change_cap("patients", cap, authorise(change, authority))

    with closing(PrivacyLedger(ledger_url)) as ledger:
        ledger.open_account("patients", OpeningTerms(CAP, DELTA), authority=authority.public)
        former = ledger.public_key
        raised(ledger, former, CAP + 1)
    new = rotated(ledger_url)
    with closing(PrivacyLedger(ledger_url)) as ledger:
        assert refused(lambda: raised(ledger, former, CAP + 2)) == "authorisation_mismatch"
        raised(ledger, new, CAP + 2)
        assert ledger.verify().accounts["patients"].terms.epsilon_cap == CAP + 2


def test_guarantee_no_file_of_a_closed_ledger_has_the_former_key(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    url = f"sqlite:///{path}"
    charged(url)
    with sqlite3.connect(path) as store:
        ((key,),) = store.execute("SELECT value FROM meta WHERE name = 'signing_key'")
    store.close()

    def files_with(text: str) -> list[str]:
        return [each.name for each in tmp_path.iterdir() if text.encode() in each.read_bytes()]

    assert files_with(key) == ["ledger.sqlite"]
    # The instance had its key in pages of the log, too.
    with closing(PrivacyLedger(url)) as older:
        older.open_account("others", OpeningTerms(CAP, DELTA))
        rotated(url)
    assert files_with(key) == []


@pytest.fixture(params=["folder", "url"])
def witness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the location of an empty witness of each kind."""
    if request.param == "url":
        with witness_server() as server:
            yield server.named_in(tmp_path)
        return
    (tmp_path / "witness").mkdir()
    yield str(tmp_path / "witness")


def test_guarantee_a_witness_notices_a_ledger_that_was_put_back_over_a_rotation(tmp_path: Path, witness: str):
    path = tmp_path / "ledger.sqlite"
    url = f"sqlite:///{path}"
    with closing(PrivacyLedger(url, witness=witness)) as ledger:
        ledger.open_account("patients", OpeningTerms(CAP, DELTA))
        register(ledger, "run-a")
        ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    copies = {"before": path.read_bytes()}
    rotated(url, witness)
    copies["rotated"] = path.read_bytes()
    with closing(PrivacyLedger(url, witness=witness)) as ledger:
        register(ledger, "run-b")
        ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
        head, keys = ledger.view().head, ledger.verify().keys
    with closing(open_witness(witness, keys)) as kept:
        assert [each.position for each in kept.heads()][-1] == head
    newest = path.read_bytes()
    for name, code in (("rotated", "ledger_rolled_back"), ("before", "witness_unavailable")):
        path.write_bytes(copies[name])
        with pytest.raises(BudgetError, match=code) as refusal:
            PrivacyLedger(url, witness=witness)
    assert "put back to before a rotation" in str(refusal.value)
    path.write_bytes(newest)
    PrivacyLedger(url, witness=witness).close()


def test_a_ledger_that_was_put_back_to_just_before_its_rotation_is_named(tmp_path: Path, witness: str):
    path = tmp_path / "ledger.sqlite"
    url = f"sqlite:///{path}"
    with closing(PrivacyLedger(url, witness=witness)) as ledger:
        ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    before = path.read_bytes()
    rotated(url, witness)
    path.write_bytes(before)
    # The former key signed the head of the rotation too.
    with pytest.raises(BudgetError, match="ledger_rolled_back"):
        PrivacyLedger(url, witness=witness)


def test_killed_between_any_two_statements_of_a_rotation_nothing_is_lost(run_python: Any, ledger_url: str):
    """It has the former key, or the entry and the new key, and goes on with all that was charged."""
    child = str(Path(__file__).with_name("ledger_child.py"))
    done = run_python(child, "rotate", ledger_url, deadline_s=600)
    assert done.code == 0, done.stderr
    kills = json.loads(done.stdout)
    assert kills == sorted(kills)
    assert set(kills) == {False, True}
    assert len(kills) > (20 if ledger_url.startswith("sqlite:") else 5)
