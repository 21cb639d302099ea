"""``raycloak budget``: from an authority's key to a closed account, each command with ``--json`` and for a person."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.files import private
from raycloak.attestation.files.private import publish
from raycloak.attestation.sealed.demand import SealedDemand
from raycloak.coordinator.cli import app
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.runs.demo import demo_config
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.inputs.sealed import seal_dataset
from tests.coordinator.ledger.witness_server import witness_server


@pytest.fixture
def raycloak(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run ``raycloak budget ...`` in this process; returns (exit code, the object or text)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def run(*arguments: object, as_json: bool = True) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as stopped:
            app.main(["budget", *map(str, arguments), *(["--json"] if as_json else [])])
        assert isinstance(stopped.value.code, int)
        out = capfd.readouterr().out
        return stopped.value.code, json.loads(out) if as_json else out

    return run


@pytest.fixture
def authority(raycloak: Any, tmp_path: Path) -> Path:
    """Return an authority's private key."""
    code, made = raycloak("keygen", tmp_path / "board.key")
    assert (code, made["name"], made["public"]) == (0, "board", str(tmp_path / "board.key.pub"))
    assert (tmp_path / "board.key").stat().st_mode & 0o777 == 0o600
    return tmp_path / "board.key"


def refused(outcome: tuple[int, Any]) -> tuple[int, str]:
    return outcome[0], outcome[1]["error"]["code"]


def test_a_cap_is_raised_by_a_file_that_its_authority_made_from_an_export(
    raycloak: Any, authority: Path, tmp_path: Path
):
    opened = raycloak("open", "clinic", "--epsilon-cap", 4, "--authority", f"{authority}.pub")
    assert (opened[0], opened[1]["epsilon_cap"], opened[1]["closed"]) == (0, 4.0, False)
    assert refused(raycloak("cap", "clinic", "--epsilon-cap", 6)) == (3, "authorisation_missing")
    raycloak("export", tmp_path / "ledger.jsonl")
    sign = ("authorize", "clinic", "--epsilon-cap", 6, "--key", authority, "--export", tmp_path / "ledger.jsonl")
    code, signed = raycloak(*sign, "--out", tmp_path / "raise.json")
    assert (code, signed["old_cap"], signed["new_cap"]) == (0, 4.0, 6.0)
    assert refused(raycloak(*sign, "--out", tmp_path / "raise.json")) == (2, "out_exists")
    raised = ("cap", "clinic", "--epsilon-cap", 6, "--authorisation", tmp_path / "raise.json")
    code, account = raycloak(*raised)
    assert (code, account["epsilon_cap"]) == (0, 6.0)
    assert refused(raycloak(*raised)) == (3, "authorisation_void")
    assert raycloak("cap", "clinic", "--epsilon-cap", 3)[1]["epsilon_cap"] == 3.0
    assert raycloak("verify")[1]["entries"] == 3
    history = raycloak("history", "clinic")[1]["entries"]
    assert [entry["kind"] for entry in history] == ["account_opened", "cap_changed", "cap_changed"]
    assert "cap changed" in raycloak("history", as_json=False)[1]


def test_what_is_not_an_authorisation_or_a_key_is_bad_input(raycloak: Any, authority: Path, tmp_path: Path):
    raycloak("open", "clinic", "--epsilon-cap", 4, "--authority", f"{authority}.pub")
    sign = ("authorize", "clinic", "--key", authority, "--out", tmp_path / "raise.json", "--epsilon-cap")
    assert refused(raycloak(*sign, 4)) == (2, "authorisation")
    assert refused(raycloak(*sign, 5, "--ledger", "x", "--export", "y")) == (2, "usage")
    assert refused(raycloak("authorize", "nobody", *sign[2:], 5)) == (3, "account_unknown")
    for key in (f"{authority}.pub", tmp_path / "none"):
        assert refused(raycloak("authorize", "clinic", "--key", key, *sign[4:], 5)) == (2, "authority")
        assert refused(raycloak("cap", "clinic", "--epsilon-cap", 5, "--authorisation", key)) == (2, "authorisation")
    assert refused(raycloak("open", "other", "--epsilon-cap", 4, "--authority", authority)) == (2, "authority")
    assert refused(raycloak("keygen", authority)) == (2, "authority_exists")
    authority.chmod(0o644)
    assert refused(raycloak(*sign, 5)) == (2, "authority")


