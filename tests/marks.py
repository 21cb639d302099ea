"""The marks of a test: which it has, as `marks.txt` records, and what a test without one may cost.

A line of the record is a mark and a folder, a file or a test. A test has the marks of every line that its place is
below. `make test-fast` runs the tests that have none. They stay a fast loop because CI fails one that costs more than
`LIMIT_S`: processor time and not time on the clock, so that a busy machine fails nothing.
"""

import importlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("marks.txt")
MEANINGS = {
    "ray": "needs a Ray cluster",
    "process": "starts a process",
    "server": "starts a server",
    "slow": "takes more than half a second of processor time",
}
LIMIT_S = 1.0
"""Twice what `slow` means, so that a slower machine fails no test."""
LATE_IMPORTS = ("dp_accounting.pld", "dp_accounting.rdp", "opacus.accountants", "scipy.optimize", "sklearn.datasets")
"""What raycloak imports when it is first used; the test that happens to be first is not to pay for it."""


def recorded(record: Path = RECORD) -> dict[str, list[str]]:
    """Return the marks of each recorded place.

    Raises:
        pytest.UsageError: a line is not one of the marks and a place.
    """
    marks = defaultdict(list)
    for number, line in enumerate(record.read_text().splitlines(), 1):
        match line.partition("#")[0].split():
            case []:
                pass
            case [mark, place] if mark in MEANINGS:
                marks[place].append(mark)
            case _:
                raise pytest.UsageError(f"{record.name}:{number}: expected one of {', '.join(MEANINGS)} and a place")
    return dict(marks)


def marks_of(test: str, record: Mapping[str, list[str]]) -> set[str]:
    """Return the marks of a test, by its id without parameters: those of its folders, its file and its own."""
    ends = [index for index in range(len(test)) if test[index] == "/" or test.startswith("::", index)]
    return {mark for end in (*ends, len(test)) for mark in record.get(test[:end], ())}


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks; in CI, hold the tests that have none to the limit."""
    for mark, meaning in MEANINGS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")
    if os.environ.get("CI"):
        config.pluginmanager.register(Limit())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test, before ``-m`` selects some."""
    record = recorded()
    for item in items:
        for mark in marks_of(item.nodeid.partition("[")[0], record):
            item.add_marker(mark)


class Limit:
    """Fails an unmarked test whose setup and call cost more than `LIMIT_S`; shared fixtures are not its cost."""

    def __init__(self) -> None:
        self._begun = self._shared = 0.0

    def pytest_collection_finish(self) -> None:
        for name in LATE_IMPORTS:
            importlib.import_module(name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._begun, self._shared = processor_s(), 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        begun, shared = processor_s(), self._shared
        result = yield
        if fixturedef.scope != "function":
            # Also what the fixtures cost that this one asked for.
            self._shared = shared + processor_s() - begun
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        spent = processor_s() - self._begun - self._shared
        if spent > LIMIT_S and not MEANINGS.keys() & {mark.name for mark in item.iter_markers()}:
            pytest.fail(
                f"it took {spent:.1f} s of processor time: make it cheaper, or record it in {RECORD.name}",
                pytrace=False,
            )
        return result


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])
