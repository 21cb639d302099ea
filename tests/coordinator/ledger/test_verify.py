"""Every edit, drop, swap, truncation and rollback of a ledger is found and named, in the ledger and in an export."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.data_marks import DataMarks
from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.coordinator.cli import app
from raycloak.coordinator.ledger.cap_authority import CapAuthorisation, authorise
from raycloak.coordinator.ledger.entries import Head, LedgerEntry, LedgerHead, LedgerKeys, head_line, read_head_line
from raycloak.coordinator.ledger.export import check_export, write_export
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.runs.rollback import check_pins, log_pins, package_pins
from raycloak.metrics.errors import BudgetError, ConfigError, ProtocolError
from tests.coordinator.checkpoints.tssp_cases import Site, run_manifest
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, MANIFEST, PARAMETERS, mechanism

ENTRIES = 20


PUBLIC = {"private": False, "noise_multiplier": 0.0, "sigma": 0.0}
PEOPLE = DataMarks(fingerprint=b"f" * 32)


def realistic(path: Path) -> PrivacyLedger:
    """Return a ledger with every kind of entry: changing accounts, three runs charging in turn; `ENTRIES` entries."""
    ledger, authority = PrivacyLedger(f"sqlite:///{path}"), IdentityKey.generate()
    for name in ("study", "sister"):
        of_people = {"data": PEOPLE, "also": name == "sister"}
        ledger.open_account(name, OpeningTerms(CAP, DELTA), authority=authority.public, **of_people)
    ledger.change_cap("study", 7.0)
    (study, _) = ledger.view().accounts
    raised = CapAuthorisation(
        account="study", ledger_key=ledger.public_key, old_cap=7.0, new_cap=9.0, follows=study.terms_hash,
        expires_at=2**40,
    )  # fmt: skip
    ledger.change_cap("study", 9.0, authorise(raised, authority))
    ledger.transfer("study", "sister", 1.5)
    ledger.close_account("sister")
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST))
    ledger.bind_data("run-a", MANIFEST, DATA)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.bind_vectors("run-a", "gradient", 0, MANIFEST, b"v" * 32)
    ledger.open_account("others", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms("run-b", "others", (mechanism(),), MANIFEST))
    ledger.bind_data("run-b", MANIFEST, DATA)
    ledger.register_run(
        RegistrationTerms("run-c", "patients", (mechanism(private=False, noise_multiplier=0.0, sigma=0.0),), MANIFEST)
    )
    ledger.bind_data("run-c", MANIFEST, DATA)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-c", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-a", 1, PARAMETERS, MANIFEST)
    ledger.charge("run-a", 2, PARAMETERS, MANIFEST)
    return ledger


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a closed `realistic` ledger."""
    path = tmp_path_factory.mktemp("original") / "ledger.sqlite"
    ledger = realistic(path)
    assert ledger.view().head.sequence == ENTRIES
    ledger.close()
    return path


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    """Return a copy that the test may change."""
    return Path(shutil.copy2(original, tmp_path / "ledger.sqlite"))


def refusal(path: Path) -> str:
    """Return the refusal of `PrivacyLedger.verify` for a ledger that is opened to read; empty if it accepts it."""
    ledger = PrivacyLedger(f"sqlite:///{path}", create=False)
    try:
        ledger.verify()
    except BudgetError as error:
        return str(error)
    finally:
        ledger.close()
    return ""


def change(path: Path, *statements: tuple[Any, ...]) -> None:
    with sqlite3.connect(path) as connection:
        for statement, *values in statements:
            connection.execute(statement, values)
    connection.close()


def entries_of(path: Path) -> list[LedgerEntry]:
    ledger = PrivacyLedger(f"sqlite:///{path}", create=False)
    try:
        return list(ledger.history())
    finally:
        ledger.close()


def flipped(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:]
    return value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("sequence", range(1, ENTRIES + 1))
@pytest.mark.parametrize("column", ["previous", "kind", "body", "hash", "signature"])
def test_an_edit_of_any_column_of_any_entry_is_found_and_named(copied: Path, sequence: int, column: str):
    value = getattr(entries_of(copied)[sequence - 1], column)
    change(copied, (f"UPDATE entries SET {column} = ? WHERE sequence = ?", flipped(value), sequence))
    assert refusal(copied).startswith(f"chain_broken: the ledger cannot be trusted at entry {sequence}:")


