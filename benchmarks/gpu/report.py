"""The sections of the check, run one after another within a budget, and the report that grows with them."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.place import Place


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one section.

    Attributes:
        figures: by name; numbers, texts, and dataclasses and mappings of these.
        faults: a sentence for each promise that does not hold here.
    """

    figures: Mapping[str, Any]
    faults: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the check.

    Attributes:
        needs_s: seconds that it may take, an estimate; with fewer left it is skipped.
        run: returns what it found; an error fails this section alone.
        needs_gpu: whether it is skipped where there is none.
    """

    name: str
    needs_s: float
    run: Callable[[], Found]
    needs_gpu: bool = False


@dataclass(slots=True)
class Report:
    """The results so far, in a file that is whole after every section.

    Args:
        path: of the file. place: that the figures are of.
        budget_s: seconds from now after which no section begins.
    """

    path: Path
    place: Place
    budget_s: float
    sections: dict[str, Any] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Return the seconds that are left of the budget."""
        return self.budget_s - (time.monotonic() - self._began)

    def add(self, section: Section) -> None:
        """Run a section, or skip it for want of a GPU or of time, and write the file."""
        began = time.monotonic()
        entry: dict[str, Any]
        if section.needs_gpu and not self.place.on_gpu:
            entry = {"skipped": "it needs a GPU, and torch finds none"}
        elif self.left_s() < section.needs_s:
            entry = {"skipped": f"{self.left_s():.0f} s are left, and it needs {section.needs_s:.0f}"}
        else:
            entry = _entry(section) | {"seconds": round(time.monotonic() - began, 2)}
        self.sections[section.name] = entry
        print(f"{section.name}: {_verdict(entry)}", file=sys.stderr, flush=True)
        self._write()

    @property
    def passed(self) -> bool:
        """Whether every section ran and found no fault."""
        return bool(self.sections) and all(_verdict(entry) == "passed" for entry in self.sections.values())

    def text(self) -> str:
        """Return the report as one line of JSON."""
        seconds = round(time.monotonic() - self._began, 1)
        whole = {"card": self.place.card, "passed": self.passed, "seconds": seconds, "sections": self.sections}
        return json.dumps(whole, default=_plain)

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A process that is killed while it writes leaves the file before.
        half = self.path.with_suffix(".half")
        half.write_text(self.text() + "\n", encoding="utf-8")
        half.replace(self.path)


def _entry(section: Section) -> dict[str, Any]:
    try:
        found = section.run()
    except Exception as error:  # noqa: BLE001 - the sections after it may still tell something
        return {"failed": f"{type(error).__name__}: {error}"[:600], "where": traceback.format_exc()[-1200:]}
    return {"figures": dict(found.figures), "faults": list(found.faults)}


def _verdict(entry: Mapping[str, Any]) -> str:
    if "figures" not in entry:
        return next(iter(entry))
    return "faults" if entry["faults"] else "passed"


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no part of a report")
