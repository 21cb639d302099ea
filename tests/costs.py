"""What each test file costs: ``python -m tests.costs [PLACE...]``, or ``make test-profile``.

Processor seconds, not seconds on the clock, since a busy machine and a wait change only those. They are of pytest's
process and of all that it started: the import of the file, its tests, and the fixtures that it was the first to need.

With places, such as ``tests/workers``, only their lines of the record are replaced.
"""

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "test-profile.json"
TICKS_IN_S = os.sysconf("SC_CLK_TCK")
LOOK_S = 0.5
"""A look at some hundred processes takes some milliseconds; a process that ends loses what it did since the last."""


class Processes:
    """This process and all its descendants.

    Linux adds the time of a process that ended to that of the one that waited for it. Nobody waits for the workers of
    a raylet. So a thread looks again and again, and remembers what those had that are gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[int, int] = {}
        self._lost = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.spent_s()

    def spent_s(self) -> float:
        """Return the processor seconds of all of them so far."""
        with self._lock:
            names, parents, ticks = _process_table()
            found, new = set[int](), {os.getpid()}
            while new:
                found |= new
                new = {pid for pid, parent in parents.items() if parent in new} - found
            self._lost += sum(spent for pid, spent in self._workers.items() if pid not in found)
            self._workers = {pid: ticks[pid] for pid in found if names.get(parents[pid]) == "raylet"}
            return (self._lost + sum(ticks[pid] for pid in found)) / TICKS_IN_S


def _process_table() -> tuple[dict[int, str], dict[int, int], dict[int, int]]:
    """Return name, parent and ticks of each process; the ticks with those of children that it waited for."""
    names, parents, ticks = {}, {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            pid, (name, _, rest) = int(folder.name), (folder / "stat").read_text().partition("(")[2].rpartition(")")
            # proc(5) counts the state, the first after the name, as the third field.
            fields = rest.split()
            names[pid], parents[pid], ticks[pid] = name, int(fields[1]), sum(map(int, fields[11:15]))
    return names, parents, ticks


class Costs:
    """A plugin that adds up what each file costs, in `seconds`."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._processes = Processes()
        self._last = self._processes.spent_s()

    def pytest_unconfigure(self) -> None:
        self._processes.close()

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
        now = self._processes.spent_s()
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
        unknown = sum(str(path.relative_to(ROOT)) not in files for path in (ROOT / "tests").rglob("test_*.py"))
        total = round(sum(files.values()))
        whole = {
            "command": "make test-profile",
            "processor_seconds": total,
            "files_not_measured": unknown,
            "files": files,
        }
        RECORD.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
