"""The commands of a site and of an auditor, on the files of one run."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

from raycloak.coordinator.cli import app
from raycloak.coordinator.proof.trust import Trust
from raycloak.coordinator.record import run_list
from tests.coordinator.proof.proof_cases import Proved

ROOT = Path(__file__).resolve().parents[3]
EXTRA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["verify"]
COMMAND = "pip install --no-deps . --requirement deploy/verify-requirements.txt"

GUARDED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

ABSENT = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Absent())
from raycloak.coordinator.cli.verify import main
try:
    main()
finally:
    print(*sorted(ABSENT & {name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


@pytest.fixture
def site(record, monkeypatch) -> Path:
    """Return the run directory, on its own site."""
    monkeypatch.setenv("RAYCLOAK_HOME", str(record.folder.parent))
    return record.folder


@pytest.fixture(autouse=True)
def _keeps_stdout(monkeypatch):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)


def run(capfd, *arguments: object) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as ended:
        app.main([*map(str, arguments), "--json"])
    out, _ = capfd.readouterr()
    return ended.value.code, json.loads(out)


def _named(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")


def _closure(names: list[str]) -> set[str]:
    """Return distributions and all that they require, without extras."""
    found: set[str] = set()
    while names:
        name = _named(names.pop())
        if name not in found:
            found.add(name)
            # What another system or another Python needs is not installed here.
            with suppress(PackageNotFoundError):
                names += [each for each in requires(name) or () if "extra ==" not in each]
    return found


def test_a_site_writes_bundle_and_trust_file_and_an_auditor_verifies_them(site, record, tmp_path, capfd):
    code, trust = run(capfd, "trust", site, "--output", tmp_path / "trust.json")
    assert code == 0
    assert Trust.load(tmp_path / "trust.json") == record.trust
    assert trust["ledger"] == record.trust.ledger.hex()
    code, bundle = run(capfd, "bundle", site, "--output", tmp_path / "run.bundle")
    assert code == 0
    assert set(bundle["parts"]) == set(record.contents)
    for subject in (tmp_path / "run.bundle", site):
        code, report = run(capfd, "verify", subject, "--trust", tmp_path / "trust.json")
        assert (code, report["verified"]) == (0, True)
        assert report["not_covered"]


def test_a_claim_that_fails_is_exit_code_3_with_the_record(site, record, tmp_path, capfd):
    record.trust.save(tmp_path / "trust.json")
    run(capfd, "bundle", site, "--output", tmp_path / "run.bundle")
    content = (tmp_path / "run.bundle").read_bytes()
    (tmp_path / "run.bundle").write_bytes(content.replace(b'"kind":"committed"', b'"kind":"Committed"', 1))
    code, report = run(capfd, "verify", tmp_path / "run.bundle", "--trust", tmp_path / "trust.json")
    assert (code, report["verified"]) == (3, False)
    failed = {claim["claim"]: claim["says"] for claim in report["claims"] if claim["outcome"] == "FAILED"}
    assert "entry" in failed["evidence log"]
    assert failed["steps"] == "it rests on 'contract', which failed"


def test_a_run_is_verified_by_its_name_and_a_bundle_goes_before_a_run(site, record, tmp_path, capfd, monkeypatch):
    record.trust.save(tmp_path / "trust.json")
    (tmp_path / "runs").mkdir()
    # The state folder of these tests has its runs elsewhere.
    monkeypatch.setattr(run_list, "run_directories", lambda: [site])
    monkeypatch.chdir(tmp_path)
    for named in ("last", record.manifest.run_id[:6]):
        code, report = run(capfd, "verify", named, "--trust", "trust.json")
        assert (code, report["run_id"], report["verified"]) == (0, record.manifest.run_id, True)
    assert run(capfd, "verify", "nowhere", "--trust", "trust.json")[1]["error"]["code"] == "bundle_file"
    assert run(capfd, "verify", "runs/none", "--trust", "trust.json")[1]["error"]["code"] == "bundle_file"
    assert run(capfd, "verify", "runs", "--trust", "trust.json")[1]["error"]["code"] == "not_a_run"
    (tmp_path / "last").write_bytes(b"no bundle")
    assert run(capfd, "verify", "last", "--trust", "trust.json")[0] == 3


@pytest.mark.parametrize("content", [b"", b"{}", b"policy: x", b'{"format":"raycloak trust 1"}'])
def test_a_trust_file_that_is_none_is_exit_code_2(content, tmp_path, capfd):
    (tmp_path / "trust.json").write_bytes(content)
    code, error = run(capfd, "verify", tmp_path / "run.bundle", "--trust", tmp_path / "trust.json")
    assert (code, error["error"]["code"]) == (2, "trust_file")


def test_what_is_there_is_not_written_over(site, tmp_path, capfd):
    (tmp_path / "there").touch()
    for command, expected in (("trust", "trust_exists"), ("bundle", "bundle_exists")):
        code, error = run(capfd, command, site, "--output", tmp_path / "there")
        assert (code, error["error"]["code"]) == (2, expected)


def test_an_unfinished_run_says_what_it_lacks(site, tmp_path, capfd):
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    for name in ("run.json", "config.yaml", "manifest.json"):
        (unfinished / name).write_bytes((site / name).read_bytes())
    for command in ("trust", "bundle"):
        code, error = run(capfd, command, unfinished, "--output", tmp_path / "out")
        assert (code, error["error"]["code"]) == (2, "run_incomplete")


def test_a_run_that_is_under_way_or_was_killed_has_no_bundle_yet(site, record, tmp_path, capfd):
    """Its log may be older than what ledger and packages have by now."""
    copy = tmp_path / "run"
    shutil.copytree(site, copy)
    (copy / "run.json").write_bytes((copy / "run.json").read_bytes().replace(b'"done"', b'"running"'))
    record.trust.save(tmp_path / "trust.json")
    for arguments in (
        ("bundle", copy, "--output", tmp_path / "out"),
        ("verify", copy, "--trust", tmp_path / "trust.json"),
    ):
        code, error = run(capfd, *arguments)
        assert (code, error["error"]["code"]) == (2, "run_incomplete")


def _lines(path: Path) -> set[str]:
    return {line for line in path.read_text().splitlines() if not line.startswith("#")}


def test_one_command_installs_the_extra_and_all_that_it_requires_without_torch():
    pinned = _lines(ROOT / "deploy" / "verify-requirements.txt")
    assert pinned <= _lines(ROOT / "constraints.txt")
    names = {_named(each) for each in pinned}
    # Of what another system alone needs, constraints.txt has no version.
    known = {_named(each) for each in _lines(ROOT / "constraints.txt")}
    assert names == _closure([*EXTRA]) & known | {"opacus"}
    assert not {"torch", "ray"} & names
    assert f"$ {COMMAND}\n" in (ROOT / "docs" / "verify.md").read_text()
    assert f"#   {COMMAND}\n" in (ROOT / "deploy" / "verify-requirements.txt").read_text()


def test_a_bundle_is_verified_without_torch_and_ray_and_with_the_packages_of_the_list_alone(
    site, record, tmp_path, capfd
):
    """In a new interpreter in which no other package can be imported: neither torch nor Ray."""
    record.trust.save(tmp_path / "trust.json")
    run(capfd, "bundle", site, "--output", tmp_path / "run.bundle")
    allowed = {_named(each) for each in _lines(ROOT / "deploy" / "verify-requirements.txt")} | {"raycloak"}
    absent = {
        name
        for name, owners in packages_distributions().items()
        # What begins so belongs to the installation itself, which runs before any program.
        if not name.startswith("_") and not {_named(each) for each in owners} & allowed
    }
    assert {"torch", "ray", "sqlalchemy", "pyarrow", "sklearn", "grpc"} <= absent
    command = [sys.executable, "-c", GUARDED, ",".join(sorted(absent)), str(tmp_path / "run.bundle")]
    for is_there in (True, False):
        done = subprocess.run(
            [*command, "--trust", str(tmp_path / "trust.json"), "--json"],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=120,
            check=False,
        )
        said = json.loads(done.stdout)
        if is_there:
            assert done.returncode == 0, done.stderr
            assert said["verified"]
            assert done.stderr.split() == []
        else:
            assert (done.returncode, said["error"]["code"]) == (2, "bundle_file")
        (tmp_path / "run.bundle").unlink(missing_ok=True)


def test_the_record_of_one_run_names_no_other_run_and_no_place_on_the_site(record, other, both):
    for name, content in record.contents.items():
        assert other.manifest.run_id.encode() not in content, name
        if name != "verdict.json":
            assert str(record.folder).encode() not in content, name


def test_the_proof_reads_a_site_that_it_leaves_as_it_was(site, record: Proved, tmp_path, capfd):
    before = {path: path.stat().st_mtime_ns for path in site.iterdir()}
    record.trust.save(tmp_path / "trust.json")
    run(capfd, "verify", site, "--trust", tmp_path / "trust.json")
    assert {path: path.stat().st_mtime_ns for path in site.iterdir()} == before
