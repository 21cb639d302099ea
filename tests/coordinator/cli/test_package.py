"""``raycloak package``: from key generation to an opened model, with exit codes and one JSON object."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from raycloak.attestation.sealed.package_keys import load_recipient_key
from raycloak.attestation.sealed.package_manifest import PackageRefusal
from raycloak.coordinator.cli import app
from tests.coordinator.checkpoints.tssp_cases import Site, snapshot

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "tssp.md"


@pytest.fixture
def raycloak(capfd, monkeypatch):
    """Run ``raycloak package ... --json`` in this process; returns (exit code, the object, stderr)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            app.main(["package", *map(str, arguments), "--json"])
        captured = capfd.readouterr()
        return stopped.value.code, json.loads(captured.out), captured.err

    return run


@pytest.fixture
def reader(raycloak, tmp_path):
    """Return a package, and a reader with a key and a trust store made by the commands."""
    assert raycloak("keygen", tmp_path / "auditor.key")[0] == 0
    site = Site(tmp_path, recipient=load_recipient_key(tmp_path / "auditor.key"))
    trust = ("trust", tmp_path / "trust.json", "--signer", tmp_path / "signer" / "signer.pub.json", "--name", "site-a")
    for _ in range(2):
        assert raycloak(*trust)[0] == 0
    return site.folder(site.publish()), tmp_path


def test_a_package_is_verified_and_opened(raycloak, reader):
    path, home = reader
    code, facts, _ = raycloak("verify", path, "--trust", home / "trust.json")
    assert code == 0
    assert (facts["verified"], facts["signer"], facts["step"]) == (True, "site-a", 3)
    assert (facts["evidence_class"], facts["recipients"]) == ("simulated", ["auditor"])
    options = ("--trust", home / "trust.json", "--key", home / "auditor.key", "--out", home / "m.safetensors")
    code, opened, _ = raycloak("open", path, *options)
    assert code == 0
    assert opened["model_digest"] == facts["model_digest"]
    manifest, tensors = Site(home).manifest, load_file(home / "m.safetensors")
    flat = b"".join(tensors[each.name].tobytes() for each in manifest.computation.tensors)
    assert flat == snapshot(manifest).parameters.tobytes()
    code, refused, _ = raycloak("open", path, *options)
    assert (code, refused["error"]["code"]) == (2, "out_exists")


def test_a_person_reads_that_the_evidence_is_simulated(reader, capfd, monkeypatch):
    path, home = reader
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        app.main(["package", "verify", str(path), "--trust", str(home / "trust.json")])
    assert stopped.value.code == 0
    assert "SIMULATED" in capfd.readouterr().out


def test_what_is_refused_has_exit_code_3_and_leaves_no_file(raycloak, reader):
    path, home = reader
    trust = ("--trust", home / "trust.json")
    raycloak("keygen", home / "stranger.key")
    code, result, _ = raycloak("open", path, *trust, "--key", home / "stranger.key", "--out", home / "m")
    assert (code, result["error"]["code"]) == (3, "not_a_recipient")
    (path / "stray").touch()
    code, result, err = raycloak("verify", path, *trust)
    assert (code, result["error"]["code"]) == (3, "package_stray_file")
    assert err.startswith("error: package_stray_file: ")
    code, result, _ = raycloak("verify", home / "nothing.tssp", *trust)
    assert (code, result["error"]["code"]) == (3, "package_file_missing")
    assert not (home / "m").exists()


def test_a_folder_that_names_another_step_or_an_unexpected_run_is_refused(raycloak, reader, monkeypatch):
    """An old model under a new name is genuine in every byte."""
    path, home = reader
    trust = ("--trust", home / "trust.json")
    run_id = raycloak("verify", path, *trust)[1]["run_id"]
    assert raycloak("verify", path, *trust, "--run", run_id, "--step", 3)[0] == 0
    for options, code in ((("--run", "0" * 16), "package_other_run"), (("--step", 4), "package_other_step")):
        status, refused, _ = raycloak("verify", path, *trust, *options)
        assert (status, refused["error"]["code"]) == (3, code)
        opening = ("--key", home / "auditor.key", "--out", home / "m.safetensors")
        assert raycloak("open", path, *trust, *opening, *options)[1]["error"]["code"] == code
    shutil.copytree(path, home / "step-000050.tssp")
    assert raycloak("verify", home / "step-000050.tssp", *trust)[1]["error"]["code"] == "package_other_step"
    # Also in other spellings of a step, and where the name is not the last part of what was typed.
    for name in ("step-50", "step-000050.tssp.bak", "Step-50.tssp"):
        shutil.copytree(path, home / name)
        assert raycloak("verify", home / name, *trust)[1]["error"]["code"] == "package_other_step"
    for end in ("/.", "/../step-000050.tssp", "//"):
        typed = f"{home / 'step-000050.tssp'}{end}"
        assert raycloak("verify", typed, *trust)[1]["error"]["code"] == "package_other_step"
    monkeypatch.chdir(home / "step-000050.tssp")
    assert raycloak("verify", ".", *trust)[1]["error"]["code"] == "package_other_step"
    monkeypatch.chdir(path)
    assert raycloak("verify", ".", *trust)[0] == 0
    # A name without a step contradicts nothing.
    shutil.copytree(path, home / "final-model")
    assert raycloak("verify", home / "final-model", *trust)[0] == 0


def test_bad_input_has_exit_code_2(raycloak, reader):
    path, home = reader
    trust, key = home / "trust.json", home / "auditor.key"
    cases = {
        "recipient_exists": ("keygen", key),
        "signer": ("trust", trust, "--signer", key, "--name", "x"),
        "trust_store": ("verify", path, "--trust", home / "none.json"),
        "recipient": ("open", path, "--trust", trust, "--key", trust, "--out", home / "m"),
        "storage": ("verify", "ftp://host/x.tssp", "--trust", trust),
    }
    trust.chmod(0o600)
    found = {name: raycloak(*case)[:2] for name, case in cases.items()}
    assert {name: (code, result["error"]["code"]) for name, (code, result) in found.items()} == {
        name: (2, name) for name in cases
    }


def test_every_refusal_is_in_the_document():
    text = DOCUMENT.read_text()
    assert [code for code in PackageRefusal if f"`{code}`" not in text] == []