@pytest.mark.parametrize("sequence", range(1, ENTRIES + 1))
def test_an_edit_of_any_field_of_any_body_is_found_and_named(copied: Path, sequence: int):
    body = entries_of(copied)[sequence - 1].body
    for name, value in json.loads(body).items():
        edited = canonical_json(json.loads(body) | {name: _other(value)})
        assert edited != body
        change(copied, ("UPDATE entries SET body = ? WHERE sequence = ?", edited, sequence))
        assert f"at entry {sequence}: its content does not match its hash" in refusal(copied), name
    change(copied, ("UPDATE entries SET body = ? WHERE sequence = ?", body, sequence))
    assert refusal(copied) == ""


def _other(value: Any) -> Any:
    if isinstance(value, list):
        return value[:-1] if value else ["more"]
    if isinstance(value, dict):
        return value | {"more": 1}
    if value is None:
        return "00"
    return value + ("0" if isinstance(value, str) else 1)


@pytest.mark.parametrize("sequence", range(1, ENTRIES + 1))
def test_a_dropped_entry_is_found(copied: Path, sequence: int):
    change(copied, ("DELETE FROM entries WHERE sequence = ?", sequence))
    found = refusal(copied)
    assert found.startswith("chain_broken: ")
    if sequence < ENTRIES:
        assert f"at entry {sequence}: entry {sequence + 1} stands in its place" in found


@pytest.mark.parametrize("sequence", range(1, ENTRIES))
def test_two_entries_that_changed_places_are_found(copied: Path, sequence: int):
    change(
        copied,
        ("UPDATE entries SET sequence = 0 WHERE sequence = ?", sequence),
        ("UPDATE entries SET sequence = ? WHERE sequence = ?", sequence, sequence + 1),
        ("UPDATE entries SET sequence = ? WHERE sequence = 0", sequence + 1),
    )
    assert f"at entry {sequence}: it does not follow" in refusal(copied)


def test_verify_writes_nothing_not_even_after_a_writer_that_was_killed(tmp_path: Path):
    """SQLite would move the log into the file, and the first reader of a copy would destroy what it is to show."""
    ledger = realistic(tmp_path / "ledger.sqlite")
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        shutil.copy2(tmp_path / name, killed)
    ledger.close()
    before = {file.name: file.read_bytes() for file in killed.iterdir()}
    assert len(before["ledger.sqlite-wal"]) > 0
    assert refusal(killed / "ledger.sqlite") == ""
    assert len(entries_of(killed / "ledger.sqlite")) == ENTRIES
    assert {name: (killed / name).read_bytes() for name in before} == before


# --- exports


@pytest.fixture
def export(original: Path, tmp_path: Path) -> Path:
    ledger = PrivacyLedger(f"sqlite:///{original}", create=False)
    path = tmp_path / "ledger.jsonl"
    ledger.export(path)
    ledger.close()
    return path


def refused_export(path: Path) -> str:
    try:
        check_export(path)
    except (BudgetError, ConfigError) as error:
        return str(error)
    return ""


def test_an_export_is_checked_without_the_ledger(original: Path, export: Path):
    checked, entries, other = check_export(export), entries_of(original), IdentityKey.generate()
    assert checked.hashes == tuple(entry.hash for entry in entries)
    assert checked.audited.head == checked.stated.position == Head(ENTRIES, entries[-1].hash)
    assert {name: len(run.charges["gradient"]) for name, run in checked.audited.runs.items()} == {
        "run-a": 3,
        "run-b": 1,
        "run-c": 1,
    }
    assert export.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="export_exists"):
        write_export(export, entries, other.public, other, 0)


@pytest.mark.parametrize("line", range(ENTRIES + 2))
def test_an_export_without_one_of_its_lines_is_refused(export: Path, line: int):
    lines = export.read_bytes().splitlines(keepends=True)
    export.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
    assert refused_export(export)


@pytest.mark.parametrize("line", range(1, ENTRIES + 1))
def test_an_edit_of_any_field_of_an_exported_entry_is_found_and_named(export: Path, line: int):
    lines = export.read_bytes().splitlines()
    original = json.loads(lines[line])
    for name, value in original.items():
        if name == "body":
            edited = value | {"recorded_at": value["recorded_at"] + 1}
        else:
            edited = value + 1 if isinstance(value, int) else ("ff" if value[:2] != "ff" else "00") + value[2:]
        lines[line] = canonical_json(original | {name: edited})
        export.write_bytes(b"\n".join(lines) + b"\n")
        assert f"entry {line}:" in refused_export(export), name


@pytest.mark.parametrize("line", range(1, ENTRIES + 1))
def test_exported_lines_that_changed_places_are_found(export: Path, line: int):
    lines = export.read_bytes().splitlines(keepends=True)
    lines[line], lines[line + 1] = lines[line + 1], lines[line]
    export.write_bytes(b"".join(lines))
    assert refused_export(export)


