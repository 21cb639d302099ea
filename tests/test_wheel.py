"""`make sbom`: the same wheels and the same bills of materials, wherever and whenever a commit is built."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from raycloak.version import VERSION
from tests.layout import ROOT
from tests.mutations import Copy
from tests.sbom import installed, pinned

COMMITTED = (2024, 2, 3, 4, 5, 6)
WHEELS = [f"{name}-{VERSION}-py3-none-any.whl" for name in ("raycloak", "raycloak_lab")]
SBOMS = ["raycloak.cdx.json", "image.cdx.json"]
GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_AUTHOR_DATE": "2024-02-03T04:05:06Z",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_COMMITTER_DATE": "2024-02-03T04:05:06Z",
}


def run(*command, cwd, umask=0o022, **environment):
    done = subprocess.run(
        command, cwd=cwd, umask=umask, env=os.environ | GIT | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return dist/ of two builds of one commit, which differ in all that a commit does not say."""
    folder = tmp_path_factory.mktemp("wheels")
    first, second = folder / "first", folder / "another" / "place"
    Copy(first)
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        run("git", *command, cwd=first)
    run("git", "clone", "--quiet", first, second, cwd=folder, umask=0o077)
    (second / "metrics" / "stray.py").write_text("")
    (second / "build").mkdir()
    make = ["make", "sbom", f"BIN={Path(sys.executable).parent}", "INSTALLED="]
    run(*make, cwd=first, PYTHONHASHSEED="1", TZ="UTC")
    run(*make, cwd=second, PYTHONHASHSEED="2", TZ="Asia/Tokyo", umask=0o077)
    return first / "dist", second / "dist"


@pytest.fixture(params=SBOMS)
def sbom(request, built):
    return json.loads((built[0] / request.param).read_text())


def test_guarantee_two_builds_of_a_commit_have_the_same_digests(built):
    first, second = ({path.name: path.read_bytes() for path in dist.iterdir()} for dist in built)
    assert sorted(first) == sorted([*WHEELS, *SBOMS, "SHA256SUMS"])
    assert [name for name in first if first[name] != second[name]] == []


def test_the_digests_are_those_of_the_wheels(built):
    expected = [f"{hashlib.sha256((built[0] / name).read_bytes()).hexdigest()}  {name}" for name in WHEELS]
    assert (built[0] / "SHA256SUMS").read_text().splitlines() == expected


@pytest.mark.parametrize("name", WHEELS)
def test_neither_the_clock_nor_the_umask_nor_zlib_is_in_a_wheel(name, built):
    """Two builds within two seconds, or by one zlib, would not show them."""
    with zipfile.ZipFile(built[0] / name) as archive:
        assert {each.date_time for each in archive.infolist()} == {COMMITTED}
        assert {each.external_attr >> 16 & 0o777 for each in archive.infolist()} <= {0o644, 0o664}
        assert {each.compress_type for each in archive.infolist()} == {zipfile.ZIP_STORED}


def test_an_sbom_is_valid_and_of_the_wheel(sbom, built):
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(sbom)) is None
    described = sbom["metadata"]["component"]
    digest = hashlib.sha256((built[0] / WHEELS[0]).read_bytes()).hexdigest()
    assert (described["name"], described["version"]) == ("raycloak", VERSION)
    assert described["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert sbom["metadata"]["timestamp"] == "2024-02-03T04:05:06+00:00"


def needed(requirements, extra=""):
    """Return the names of requirements that hold here and have a version in constraints.txt."""
    parsed = [Requirement(each) for each in requirements or ()]
    held = [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {canonicalize_name(each.name) for each in held} & pinned().keys()


def test_guarantee_an_sbom_has_every_pinned_package_that_the_wheel_requires(sbom, request):
    versions = {each["name"]: each["version"] for each in sbom["components"]}
    assert versions.items() <= pinned().items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_image = [each for extra in ("hf", "otel") for each in project["optional-dependencies"][extra]]
    is_image = "image" in request.node.callspec.params["sbom"]
    direct = needed(project["dependencies"] + of_image * is_image)
    assert direct <= versions.keys()
    # A package of another that has an extra in brackets.
    assert {"ray", "aiohttp-cors"} <= versions.keys()
    assert ("transformers" in versions) == is_image
    assert not {"pytest", "mypy"} & versions.keys()
    edges = {each["ref"]: set(each.get("dependsOn", ())) for each in sbom["dependencies"]}
    assert edges.keys() == {each["bom-ref"] for each in (*sbom["components"], sbom["metadata"]["component"])}
    assert {ref.split("/")[1].split("@")[0] for ref in edges[f"pkg:pypi/raycloak@{VERSION}"]} == direct
    for name, version in versions.items():
        asked = {f"pkg:pypi/{each}@{pinned()[each]}" for each in needed(requires(name))}
        assert asked <= edges[f"pkg:pypi/{name}@{version}"], name


def test_an_environment_of_other_versions_makes_no_sbom():
    assert installed("torch", pinned()["torch"])
    with pytest.raises(ValueError, match="pinned at 0"):
        installed("numpy", "0")
    with pytest.raises(ValueError, match="is not installed"):
        installed("no-such-package", "0")


def test_the_sbom_of_the_image_is_of_the_extras_that_the_image_has():
    (named,) = re.findall(r"\.whl\[([\w,]+)\]", (ROOT / "deploy" / "Dockerfile").read_text())
    (asked,) = re.findall(r"raycloak-\*\.whl ([\w ]+) >", (ROOT / "Makefile").read_text())
    assert named.split(",") == asked.split()
