"""User code is found by one rule, leaves `sys.path` as it was, and its source has a digest."""

import sys
from pathlib import Path

import pytest

from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.user_code import portable_base, resolve, source_digest


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


def test_a_relative_base_starts_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "net.py").write_text("def f(): return 5\n")
    monkeypatch.chdir(tmp_path)
    base = portable_base(tmp_path / "examples")
    assert base == "examples"
    assert portable_base(tmp_path) == "."
    assert resolve("net:f", base)() == 5
    assert Path(portable_base(tmp_path.parent)).is_absolute()


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
    assert "ModuleNotFoundError" in refused("broken:f", tmp_path)
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