@pytest.mark.parametrize("text", [b"", b"{}\n", b"not a ledger\n", b"\xff\xfe\n"])
def test_a_file_that_is_no_export_is_bad_input(tmp_path: Path, text: bytes):
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ConfigError, match="export_file"):
        check_export(tmp_path / "file")


def test_a_head_that_was_signed_by_another_key_or_moved_is_refused(original: Path, tmp_path: Path):
    entries, other = entries_of(original), IdentityKey.generate()
    write_export(tmp_path / "forged", entries, other.public, other, 0)
    assert "at entry 1: it is not signed by the ledger's key" in refused_export(tmp_path / "forged")
    line = head_line(Head(3, entries[2].hash), other, 7)
    assert read_head_line(line, LedgerKeys.of((), other.public)).position == Head(3, entries[2].hash)
    with pytest.raises(ProtocolError, match="signature"):
        read_head_line(line, LedgerKeys.of((), IdentityKey.generate().public))
    with pytest.raises(ProtocolError, match="malformed"):
        read_head_line(line + b" ", LedgerKeys.of((), other.public))
    assert LedgerHead.DOMAIN != "raycloak/receipt/v1"


# --- heads that were kept elsewhere


class Pinned:
    """A state folder with a ledger, and a package and an evidence log that saw its entry ``seen``."""

    def __init__(self, home: Path, original: Path, seen: int) -> None:
        self.home, self.path = home, home / "ledger.sqlite"
        home.mkdir(mode=0o700)
        shutil.copy2(original, self.path)
        ledger = PrivacyLedger(f"sqlite:///{self.path}", create=False)
        key, orchestrator = ledger.public_key, HybridSigner.generate()
        self.head = Head(seen, ledger.hash_at(seen) or b"")
        ledger.close()
        manifest = run_manifest(
            ledger_key=key,
            orchestrator_key=orchestrator.public.ed25519,
            orchestrator_ml_dsa=orchestrator.public.ml_dsa_65,
        )
        self.site = Site(home, manifest)
        self.site.storage = type(self.site.storage).open(str(home / "packages" / manifest.run_id))
        self.site.publish(ledger_sequence=seen, ledger_hash=self.head.hash)
        run = home / "runs" / "run-1"
        run.mkdir(parents=True)
        (run / "manifest.json").write_bytes(manifest.encode() + b"\n")
        connection = sqlite3.connect(":memory:")
        log = EvidenceLog(connection, manifest.run_id, orchestrator)
        log.append("committed", {"step": 0, "ledger_sequence": seen, "ledger_hash": self.head.hash.hex()})
        log.export(run / "evidence.jsonl")
        connection.close()

    def truncate(self, kept: int) -> None:
        """Cut the newest entries off, and make the tables say what the shorter chain says."""
        charged = [entry.event.run_id for entry in entries_of(self.path)[:kept] if entry.kind == "step_charged"]
        counts = {name: charged.count(name) for name in ["run-a", "run-b", "run-c"]}
        change(
            self.path,
            ("DELETE FROM entries WHERE sequence > ?", kept),
            *(("UPDATE charged SET charges = ? WHERE run_id = ?", count, name) for name, count in counts.items()),
        )


