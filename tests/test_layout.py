"""One import name: a user's own files shadow nothing, and every way of installing keeps the packages together.

``-S`` keeps the environment's own installation of raycloak out of a child's way.
"""

import ast
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from raycloak.version import VERSION
from tests.layout import LAB, PACKAGES, ROOT, SOURCES

IMPORT_ALL = f"import raycloak, {', '.join(f'raycloak.{package}' for package in PACKAGES)}"


def test_a_script_beside_files_of_all_four_names_imports_ours(run_python):
    """A module, a package and a folder without `__init__.py` each beside the script, and each takes a turn."""
    for name in PACKAGES:
        (run_python.folder / f"{name}.py").write_text("raise SystemExit('the user\\'s own file was imported')\n")
        (run_python.folder / name).mkdir()
        (run_python.folder / name / "__init__.py").write_text(
            "raise SystemExit('the user\\'s own package was imported')\n"
        )
    script = run_python.folder / "script.py"
    script.write_text(
        f"{IMPORT_ALL}\n"
        "from raycloak import RunConfig, PrivacyLedger, EvidenceOrchestrator, TrainWorker, MaskedAggregator, Trainer\n"
        "print(RunConfig.__module__)\n"
    )
    done = run_python("script.py")
    assert (done.code, done.stdout.strip()) == (0, "raycloak.coordinator.config.run"), done.stderr


def test_no_import_names_a_package_by_its_folder_alone():
    """A second import name would make a second module of the same file."""
    files = [path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (*SOURCES, *files)
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imported(node)
        if name.split(".")[0] in PACKAGES
    ]
    assert bare == []


def test_every_module_says_what_it_is_for():
    first = {path: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0] for path in SOURCES}
    assert [str(path) for path, line in first.items() if len(line.split()) < 3 and "_pb2" not in path.name] == []


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a copy of what the distribution is built from, so that building leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("source")
    for package in (*PACKAGES, "raycloak"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, symlinks=True, ignore=ignored)
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
        f"import site, sys; site.addsitedir({str(site)!r})\n{IMPORT_ALL}\n"
        "for name in [name for name in sys.modules if name.startswith('raycloak')]: print(sys.modules[name].__file__)"
    )
    done = run_python("-S", "-c", code, path=tmp_path)
    assert done.code == 0, done.stderr
    assert {Path(line).is_relative_to(expected) for line in done.stdout.splitlines()} == {True}


def test_a_wheel_and_a_source_distribution_carry_every_package_and_its_data(source, tmp_path, run_python):
    with zipfile.ZipFile(_build("build_wheel", source, tmp_path, run_python)) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "raycloak = raycloak.__main__:main" in archive.read(entry_points).decode()
    data = [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".json", ".md", ".pem", ".proto", ".py", ".pyi", ".yaml"}
    ]
    expected = {f"raycloak/{path.relative_to(ROOT)}" for path in data}
    assert expected <= names
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"raycloak"}
    with tarfile.open(_build("build_sdist", source, tmp_path / "sdist", run_python)) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        assert expected <= packed
        assert not [each.name for each in archive.getmembers() if each.issym()]


def test_the_wheel_beside_it_carries_its_packages_and_their_data_and_names_the_same_version(tmp_path, run_python):
    copy = tmp_path / "lab"
    shutil.copytree(LAB.parent, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    with zipfile.ZipFile(_build("build_wheel", copy, tmp_path / "wheel", run_python)) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (described,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = archive.read(described).decode()
    assert names == {
        path.relative_to(LAB.parent).as_posix()
        for path in LAB.rglob("*")
        if path.suffix in {".json", ".proto", ".py", ".pyi", ".yml"}
    }
    assert f"\nVersion: {VERSION}\n" in metadata
    assert f"\nRequires-Dist: raycloak=={VERSION}\n" in metadata


def _build(hook, source, target, run_python):
    target.mkdir(exist_ok=True)
    build = f"import os, setuptools.build_meta as b; os.chdir({str(source)!r}); b.{hook}({str(target)!r})"
    done = run_python("-c", build, path=target)
    assert done.code == 0, done.stderr
    (made,) = [*target.glob("*.whl"), *target.glob("*.tar.gz")]
    return made