def test_what_would_never_be_used_is_not_signed(raycloak: Any, authority: Path, tmp_path: Path):
    raycloak("open", "clinic", "--epsilon-cap", 4, "--authority", f"{authority}.pub")
    raycloak("open", "fixed", "--epsilon-cap", 4)
    raycloak("keygen", tmp_path / "other.key")
    raycloak("export", tmp_path / "ledger.jsonl")
    out = ("--epsilon-cap", 6, "--out", tmp_path / "raise.json")
    for odd in (("--days", "nan"), ("--days", "1e308"), ("--epsilon-cap", "inf")):
        assert refused(raycloak("authorize", "clinic", "--key", authority, *out, *odd)) == (2, "usage")
    for record in ((), ("--export", tmp_path / "ledger.jsonl")):
        for account, key in (("clinic", tmp_path / "other.key"), ("fixed", authority)):
            assert refused(raycloak("authorize", account, "--key", key, *out, *record)) == (2, "authority")
    assert not (tmp_path / "raise.json").exists()


def test_a_history_is_of_an_account_that_there_is(raycloak: Any):
    raycloak("open", "clinic", "--epsilon-cap", 4)
    assert len(raycloak("history", "clinic")[1]["entries"]) == 1
    assert refused(raycloak("history", "clinc")) == (3, "account_unknown")


@pytest.mark.parametrize("option", ["--packages", "--runs"])
def test_heads_are_looked_for_in_folders_that_there_are(raycloak: Any, tmp_path: Path, option: str):
    raycloak("open", "clinic", "--epsilon-cap", 4)
    assert raycloak("verify", option, tmp_path)[0] == 0
    assert refused(raycloak("verify", option, tmp_path / "packges")) == (2, "usage")


def test_a_disk_that_fills_up_leaves_no_half_of_a_key_pair(raycloak: Any, tmp_path: Path, monkeypatch: Any):
    def full(path: Path, data: bytes, mode: int = 0o600) -> bool:
        if path.suffix == ".pub":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return publish(path, data, mode)

    with monkeypatch.context() as patch:
        patch.setattr(private, "publish", full)
        assert refused(raycloak("keygen", tmp_path / "board")) == (2, "authority")
    assert list(tmp_path.glob("*board*")) == []
    assert raycloak("keygen", tmp_path / "board")[0] == 0
    assert refused(raycloak("keygen", tmp_path / "board")) == (2, "authority_exists")


def test_a_key_has_a_name_and_so_has_an_account(raycloak: Any):
    assert refused(raycloak("keygen", "")) == (2, "authority")
    assert refused(raycloak("open", " ", "--epsilon-cap", 1)) == (2, "account_terms")


@pytest.mark.parametrize("place", ["", "folder"])
def test_an_empty_url_and_a_folder_are_no_ledger(raycloak: Any, tmp_path: Path, place: str):
    assert raycloak("open", "clinic", "--epsilon-cap", 1)[0] == 0
    url = place and f"sqlite:///{tmp_path}"
    assert refused(raycloak("show", "--ledger", url)) == (2, "ledger_url")
    assert refused(raycloak("open", "other", "--epsilon-cap", 1, "--ledger", url)) == (2, "ledger_url")


def test_expired_means_expired(raycloak: Any, authority: Path, tmp_path: Path):
    raycloak("open", "clinic", "--epsilon-cap", 4, "--authority", f"{authority}.pub")
    sign = ("authorize", "clinic", "--epsilon-cap", 6, "--key", authority, "--out", tmp_path / "raise.json")
    assert raycloak(*sign, "--days", -1)[0] == 0
    outcome = raycloak("cap", "clinic", "--epsilon-cap", 6, "--authorisation", tmp_path / "raise.json")
    assert refused(outcome) == (3, "authorisation_expired")
    assert raycloak("verify")[1]["entries"] == 1