@pytest.fixture
def raycloak(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Any]]:
    """Run ``raycloak budget ... --json`` in this process; returns (exit code, the object)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def run(*arguments: object) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as stopped:
            app.main(["budget", *map(str, arguments), "--json"])
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, json.loads(capfd.readouterr().out)

    return run


def test_a_consistent_truncation_is_found_by_a_pinned_head_alone(raycloak: Any, raycloak_home: Path, original: Path):
    pinned = Pinned(raycloak_home, original, seen=ENTRIES - 1)
    code, facts = raycloak("verify")
    assert (code, facts["rollback_covered_to"], facts["not_checked"]) == (0, ENTRIES - 1, [])
    assert [(each["kind"], each["heads"], each["newest"]) for each in facts["checked"]] == [
        ("package", 1, ENTRIES - 1),
        ("evidence log", 1, ENTRIES - 1),
    ]
    pinned.truncate(ENTRIES - 1)
    assert raycloak("verify")[0] == 0
    pinned.truncate(ENTRIES - 2)
    assert refusal(pinned.path) == ""
    code, facts = raycloak("verify")
    assert (code, facts["error"]["code"]) == (3, "ledger_rolled_back")
    assert f"the ledger's entry {ENTRIES - 1}" in facts["error"]["message"]
    assert "no such entry" in facts["error"]["message"]


@pytest.mark.parametrize("lost", ["packages", "runs"])
def test_each_kind_of_pin_is_enough(raycloak: Any, raycloak_home: Path, original: Path, lost: str):
    pinned = Pinned(raycloak_home, original, seen=ENTRIES)
    shutil.rmtree(raycloak_home / lost)
    assert raycloak("verify")[1]["rollback_covered_to"] == ENTRIES
    pinned.truncate(ENTRIES - 2)
    assert raycloak("verify")[1]["error"]["code"] == "ledger_rolled_back"


def test_another_history_of_the_same_length_is_found(raycloak: Any, raycloak_home: Path, original: Path):
    pinned = Pinned(raycloak_home, original, seen=ENTRIES)
    pinned.truncate(ENTRIES - 2)
    ledger = PrivacyLedger(f"sqlite:///{pinned.path}")
    for step in (1, 2):
        ledger.charge("run-a", step, b"other parameters".ljust(32), MANIFEST)
    ledger.verify()
    ledger.close()
    code, facts = raycloak("verify")
    assert (code, facts["error"]["code"]) == (3, "ledger_rolled_back")


def test_pins_that_cannot_be_used_are_said(raycloak: Any, raycloak_home: Path, original: Path, tmp_path: Path):
    pinned = Pinned(raycloak_home, original, seen=ENTRIES)
    (raycloak_home / "signer" / "signer.pub.json").unlink()
    (raycloak_home / "runs" / "run-1" / "manifest.json").unlink()
    code, facts = raycloak("verify")
    assert (code, facts["checked"], facts["rollback_covered_to"]) == (0, [], 0)
    assert {each["kind"] for each in facts["not_checked"]} == {"package", "evidence log"}
    other = realistic(tmp_path / "other.sqlite")
    other.close()
    pinned = Pinned(tmp_path / "elsewhere", original, seen=ENTRIES)
    places = ("--packages", pinned.home / "packages", "--runs", pinned.home / "runs")
    code, facts = raycloak("verify", "--ledger", f"sqlite:///{tmp_path / 'other.sqlite'}", *places)
    assert code == 0
    assert "of another ledger" in facts["not_checked"][-1]["reason"]
    key = entries_key(original)
    assert raycloak("verify", "--public-key", key)[0] == 0
    code, facts = raycloak("verify", "--ledger", f"sqlite:///{tmp_path / 'other.sqlite'}", "--public-key", key)
    assert (code, facts["error"]["code"]) == (3, "ledger_key")
    assert raycloak("verify", "--public-key", "xyz")[1]["error"]["code"] == "usage"


def entries_key(path: Path) -> str:
    ledger = PrivacyLedger(f"sqlite:///{path}", create=False)
    try:
        return ledger.public_key.hex()
    finally:
        ledger.close()


def test_an_export_is_verified_by_the_command_against_the_same_pins(
    raycloak: Any, raycloak_home: Path, original: Path, tmp_path: Path
):
    pinned = Pinned(raycloak_home, original, seen=ENTRIES)
    code, facts = raycloak("export", tmp_path / "now.jsonl")
    assert (code, facts["entries"]) == (0, ENTRIES)
    pinned.truncate(ENTRIES - 2)
    assert raycloak("export", tmp_path / "later.jsonl")[1]["entries"] == ENTRIES - 2
    assert raycloak("verify", "--export", tmp_path / "now.jsonl")[1]["rollback_covered_to"] == ENTRIES
    code, facts = raycloak("verify", "--export", tmp_path / "later.jsonl")
    assert (code, facts["error"]["code"]) == (3, "ledger_rolled_back")
    assert raycloak("verify", "--export", tmp_path / "later.jsonl", "--ledger", "x")[1]["error"]["code"] == "usage"


def test_a_forged_package_or_log_pins_nothing(raycloak_home: Path, original: Path):
    pinned = Pinned(raycloak_home, original, seen=ENTRIES)
    key = LedgerKeys.of((), bytes.fromhex(entries_key(original)))
    (name,) = pinned.site.storage.names()
    manifest = raycloak_home / "packages" / pinned.site.manifest.run_id / name / "manifest.json"
    old, new = f'"ledger_sequence":{ENTRIES}'.encode(), b'"ledger_sequence":99'
    manifest.write_bytes(manifest.read_bytes().replace(old, new))
    (pin,) = package_pins(raycloak_home / "packages", raycloak_home / "signer", key)
    assert (pin.heads, pin.unusable.partition(":")[0]) == ((), "package_signature")
    log = raycloak_home / "runs" / "run-1" / "evidence.jsonl"
    log.write_bytes(log.read_bytes().replace(old, new))
    (pin,) = log_pins(raycloak_home / "runs", key)
    assert (pin.heads, pin.unusable.partition(":")[0]) == ((), "log_broken")
    check_pins([pin], lambda sequence: None)
    with pytest.raises(BudgetError, match="ledger_rolled_back"):
        check_pins([replace(pin, heads=(pinned.head,))], lambda sequence: None)
