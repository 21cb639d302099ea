"""The map is true: every path and every name that `docs/architecture.md` mentions exists, and no room is missing.

Names are looked up in the source (AST); nothing is imported.
"""

import ast
import re
from functools import cache

from tests.layout import LAB, PACKAGES, ROOT, SOURCES

MAP = ROOT / "docs" / "architecture.md"
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MENTION = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)+/?|[\w-]+\.(md|py|toml|yaml)")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
WORDS = {
    "--run-secret",
    "__init__.py",
    "raycloak-lab",
    "raycloak.<folder>",
    "secret_retention: keep",
}
"""The words of the map in code style that are neither a path nor a name."""


def mentions(text):
    """Return the words in backticks outside of fenced blocks, each once, in order."""
    return list(dict.fromkeys(MENTION.findall(FENCE.sub("", text))))


MENTIONS = [word for word in mentions(MAP.read_text()) if word not in WORDS]


def test_the_map_mentions_only_what_exists():
    assert [word for word in MENTIONS if not exists(word)] == [], "neither a path nor a definition"


def exists(word):
    """Return whether the word is a path of the repository, or the end of a definition's full name."""
    if PATH.fullmatch(word) and (ROOT / word).exists():
        return True
    return bool(NAME.fullmatch(word)) and word in definitions()


@cache
def definitions():
    """Return every end of every full name: of ``raycloak.a.b.C.f`` also ``b.C.f``, ``C.f`` and ``f``."""
    found = set()
    for path in SOURCES:
        inside = path.relative_to(LAB.parent) if path.is_relative_to(LAB) else "raycloak" / path.relative_to(ROOT)
        module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
        for name in (module, *(f"{module}.{each}" for each in _defined(ast.parse(path.read_text()).body))):
            parts = name.split(".")
            found |= {".".join(parts[start:]) for start in range(len(parts))}
    return found


def _defined(statements):
    """Yield names of functions, classes and constants, and of what a class defines in its body."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            if isinstance(statement, ast.ClassDef):
                yield from (f"{statement.name}.{each}" for each in _defined(statement.body))
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def test_every_room_is_on_the_map():
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in SOURCES if path.name == "__init__.py"}
    assert rooms - set(PACKAGES) <= set(MENTIONS)


def test_the_check_sees_what_is_missing():
    assert mentions("`a/b.py`\n```\n`c`\n```\nand `D.e`, `a/b.py`") == ["a/b.py", "D.e"]
    assert exists("docs/architecture.md")
    assert exists("RaycloakError")
    assert exists("raycloak.metrics.errors.RaycloakError")
    assert not exists("docs/no_such_page.md")
    assert not exists("NoSuchClass")
    assert not exists("RaycloakError.no_such_method")