def test_a_rotated_ledger_keeps_its_accounts_and_is_known_by_either_key(raycloak: Any, authority: Path, tmp_path: Path):
    former = raycloak("key")[1]["key"]
    raycloak("open", "clinic", "--epsilon-cap", 4, "--authority", f"{authority}.pub")
    code, found = raycloak("rotate")
    assert (code, found["former_key"]) == (0, former)
    assert found["key"] == raycloak("key")[1]["key"] != former
    raycloak("export", tmp_path / "ledger.jsonl")
    for key, outcome in ((former, 0), (found["key"], 0), ("ab" * 32, 3)):
        for source in ((), ("--export", tmp_path / "ledger.jsonl")):
            assert raycloak("verify", "--public-key", key, *source)[0] == outcome
    verified = raycloak("verify")[1]
    assert (verified["public_key"], verified["former_keys"]) == (found["key"], [former])
    assert f"{former}, from entry 1" in raycloak("verify", as_json=False)[1]
    # A raise is signed for the key that the ledger has now.
    sign = ("authorize", "clinic", "--epsilon-cap", 6, "--key", authority, "--export", tmp_path / "ledger.jsonl")
    raycloak(*sign, "--out", tmp_path / "raise.json")
    raised = ("cap", "clinic", "--epsilon-cap", 6, "--authorisation", tmp_path / "raise.json")
    assert raycloak(*raised)[1]["epsilon_cap"] == 6.0
    kinds = [entry["kind"] for entry in raycloak("history", "clinic")[1]["entries"]]
    assert kinds == ["account_opened", "key_rotated", "cap_changed"]
    shown = raycloak("history", as_json=False)[1]
    assert "key rotated" in shown
    assert found["key"][:16] in shown


