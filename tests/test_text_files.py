"""Text files are UTF-8, whatever the locale of a machine says: each place that opens one names the encoding.

Without a name Python takes the locale's, and the same file is other text on another machine.
"""

import ast

import pytest

from tests.layout import ROOT, SOURCES

SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
PATHS = {"read_text": 0, "write_text": 1}
"""Methods of a path that handle text, and the place of their encoding among positional arguments."""
WRAPPERS = ("TextIOWrapper", "FileHandler")
TEXT_MODE = set("rwaxt+")


def without_encoding(source):
    """Return the lines of the calls that open or decode text in the encoding of the locale."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sorted(call.lineno for call in calls if _opens_text(call) and not _names_encoding(call))


def _opens_text(call):
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in PATHS:
        return len(call.args) <= PATHS[name]
    if name in WRAPPERS:
        return True
    if name == "open":
        is_method = isinstance(call.func, ast.Attribute)
        # A method `open` of our own takes no mode.
        return _mode_is_text(call, place=0, default=False) if is_method else _mode_is_text(call, place=1, default=True)
    if name == "fdopen":
        return _mode_is_text(call, place=1, default=True)
    if name in ("NamedTemporaryFile", "TemporaryFile"):
        return _mode_is_text(call, place=0, default=False)
    asked = [each.value for each in call.keywords if each.arg in ("text", "universal_newlines")]
    return any(isinstance(value, ast.Constant) and value.value is True for value in asked)


def _mode_is_text(call, place, default):
    given = call.args[place : place + 1] + [each.value for each in call.keywords if each.arg == "mode"]
    if not given:
        return default
    texts = [
        node.value for node in ast.walk(given[0]) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return any(text and set(text) <= TEXT_MODE for text in texts)


def _names_encoding(call):
    return any(keyword.arg == "encoding" for keyword in call.keywords)


def test_every_text_file_is_opened_as_utf8():
    found = {path: without_encoding(path.read_text(encoding="utf-8")) for path in (*SOURCES, *SCRIPTS)}
    assert {str(path.relative_to(ROOT)): lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "path.read_text()",
        "path.write_text(text)",
        "path.write_text(text, newline='')",
        "open(name)",
        "open(name, 'w')",
        "open(name, 'r' if reads else 'w')",
        "path.open('a')",
        "os.fdopen(descriptor, 'w')",
        "io.TextIOWrapper(raw)",
        "logging.FileHandler(path)",
        "tempfile.NamedTemporaryFile('w+')",
        "subprocess.run(command, text=True)",
    ],
)
def test_the_check_sees(source):
    assert without_encoding(source) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "path.read_text(encoding='utf-8')",
        "path.read_text('utf-8')",
        "path.read_bytes()",
        "open(name, 'rb')",
        "path.open('xb')",
        "package.open(info)",
        "part.open()",
        "Piece(text=text)",
        "os.open(name, os.O_RDONLY)",
        "os.fdopen(descriptor, 'rb')",
        "tempfile.TemporaryFile()",
        "subprocess.run(command, encoding='utf-8')",
    ],
)
def test_the_check_allows(source):
    assert without_encoding(source) == []
