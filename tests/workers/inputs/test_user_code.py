"""User code is found by one rule, leaves `sys.path` as it was, and its source has a digest."""

import sys
import sysconfig
from pathlib import Path

import pytest

from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.user_code import (
    UNPACKED,
    find_in,
    own_folders,
    portable_base,
    resolve,
    source_digest,
    unexecuted_digest,
)


def refused(target: str, base: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(target, base)
    assert caught.value.code == "module_function"
    return caught.value.message


def test_a_file_beside_the_config_comes_before_an_installed_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def dumps(): return 'mine'\n")
    assert resolve("json:dumps", tmp_path)() == "mine"
    assert resolve("json:dumps", tmp_path / "elsewhere")([1]) == "[1]"


def test_dots_are_folders_and_packages_are_found(tmp_path: Path) -> None:
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "inner" / "net.py").write_text("def f(): return 1\n")
    (tmp_path / "inner" / "deep" / "__init__.py").write_text("def f(): return 2\n")
    assert resolve("inner.net:f", tmp_path)() == 1
    assert resolve("inner.deep:f", tmp_path)() == 2


def test_a_file_may_import_its_neighbours_and_nothing_stays_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_user.py").write_text("VALUE = 7\n")
    (tmp_path / "user.py").write_text("import neighbour_of_user\ndef f(): return neighbour_of_user.VALUE\n")
    before = list(sys.path)
    assert resolve("user:f", tmp_path)() == 7
    assert sys.path == before
    assert "user" not in sys.modules


def test_a_changed_file_is_loaded_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("def f(): return 1\n")
    first = resolve("net:f", tmp_path)
    assert resolve("net:f", tmp_path) is first
    path.write_text("def f(): return 2\n")
    assert resolve("net:f", tmp_path)() == 2


def test_a_base_is_relative_in_a_jobs_copy_and_absolute_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node has a copy of its own; where nothing was copied, a worker starts in any folder."""
    copied = tmp_path / UNPACKED / "package"
    (copied / "examples").mkdir(parents=True)
    (copied / "examples" / "net.py").write_text("def f(): return 5\n")
    monkeypatch.chdir(copied)
    base = portable_base(Path("examples"))
    assert base == "examples"
    assert portable_base(copied) == "."
    assert resolve("net:f", base)() == 5
    assert portable_base(tmp_path) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert portable_base(Path()) == str(tmp_path)


@pytest.mark.parametrize("target", ["net", "net:", ":f", "net:f:g", "../net:f", "a..b:f", "net:f()", ""])
def test_another_form_is_refused(target: str, tmp_path: Path) -> None:
    assert "module:function" in refused(target, tmp_path)


def test_what_is_missing_or_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("value = 3\n")
    (tmp_path / "broken.py").write_text("import no_such_thing_anywhere\n")
    (tmp_path / "raises.py").write_text("float('Jane Doe, private')\n")
    assert "no_such_module_here" in refused("no_such_module_here:f", tmp_path)
    assert "no callable 'value'" in refused("net:value", tmp_path)
    assert "no callable 'g'" in refused("net:g", tmp_path)
    assert "broken imports 'no_such_thing_anywhere'" in refused("broken:f", tmp_path)
    told = refused("raises:f", tmp_path)
    assert "ValueError" in told
    assert "Jane" not in told
    failed = str(tmp_path / "raises.py")
    assert not any(getattr(module, "__file__", None) == failed for module in list(sys.modules.values()))


def test_the_source_digest_of_a_name_covers_its_file_and_what_that_imports(tmp_path: Path) -> None:
    """Guarantee: code that the run executes from the config's folder cannot change under one digest."""
    (tmp_path / "parts").mkdir()
    files = {
        "net.py": "import helper\nfrom parts import block\ndef f(): return helper.WIDTH\n",
        "helper.py": "WIDTH = 1\ndef late():\n    import deep\n    return deep\n",
        "deep.py": "DEPTH = 2\n",
        "parts/__init__.py": "",
        "parts/block.py": "from . import inner\nfrom .inner import SIZE\n",
        "parts/inner.py": "SIZE = 3\n",
        "unrelated.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = source_digest("net:f", tmp_path)
    assert source_digest("net:f", tmp_path) == before
    changed = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "# changed\n")
        changed[name] = source_digest("net:f", tmp_path) != before
        (tmp_path / name).write_text(text)
    assert changed == {name: name != "unrelated.py" for name in files}
    assert source_digest("os:getcwd", tmp_path) == source_digest("os:getcwd", tmp_path / "parts")
    with pytest.raises(ConfigError):
        source_digest("net:g", tmp_path)


def test_the_source_digest_of_a_callable_covers_its_text_and_what_it_closes_over() -> None:
    def maker(width: int):
        def build() -> int:
            return width

        return build

    def other() -> int:
        return 1

    def with_default(width: int = 3) -> int:
        return width

    digests = [source_digest(each, ".") for each in (maker(1), maker(2), other, with_default, len)]
    assert len(set(digests)) == len(digests)
    assert source_digest(maker(1), ".") == digests[0]
    assert source_digest(other, ".") == digests[2]