def test_a_ledger_that_is_not_there_is_not_made_by_a_rotation(raycloak: Any, tmp_path: Path):
    assert refused(raycloak("rotate", "--ledger", f"sqlite:///{tmp_path / 'none.sqlite'}")) == (2, "ledger_missing")
    assert not (tmp_path / "none.sqlite").exists()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration of a dataset with a key beside it."""
    np.savez(tmp_path / "train.npz", images=np.zeros((40, 64), np.uint8), labels=np.arange(40) % 10)
    (tmp_path / "train.key").touch(mode=0o600)
    (tmp_path / "train.key").write_text("ab" * 32)
    dataset = {"kind": "npz", "path": "train.npz", "fingerprint_key": "train.key"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**demo_config(), "dataset": dataset}))
    return path


def test_accounts_of_one_dataset_share_its_epsilon_and_are_closed(raycloak: Any, config: Path):
    code, found = raycloak("fingerprint", config)
    assert (code, len(found["fingerprint"])) == (0, 64)
    (first,) = raycloak("open", "one", "--epsilon-cap", 4, "--dataset", config)[1]["data"]
    assert (first["fingerprint"], len(first["key"])) == (found["fingerprint"], 64)
    second = ("open", "two", "--epsilon-cap", 4, "--fingerprint", found["fingerprint"])
    assert refused(raycloak(*second)) == (3, "account_known")
    assert raycloak(*second, "--also")[1]["data"] == [{"fingerprint": found["fingerprint"], "key": ""}]
    code, both = raycloak("transfer", "one", "two", "--epsilon", 1.5)
    assert (code, [account["epsilon_cap"] for account in both["accounts"]]) == (0, [2.5, 5.5])
    raycloak("open", "free", "--epsilon-cap", 4)
    assert refused(raycloak("transfer", "one", "free", "--epsilon", 1)) == (3, "transfer_mismatch")
    assert raycloak("close", "one")[1]["closed"]
    assert refused(raycloak("cap", "one", "--epsilon-cap", 1)) == (3, "account_closed")
    assert raycloak("show", "one")[1]["accounts"][0]["closed"]
    assert "one (closed)" in raycloak("show", as_json=False)[1]
    assert "one to two" in raycloak("history", as_json=False)[1]
    assert "rollback" in raycloak("verify", as_json=False)[1]


def test_an_account_takes_another_key_of_its_data_by_a_command(raycloak: Any, config: Path, tmp_path: Path):
    raycloak("open", "one", "--epsilon-cap", 4, "--dataset", config)
    (tmp_path / "train.key").write_text("cd" * 32)
    assert refused(raycloak("open", "two", "--epsilon-cap", 4, "--dataset", config)) == (3, "fingerprint_key_unknown")
    code, bound = raycloak("bind", "one", "--dataset", config)
    assert (code, len({each["key"] for each in bound["data"]})) == (0, 2)
    assert refused(raycloak("open", "two", "--epsilon-cap", 4, "--dataset", config)) == (3, "account_known")
    assert "data known" in raycloak("history", as_json=False)[1]


def test_an_account_is_bound_to_sealed_data_by_its_header_and_needs_no_key(raycloak: Any, tmp_path: Path):
    code, ledger = raycloak("key")
    assert (code, ledger) == (0, raycloak("key")[1])
    demand = SealedDemand(ledger_key=bytes.fromhex(ledger["key"]), account="one", least_noise_multiplier=1.0)
    dataset = ArrayDataset(np.zeros((40, 64), np.float32), np.arange(40) % 10)
    key = Secret(b"d" * 32)
    header = seal_dataset(dataset, 4, b"p" * 32, key, tmp_path / "sealed", demand=demand)
    config = tmp_path / "sealed.yaml"
    named = {"kind": "sealed", "path": "sealed", "key_file": "not-here.key"}
    config.write_text(yaml.safe_dump({**demo_config(), "dataset": named}))
    assert raycloak("fingerprint", config)[1]["fingerprint"] == header.digest().hex()
    opened = raycloak("open", "one", "--epsilon-cap", 4, "--dataset", config)[1]
    assert [each["fingerprint"] for each in opened["data"]] == [header.digest().hex()]
    assert raycloak("show")[1]["public_key"] == ledger["key"]


def test_what_names_no_data_binds_no_account(raycloak: Any, config: Path, tmp_path: Path):
    both = ("--dataset", config, "--fingerprint", "00" * 32)
    assert refused(raycloak("open", "one", "--epsilon-cap", 4, *both)) == (2, "usage")
    assert refused(raycloak("open", "one", "--epsilon-cap", 4, "--fingerprint", "xyz")) == (2, "usage")
    assert refused(raycloak("open", "one", "--epsilon-cap", 4, "--fingerprint", "abcd")) == (2, "usage")
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(demo_config()))
    assert refused(raycloak("fingerprint", tmp_path / "plain.yaml")) == (2, "fingerprint_key")


@pytest.mark.parametrize(
    "command", [["cap", "x", "--epsilon-cap", 1], ["close", "x"], ["transfer", "x", "y", "--epsilon", 1]]
)
def test_a_ledger_is_made_by_opening_an_account_and_by_nothing_else(raycloak: Any, raycloak_home: Path, command: Any):
    assert refused(raycloak(*command)) == (2, "ledger_missing")
    assert not (raycloak_home / "ledger.sqlite").exists()
    raycloak("open", "z", "--epsilon-cap", 1)
    assert refused(raycloak(*command)) == (3, "account_unknown")


def test_every_command_that_writes_tells_the_witness_and_verify_asks_it(
    raycloak: Any, raycloak_home: Path, tmp_path: Path
):
    with witness_server() as server:
        place = ("--witness", server.named_in(tmp_path))
        assert raycloak("open", "one", "--epsilon-cap", 4, *place)[0] == 0
        assert raycloak("cap", "one", "--epsilon-cap", 3, *place)[0] == 0
        older = (raycloak_home / "ledger.sqlite").read_bytes()
        assert raycloak("close", "one", *place)[0] == 0
        code, facts = raycloak("verify", *place)
        assert (code, facts["rollback_covered_to"]) == (0, 3)
        assert [(each["kind"], each["newest"]) for each in facts["checked"]] == [("witness", 3)]
        (raycloak_home / "ledger.sqlite").write_bytes(older)
        assert raycloak("verify")[1]["rollback_covered_to"] == 0
        assert refused(raycloak("verify", *place)) == (3, "ledger_rolled_back")
        assert refused(raycloak("cap", "one", "--epsilon-cap", 2, *place)) == (3, "ledger_rolled_back")
        server.kept.clear()
        assert raycloak("verify", *place)[1]["not_checked"][0]["reason"] == "it holds no head of this ledger"
        server.answers = [500]
        assert refused(raycloak("cap", "one", "--epsilon-cap", 2, *place)) == (3, "witness_unavailable")
    ledger = PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}", create=False)
    assert ledger.view().head.sequence == 2
    ledger.close()
