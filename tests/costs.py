"""What each test file costs: ``python -m tests.costs [PLACE...]``, or ``make test-profile``.

Processor seconds, not seconds on the clock, since a busy machine and a wait change only those. They are of pytest's
process and of all that it started: the import of the file, its tests, and the fixtures that it was the first to need.
A process that nobody waits for is counted until the last test of a file that it lived through.

With places, such as ``tests/workers``, only their lines of the record are replaced.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "test-profile.json"
TICKS_IN_S = os.sysconf("SC_CLK_TCK")


def spent_s() -> float:
    """Return the processor seconds of this process and of all its descendants, whether they run or were waited for."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            # After the name, which may hold anything. proc(5) counts the state as the third field.
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    found, new = set[int](), {os.getpid()}
    while new:
        found |= new
        new = {pid for pid, parent in parents.items() if parent in new} - found
    return sum(ticks.get(pid, 0) for pid in found) / TICKS_IN_S


class Costs:
    """A plugin that adds up what each file costs, in `seconds`."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._last = spent_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        result = yield
        if isinstance(collector, pytest.Module):
            self._add(collector.nodeid)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        result = yield
        # To look at all processes takes some milliseconds.
        if nextitem is None or nextitem.path != item.path:
            self._add(item.nodeid.partition("::")[0])
        return result

    def _add(self, file: str) -> None:
        now = spent_s()
        self.seconds[file] += max(now - self._last, 0.0)
        self._last = now


def merged(record: Mapping[str, float], new: Mapping[str, float], places: Sequence[str]) -> dict[str, float]:
    """Return the record with all files at ``places`` replaced by the ``new`` ones, the most expensive first."""
    kept = {
        file: seconds
        for file, seconds in record.items()
        if (ROOT / file).is_file() and not any(Path(file).is_relative_to(place) for place in places)
    }
    both = {**kept, **{file: round(seconds, 1) for file, seconds in new.items()}}
    return dict(sorted(both.items(), key=lambda each: (-each[1], each[0])))


def main() -> int:
    """Run the tests, and write the record if they pass."""
    places = sys.argv[1:] or ["tests"]
    costs = Costs()
    code = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *places], plugins=[costs])
    if code == 0:
        known = json.loads(RECORD.read_text(encoding="utf-8"))["files"] if RECORD.is_file() else {}
        files = merged(known, costs.seconds, places)
        whole = {"command": "make test-profile", "processor_seconds": round(sum(files.values())), "files": files}
        RECORD.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
