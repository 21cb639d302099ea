"""A bundle has a digest of all its files, and a process that took one imports nothing else of the user's."""

import inspect
import py_compile
import shutil
import sys
from pathlib import Path

import pytest

from raycloak.metrics.errors import ConfigError, EvidenceError
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.inputs.user_code import only_from, require_module, resolve, source_digest

pytestmark = pytest.mark.usefixtures("own_imports")

FILES = {
    "bundled_net.py": "import bundled_help\ndef f(): return bundled_help.VALUE\n",
    "bundled_help.py": "VALUE = 7\n",
    "bundled_parts/__init__.py": "from .inner import VALUE\ndef f(): return VALUE\n",
    "bundled_parts/inner.py": "VALUE = 8\n",
    "bundled_loose/late.py": "VALUE = 9\n",
    "bundled_later.py": "def f():\n    from bundled_loose.late import VALUE\n    return VALUE\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def code(function, *arguments) -> str:
    with pytest.raises((ConfigError, EvidenceError)) as caught:
        function(*arguments)
    return caught.value.code


def test_guarantee_another_content_name_or_number_of_files_gives_another_digest(project: Path) -> None:
    found = {CodeBundle.read(project).digest}
    for name, text in (("bundled_help.py", "VALUE = 8\n"), ("bundled_parts/more.py", ""), ("extra.py", "")):
        (project / name).write_text(text)
        found.add(CodeBundle.read(project).digest)
    (project / "extra.py").rename(project / "other.py")
    found.add(CodeBundle.read(project).digest)
    (project / "other.py").unlink()
    (project / "bundled_help.py").unlink()
    found.add(CodeBundle.read(project).digest)
    assert len(found) == 6
    # Not even by where one file ends and the next begins.
    assert CodeBundle(project, {"a.py": b"b.py"}).digest != CodeBundle(project, {"a.py": b"", "b.py": b""}).digest


def test_the_digest_is_that_of_a_copy_elsewhere_whatever_else_lies_there(project: Path, tmp_path_factory) -> None:
    copy = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(project, copy)
    (copy / "data.csv").write_text("1,2\n")
    for name in (
        ".venv/lib.py",
        ".venv/lib.so",
        "my-notes/a.py",
        "__pycache__/bundled_net.cpython-311.pyc",
        "run-1.py",
    ):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(b"\0")
    assert CodeBundle.read(copy).files == {name: text.encode() for name, text in sorted(FILES.items())}
    assert CodeBundle.read(copy).digest == CodeBundle.read(project).digest


@pytest.mark.parametrize("name", ["fast.so", "fast.pyc", "fast.cpython-311-x86_64-linux-gnu.so", "inner/fast.abi3.so"])
def test_a_compiled_module_is_refused(project: Path, name: str) -> None:
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_bytes(b"\0")
    assert code(CodeBundle.read, project) == "code_compiled"


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert code(CodeBundle.read, tmp_path / "absent") == "code_unreadable"


def test_guarantee_a_file_that_changes_on_disk_after_it_was_read_changes_nothing(project: Path) -> None:
    """Neither a module that is named, nor one that it imports at once or when it is called, nor a cache of Python's."""
    only_from(CodeBundle.read(project))
    named = source_digest("bundled_net:f", project)
    evil = project / "evil.py"
    evil.write_text("def f(): return 'evil'\n")
    for name in ("bundled_net.py", "bundled_parts/__init__.py", "bundled_loose/late.py"):
        (project / name).write_text("VALUE = 'evil'\ndef f(): return VALUE\n")
        kept = project / name
        py_compile.compile(str(kept), doraise=True)
    for name in ("bundled_later.py", "bundled_help.py"):
        (project / name).unlink()
    function = resolve("bundled_net:f", project)
    assert function() == 7
    assert inspect.getsource(function) == "def f(): return bundled_help.VALUE\n"
    assert resolve("bundled_parts:f", project)() == 8
    assert resolve("bundled_later:f", project)() == 9
    assert source_digest("bundled_net:f", project) == named
    assert code(resolve, "evil:f", project) == "code_unlisted"


def test_guarantee_no_function_is_found_outside_the_bundle(project: Path, tmp_path_factory, monkeypatch) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "planted.py").write_text("def f(): return 'evil'\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.chdir(project)
    (project / "bundled_tries.py").write_text("def f():\n    import planted\n    return planted.f()\n")
    only_from(CodeBundle.read(project))
    for target in ("planted:f", "os:getcwd", "raycloak:fix", "tests.models:small_model", "bundled_loose:f"):
        assert code(resolve, target, project) == code(require_module, target, elsewhere) == "code_unlisted"
    # Nor by an import: what is neither the bundle's nor installed is not there.
    with pytest.raises(ModuleNotFoundError):
        resolve("bundled_tries:f", project)()
    require_module("bundled_net:f", project)


def test_a_name_that_an_installed_module_or_one_in_use_has_is_refused(project: Path) -> None:
    for name in ("json.py", "sys.py", "antigravity.py", "pip/__init__.py", "numpy/more.py"):
        taken = CodeBundle(project, {"fine.py": b"", name: b""})
        assert code(only_from, taken) == "code_name"


def test_a_process_takes_one_bundle(project: Path) -> None:
    first = CodeBundle.read(project)
    only_from(first)
    only_from(CodeBundle.read(project))
    (project / "bundled_help.py").write_text("VALUE = 8\n")
    assert code(only_from, CodeBundle.read(project)) == "code_unlisted"
    assert sum(type(each).__name__ == "_Finder" for each in sys.meta_path) == 1
