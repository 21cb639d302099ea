"""A ledger that was put back, or that went another way than its witness saw, is refused before it gives a receipt."""

import json
import os
import shutil
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.keys import IdentityKey
from raycloak.coordinator.config.sections import LedgerConfig
from raycloak.coordinator.ledger.entries import Head, LedgerKeys, head_line
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.ledger.witness import FolderWitness, Witnessed, WitnessState, open_witness
from raycloak.metrics.errors import BudgetError, ConfigError
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, MANIFEST, PARAMETERS, mechanism, receipt_of
from tests.coordinator.ledger.witness_server import WitnessServer, url_file, witness_server


@pytest.fixture
def server() -> Iterator[WitnessServer]:
    """Yield a witness that is asked over HTTP."""
    with witness_server() as running:
        yield running


@pytest.fixture(params=["folder", "url"])
def witness(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the location of an empty witness of each kind."""
    if request.param == "url":
        server: WitnessServer = request.getfixturevalue("server")
        return server.named_in(tmp_path)
    (tmp_path / "witness").mkdir()
    return str(tmp_path / "witness")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of the test's ledger, which does not exist yet."""
    return tmp_path / "state" / "ledger.sqlite"


def begin(path: Path, witness: str | None, run_id: str = "run-a") -> PrivacyLedger:
    """Return an instance of the ledger with an account and a run of this instance."""
    ledger = PrivacyLedger(f"sqlite:///{path}", witness=witness)
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms(run_id, "patients", (mechanism(),), MANIFEST))
    ledger.bind_data(run_id, MANIFEST, DATA)
    return ledger


def newest(ledger: PrivacyLedger, witness: str) -> Head:
    store = open_witness(witness, LedgerKeys.of((), ledger.public_key))
    held = store.newest().head
    store.close()
    assert held is not None
    return held.position


def test_when_a_receipt_is_returned_the_witness_holds_a_head_at_or_behind_its_entry(path: Path, witness: str):
    ledger = begin(path, witness)
    assert newest(ledger, witness) == ledger.view().head
    for step in range(3):
        receipt = receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST))
        assert newest(ledger, witness) == Head(receipt.sequence, receipt.head)
    ledger.close()


def test_a_ledger_that_was_put_back_is_refused_with_both_values(path: Path, witness: str, tmp_path: Path):
    ledger = begin(path, witness)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.close()
    shutil.copy2(path, tmp_path / "older.sqlite")
    ledger = begin(path, witness)
    ledger.charge("run-a", 1, PARAMETERS, MANIFEST)
    lost = ledger.view().head
    ledger.close()
    shutil.copy2(tmp_path / "older.sqlite", path)
    for create in (True, False):
        with pytest.raises(BudgetError, match=f"ledger_rolled_back: .*entry 5 with hash {lost.hash.hex()}; .* no such"):
            PrivacyLedger(f"sqlite:///{path}", create, witness)
    beside = begin(path, None)
    beside.charge("run-a", 1, b"q" * 32, MANIFEST)
    other = beside.view().head
    beside.close()
    with pytest.raises(BudgetError, match=f"{lost.hash.hex()}; the ledger has {other.hash.hex()}"):
        PrivacyLedger(f"sqlite:///{path}", witness=witness)


@pytest.mark.parametrize("others", [0, 3])
def test_a_ledger_that_is_put_back_while_it_is_open_is_refused_at_the_next_charge(
    path: Path, witness: str, tmp_path: Path, others: int
):
    """As when a standby takes over that lacks the last entries, and others have charged since or not."""
    ledger = begin(path, witness)
    with sqlite3.connect(path) as live, sqlite3.connect(tmp_path / "older") as older:
        live.backup(older)
        for step in range(2):
            ledger.charge("run-a", step, PARAMETERS, MANIFEST)
        older.backup(live)
    if others:
        stranger = PrivacyLedger(f"sqlite:///{path}")
        stranger.register_run(RegistrationTerms("run-b", "patients", (mechanism(),), MANIFEST))
        stranger.bind_data("run-b", MANIFEST, DATA)
        for step in range(others):
            stranger.charge("run-b", step, PARAMETERS, MANIFEST)
        stranger.close()
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"ledger_rolled_back: .*entry 5"):
            ledger.charge("run-a", 2, PARAMETERS, MANIFEST)
    ledger.close()