def test_guarantee_a_module_that_is_missing_is_named_only_if_the_code_itself_names_it(tmp_path: Path) -> None:
    (tmp_path / "private.py").write_text("raise ModuleNotFoundError('no Jane_Doe', name='Jane_Doe')\n")
    assert "Jane" not in refused("private:f", tmp_path)
    (tmp_path / "computed.py").write_text("import importlib\nimportlib.import_module('Jane_' + 'Doe')\n")
    assert "Jane" not in refused("computed:f", tmp_path)
    # Through a neighbour, and inside a function.
    (tmp_path / "outer.py").write_text("import neighbour_with_gap\n")
    (tmp_path / "neighbour_with_gap.py").write_text("def g():\n    import missing_one_here\ng()\n")
    assert "outer imports 'missing_one_here'" in refused("outer:f", tmp_path)


def test_folders_of_the_drivers_own_are_those_beside_what_is_installed(tmp_path: Path, monkeypatch) -> None:
    installed = [Path(path) for path in sysconfig.get_paths().values()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "none"), *map(str, installed)])
    assert own_folders() == (str(tmp_path.resolve()),)


def test_a_folder_that_is_added_shadows_nothing(tmp_path: Path, monkeypatch) -> None:
    before = ["first", "second"]
    monkeypatch.setattr(sys, "path", list(before))
    find_in((str(tmp_path), "/nowhere", "first"))
    assert sys.path == [*before, str(tmp_path)]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return installed packages: a regular one, two halves of a namespace, and a distribution of modules."""
    folder = tmp_path / "lib" / "site-packages"
    files = {
        "rc_nets/__init__.py": "raise SystemExit('no digest imports it')\n",
        "rc_nets/zoo/__init__.py": "",
        "rc_nets/zoo/small.py": "def net(): return 1\n",
        "rc_nets/layers.py": "WIDTH = 1\n",
        "rc_nets/weights/table.bin": "0123",
        "rc_nets/__pycache__/layers.cpython-311.pyc": "cache",
        "rc_space/one/__init__.py": "",
        "rc_space/one/net.py": "def net(): return 1\n",
        "rc_space/two/__init__.py": "",
        "rc_single.py": "import rc_beside\ndef net(): return 1\n",
        "rc_beside.py": "WIDTH = 1\n",
        "rc_single-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: rc-single\nVersion: 1\n",
        "rc_single-1.dist-info/RECORD": "rc_single.py,,\nrc_beside.py,,\nrc_single-1.dist-info/METADATA,,\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize(
    ("target", "covered"),
    [
        (
            "rc_nets.zoo.small:net",
            {
                "rc_nets/__init__.py",
                "rc_nets/zoo/__init__.py",
                "rc_nets/zoo/small.py",
                "rc_nets/layers.py",
                "rc_nets/weights/table.bin",
            },
        ),
        ("rc_space.one.net:net", {"rc_space/one/__init__.py", "rc_space/one/net.py"}),
        ("rc_single:net", {"rc_single.py", "rc_beside.py"}),
    ],
)
def test_guarantee_the_digest_of_installed_code_covers_every_file_of_its_package(
    target: str, covered: set[str], site: Path, tmp_path: Path
) -> None:
    """Nothing of the package is executed, and what lies beside it changes nothing."""
    before = unexecuted_digest(target, tmp_path)
    assert unexecuted_digest(target, tmp_path / "elsewhere") == before
    changed = set()
    for path in (each for each in site.rglob("*") if each.is_file() and "dist-info" not in each.parent.name):
        text = path.read_text()
        path.write_text(text + "\n# changed")
        if unexecuted_digest(target, tmp_path) != before:
            changed.add(path.relative_to(site).as_posix())
        path.write_text(text)
    assert changed == covered
    (site / max(covered)).with_name("one_more").touch()
    assert (unexecuted_digest(target, tmp_path) == before) is (target == "rc_single:net")


def test_a_source_folder_on_the_path_is_covered_as_far_as_the_module_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    files = {"rc_own.py": "import rc_layers\ndef net(): return 1\n", "rc_layers.py": "WIDTH = 1\n", "rc_other.py": ""}
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    before, called = source_digest("rc_own:net", tmp_path), resolve("rc_own:net", tmp_path)
    callable_before = source_digest(called, tmp_path)
    changed = {}
    for name, text in files.items():
        (folder / name).write_text(text + "# changed\n")
        changed[name] = (
            unexecuted_digest("rc_own:net", tmp_path) != before,
            source_digest(called, tmp_path) != callable_before,
        )
        (folder / name).write_text(text)
    assert changed == {"rc_own.py": (True, True), "rc_layers.py": (True, True), "rc_other.py": (False, False)}


@pytest.mark.parametrize("module", ["sys", "rc_absent", "json.rc_absent", "rc_nets.absent", "rc_space"])
def test_code_without_a_file_has_no_digest(module: str, site: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no module"):
        unexecuted_digest(f"{module}:f", tmp_path)
