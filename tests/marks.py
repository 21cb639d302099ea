"""The marks of a test: which it has, as `marks.txt` records, and what a test without one may cost.

A line of the record is a mark and a folder, a file or a test. A test has the marks of every line that its place is
below. `make test-fast` runs the tests that have none. They stay a fast loop because CI fails one that costs more than
`LIMIT_S`: processor time and not time on the clock, so that a busy machine fails nothing.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

RECORD = Path(__file__).with_name("marks.txt")
MEANINGS = {
    "ray": "needs a Ray cluster",
    "process": "starts a process",
    "server": "starts a server",
    "slow": "takes half a second of processor time, or its file several seconds",
}
LIMIT_S = 2.0
"""Four times what makes one test slow, so that a slower machine, or one whose cores others share, fails no other."""


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
    """Return the marks of a test, by its id without parameters: its own, and the marks of its folders and its file."""
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


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


class Limit:
    """A plugin that fails an unmarked test whose setup and call cost more than `LIMIT_S` twice in a row.

    Shared fixtures are not its cost. Nor is what only the first test pays that needs it, such as a late import: that is
    why a test above the limit is run again.

    Args:
        clock: processor time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = processor_s) -> None:
        self._clock = clock
        self._begun = self._shared = 0.0
        self._exceeded = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._exceeded = False
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if self._exceeded:
            item._initrequest()  # fixtures are set up anew
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._begun, self._shared = self._clock(), 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        begun, shared = self._clock(), self._shared
        result = yield
        if fixturedef.scope != "function":
            # Also what the fixtures cost that this one asked for.
            self._shared = shared + self._clock() - begun
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        spent = self._clock() - self._begun - self._shared
        if spent > LIMIT_S and not MEANINGS.keys() & {mark.name for mark in item.iter_markers()}:
            self._exceeded = True
            pytest.fail(
                f"it took {spent:.1f} s of processor time: make it cheaper, or record it in {RECORD.name}",
                pytrace=False,
            )
        return result