def test_two_copies_of_a_ledger_cannot_both_continue(path: Path, witness: str, tmp_path: Path):
    begin(path, witness).close()
    copy = tmp_path / "copy.sqlite"
    shutil.copy2(path, copy)
    one, two = begin(path, witness), begin(copy, witness)
    one.charge("run-a", 0, PARAMETERS, MANIFEST)
    for _ in range(2):
        with pytest.raises(BudgetError, match="ledger_rolled_back"):
            two.charge("run-a", 0, b"q" * 32, MANIFEST)
    one.charge("run-a", 1, PARAMETERS, MANIFEST)
    for each in (one, two):
        each.close()


def test_instances_of_one_ledger_share_its_witness(path: Path, witness: str):
    one, two = begin(path, witness, "run-a"), begin(path, witness, "run-b")
    failures: list[BaseException] = []

    def charge(ledger: PrivacyLedger, run_id: str) -> None:
        try:
            for step in range(5):
                ledger.charge(run_id, step, PARAMETERS, MANIFEST)
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    threads = [threading.Thread(target=charge, args=each) for each in ((one, "run-a"), (two, "run-b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert newest(one, witness) == one.view().head
    for each in (one, two):
        each.close()


def test_a_charge_whose_head_cannot_be_kept_is_refused_by_name_and_the_repeat_gives_its_receipt(
    path: Path, server: WitnessServer, tmp_path: Path
):
    location = server.named_in(tmp_path)
    ledger = begin(path, location)
    server.answers = [503]
    assert ledger.view().witness == WitnessState(answers=True, entries=3)
    with pytest.raises(BudgetError, match=r"witness_unavailable: .*503.*stays charged"):
        ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    assert ledger.status("run-a", 0).charged
    # What a scrape shows: the witness is silent, one entry behind.
    assert ledger.view().witness == WitnessState(answers=False, entries=3)
    assert ledger.view().head.sequence == 4
    receipt = receipt_of(ledger, ledger.charge("run-a", 0, PARAMETERS, MANIFEST))
    assert receipt.sequence == ledger.status("run-a", 0).sequence == 4
    assert newest(ledger, location).sequence == 4
    assert ledger.view().witness == WitnessState(answers=True, entries=4)
    ledger.verify()
    ledger.close()


def test_a_repeat_has_its_head_kept_too_before_it_returns(path: Path, server: WitnessServer, tmp_path: Path):
    location = server.named_in(tmp_path)
    ledger = begin(path, location)
    server.answers = [503]
    with pytest.raises(BudgetError, match="witness_unavailable"):
        ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    server.answers = [503]
    with pytest.raises(BudgetError, match="witness_unavailable"):
        ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.close()


def test_a_put_whose_answer_was_lost_is_found_done(path: Path, server: WitnessServer, tmp_path: Path):
    location = server.named_in(tmp_path)
    ledger = begin(path, location)
    server.lost = 1
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    assert newest(ledger, location).sequence == 4
    ledger.close()


def test_one_put_a_charge_is_all_that_a_url_is_asked(path: Path, server: WitnessServer, tmp_path: Path):
    location = server.named_in(tmp_path)
    ledger = begin(path, location)
    before = len(server.asked)
    for step in range(4):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    assert [method for method, _ in server.asked[before:]] == ["PUT"] * 4
    assert {path for _, path in server.asked} == {f"/witness/{ledger.public_key.hex()}"}
    ledger.close()


def test_a_folder_costs_one_append_and_one_sync_a_charge(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "witness").mkdir()
    ledger = begin(path, str(tmp_path / "witness"))
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(
        "raycloak.coordinator.ledger.witness.os.fsync", lambda each: (synced.append(each), real(each))[1]
    )
    for step in range(4):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    assert len(synced) == 4
    (file,) = (tmp_path / "witness").iterdir()
    assert len(file.read_bytes().splitlines()) == 3 + 4
    heads = open_witness(str(tmp_path / "witness"), LedgerKeys.of((), ledger.public_key)).heads()
    assert [head.sequence for head in heads] == list(range(1, 8))
    ledger.close()


@pytest.mark.parametrize("torn", [b"{", b'{"head":"7b', b"x" * 300])
def test_a_line_that_a_crash_cut_off_is_taken_away_by_the_next(tmp_path: Path, torn: bytes):
    key = IdentityKey.generate()
    store = FolderWitness(tmp_path, LedgerKeys.of((), key.public))
    kept = Witnessed(store, key, lambda sequence: bytes([sequence]) * 32, lambda: 7)
    (file,) = [tmp_path / f"{key.public.hex()[:32]}.heads.jsonl"]
    file.write_bytes(torn)
    assert store.newest().head is None
    kept.keep(Head(1, b"\1" * 32))
    with file.open("ab") as ending:
        ending.write(torn)
    again = Witnessed(store, key, lambda sequence: bytes([sequence]) * 32, lambda: 8)
    again.check()
    again.keep(Head(2, b"\2" * 32))
    assert [head.sequence for head in store.heads()] == [1, 2]


def test_what_the_ledger_did_not_sign_is_no_head(tmp_path: Path, server: WitnessServer):
    key, other = IdentityKey.generate(), IdentityKey.generate()
    line = head_line(Head(9, b"h" * 32), other, 0)
    (tmp_path / f"{key.public.hex()[:32]}.heads.jsonl").write_bytes(line + b"\n")
    server.kept[f"/witness/{key.public.hex()}"] = line
    for location in (str(tmp_path), server.named_in(tmp_path)):
        store = open_witness(location, LedgerKeys.of((), key.public))
        with pytest.raises(BudgetError, match=r"witness_unavailable: .*not a head that this ledger signed"):
            store.newest()
        store.close()


def nowhere(folder: Path) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return url_file(folder, f"http://127.0.0.1:{free.getsockname()[1]}/{SECRET_PATH}")


SECRET_PATH = "s3cret-path"


@pytest.mark.parametrize("location", [nowhere, lambda folder: str(folder / "missing")])
def test_without_its_witness_a_ledger_does_not_open(path: Path, tmp_path: Path, location: Callable[[Path], str]):
    with pytest.raises(BudgetError, match="witness_unavailable") as refusal:
        PrivacyLedger(f"sqlite:///{path}", witness=location(tmp_path))
    assert SECRET_PATH not in str(refusal.value)


@pytest.mark.parametrize(
    "location", ["relative/folder", "ftp://host/x", "http://", "", f"https://host/{SECRET_PATH}", "file:///x"]
)
def test_guarantee_a_witness_is_named_by_an_absolute_path_alone(path: Path, location: str):
    """Arguments, configurations and command lines are read by others, and a URL lets them write there."""
    with pytest.raises(ConfigError, match="witness: ") as refusal:
        PrivacyLedger(f"sqlite:///{path}", witness=location)
    assert SECRET_PATH not in str(refusal.value)
    if "://" in location:
        with pytest.raises(ConfigError, match="a URL stands in a file of mode 0600") as wrong:
            LedgerConfig(witness=location)
        assert SECRET_PATH not in str(wrong.value)


@pytest.mark.parametrize(
    ("content", "mode"),
    [
        (f"ftp://host/{SECRET_PATH}", 0o600),
        (f"http://ada:{SECRET_PATH}@host/x", 0o600),
        (f"http://host:99999/{SECRET_PATH}", 0o600),
        (f"http://host/{SECRET_PATH} http://other", 0o600),
        (f"http://host/{SECRET_PATH}\x00", 0o600),
        (f"http://h\u00f6st/{SECRET_PATH}", 0o600),
        ("http://", 0o600),
        ("", 0o600),
        (f"http://host/{SECRET_PATH}", 0o640),
    ],
)
def test_the_file_of_a_witness_holds_one_url_and_is_private(tmp_path: Path, content: str, mode: int):
    with pytest.raises(ConfigError, match="witness: ") as refusal:
        open_witness(url_file(tmp_path, content, mode), LedgerKeys.of((), bytes(32)))
    assert SECRET_PATH not in str(refusal.value)


def test_guarantee_a_witness_on_the_ledgers_own_machine_covers_no_rollback(
    path: Path, server: WitnessServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "witness").mkdir()
    for location in (str(tmp_path / "witness"), server.named_in(tmp_path), None):
        ledger = PrivacyLedger(f"sqlite:///{path}", witness=location)
        assert ledger.view().rollback_witness is False
        ledger.close()
    monkeypatch.setattr("raycloak.coordinator.ledger.location._machine", lambda _: "another one")
    ledger = PrivacyLedger(f"sqlite:///{path}", witness=server.named_in(tmp_path))
    assert ledger.view().rollback_witness is True
    ledger.close()


def test_killed_at_any_act_of_ledger_or_witness_no_receipt_is_without_its_head(run_python: Any):
    """The sweep is in `witness_child.py`: before every SQL statement and every call of the witness, SIGKILL."""
    done = run_python(str(Path(__file__).with_name("witness_child.py")), str(run_python.folder))
    assert done.code == 0, done.stderr
    swept = json.loads(done.stdout)
    assert set(swept["receipts"]) == {0, 1, 2}
    assert {"open", "write", "fsync"} <= set(swept["acts"])
