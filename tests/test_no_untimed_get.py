"""Nothing waits for Ray without a deadline: a stopped process would hang the run for ever."""

import ast
import re

import pytest

from tests.layout import ROOT, SOURCES

WAITING = {"get", "wait"}


def untimed(source):
    """Return the lines of `ray.get` and `ray.wait` without a timeout, or under a name that hides them."""
    return sorted(node.lineno for node in ast.walk(ast.parse(source)) if _hides(node) or _waits_for_ever(node))


def _hides(node):
    if isinstance(node, ast.ImportFrom):
        return node.module == "ray" and any(alias.name in WAITING for alias in node.names)
    return isinstance(node, ast.Import) and any(alias.name == "ray" and alias.asname for alias in node.names)


def _waits_for_ever(node):
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value
    if not (isinstance(owner, ast.Name) and owner.id == "ray" and node.func.attr in WAITING):
        return False
    given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
    return not given or (isinstance(given[0], ast.Constant) and given[0].value is None)


def test_every_wait_has_a_deadline():
    # To parse the others would take most of the time.
    sources = {path: source for path in SOURCES if re.search(r"\bray\b", source := path.read_text())}
    found = {path: untimed(source) for path, source in sources.items()}
    assert {str(path.relative_to(ROOT)): lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "ray.get(ref)",
        "x = [ray.get(r) for r in refs]",
        "ray.get(ref, timeout=None)",
        "ray.wait(refs, num_returns=2)",
        "from ray import get",
        "import ray as r",
    ],
)
def test_the_check_sees(source):
    assert untimed(source) == [1]


@pytest.mark.parametrize("source", ["ray.get(ref, timeout=3.0)", "ray.wait(refs, timeout=d)", "table.get(key)"])
def test_the_check_allows(source):
    assert untimed(source) == []
