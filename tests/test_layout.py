"""The four plain package names: a shadowed one is named, and every way of installing keeps them together.

``-S`` keeps the environment's own installation of raycloak out of a child's way.
"""

import shutil
import zipfile
from pathlib import Path

import pytest

from raycloak_layout import PACKAGES

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", PACKAGES)
def test_a_users_file_that_shadows_a_package_is_named_with_ours(name, run_python):
    sibling = next(package for package in PACKAGES if package != name)
    users = run_python.folder / f"{name}.py"
    users.write_text("answer = 42\n")
    (run_python.folder / "script.py").write_text(f"import {sibling}\n")
    done = run_python("script.py")
    assert done.code == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("raycloak_layout.PackageShadowedError: ")
    assert str(users) in last
    assert str(ROOT / name / "__init__.py") in last
    assert "Rename your own" in last


def test_a_package_that_the_script_imported_first_is_named_too(run_python):
    users = run_python.folder / "metrics.py"
    users.write_text("")
    done = run_python("-c", "import metrics, attestation")
    assert "PackageShadowedError" in done.stderr
    assert str(users) in done.stderr


def test_a_missing_package_is_named(tmp_path, run_python):
    installed = _copy(tmp_path / "site")
    shutil.rmtree(installed / "workers")
    done = run_python("-S", "-c", "import metrics", path=installed)
    assert "import of 'workers' finds no file" in done.stderr


def test_an_unrelated_file_shadows_nothing(run_python):
    (run_python.folder / "my_metrics.py").write_text("")
    assert run_python("-c", "import attestation, coordinator, metrics, workers").code == 0


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the distribution is built from, so that building leaves nothing in the repository."""
    folder = _copy(tmp_path_factory.mktemp("source"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_an_installed_distribution_imports_its_own_packages(hook, source, tmp_path, run_python):
    wheel = _build(hook, source, tmp_path, run_python)
    site = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    expected = source if hook == "build_editable" else site
    code = (
        f"import site; site.addsitedir({str(site)!r})\n"
        "import attestation, coordinator, metrics, workers, raycloak_layout\n"
        "for package in (attestation, coordinator, metrics, workers, raycloak_layout): print(package.__file__)"
    )
    done = run_python("-S", "-c", code, path=tmp_path)
    assert done.code == 0, done.stderr
    assert {Path(line).is_relative_to(expected) for line in done.stdout.splitlines()} == {True}


def test_a_wheel_carries_the_dashboards_and_the_command(source, tmp_path, run_python):
    with zipfile.ZipFile(_build("build_wheel", source, tmp_path, run_python)) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "raycloak = raycloak.coordinator.__main__:main" in archive.read(entry_points).decode()
    dashboards = {f"metrics/dashboards/{path.name}" for path in (ROOT / "metrics" / "dashboards").glob("*.json")}
    assert dashboards <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "examples/", "benchmarks/"))]


def _copy(folder):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for module in ROOT.glob("*.py"):
        shutil.copy(module, folder)
    return folder


def _build(hook, source, tmp_path, run_python):
    build = f"import os, setuptools.build_meta as b; os.chdir({str(source)!r}); b.{hook}({str(tmp_path)!r})"
    done = run_python("-c", build, path=tmp_path)
    assert done.code == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    return wheel
