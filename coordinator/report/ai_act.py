"""Technical documentation of a run along Articles 10, 13 and 15 and Annex IV of Regulation (EU) 2024/1689.

Every statement is a sentence of ``templates/ai_act.yaml`` whose figures are looked up in the record, and names each
file and field that it took one from. A statement whose record is missing is left out. What no record can say is a blank
for the operator.

Assumes nothing about whether the Regulation applies; it is no conformity assessment.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import yaml

from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.record.run_reader import RunData
from raycloak.coordinator.report.members import Evidence

_REQUIREMENTS: Final = Path(__file__).parent / "templates" / "ai_act.yaml"
_FIELD: Final = re.compile(r"\{(.+?)\}")
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class RecordField:
    """A field of the record.

    Attributes:
        number: by which documents refer to it, from 1.
        shown: its value as text.
    """

    number: int
    file: str
    field: str
    shown: str


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence from the record, and where each of its figures stands."""

    text: str
    sources: tuple[RecordField, ...]


@dataclass(frozen=True, slots=True)
class Duty:
    """One requirement: its place in the Regulation, what it asks for, what the record says, what the operator adds."""

    place: str
    asks: str
    statements: tuple[Statement, ...]
    blank: str


@dataclass(frozen=True, slots=True)
class Chapter:
    """An article or a point of the annex."""

    title: str
    duties: tuple[Duty, ...]


@dataclass(frozen=True, slots=True)
class Documentation:
    """All chapters, and every record that a statement names, in the order of its number."""

    chapters: tuple[Chapter, ...]
    sources: tuple[RecordField, ...]


def documentation_of(run: RunData, evidence: Evidence) -> Documentation:
    """Return the documentation of a run."""
    index = _RecordIndex(run, evidence)
    chapters = tuple(
        Chapter(chapter["title"], tuple(_duty(index, **asked) for asked in chapter["duties"]))
        for chapter in yaml.safe_load(_REQUIREMENTS.read_text(encoding="utf-8"))
    )
    return Documentation(chapters, tuple(index.cited.values()))


class _RecordIndex:
    """The fields of one run by file and name, written ``FILE:path.to.field``. Files of lines are counted.

    Attributes:
        cited: every field that was cited so far, in the order of their numbers.
    """

    def __init__(self, run: RunData, evidence: Evidence) -> None:
        kinds = Counter(str(event["event"]) for event in run.events)
        self._files: dict[str, Any] = {
            "run.json": run.record.model_dump(mode="json"),
            "config.yaml": run.config.model_dump(mode="json"),
            "verdict.json": run.verdict,
            "measurements.json": {each.query: each.model_dump(mode="json") for each in run.released},
            "metrics.jsonl": {
                "events": len(run.events),
                **{kind: kinds[kind] for kind in ("step", "departure", "join", "restart")},
                "repeated": sum(event["attempts"] > 1 for event in run.steps),
                "resumed": max(0, kinds["admitted"] - 1),
            },
        }
        if run.manifest is not None:
            self._files["manifest.json"] = run.manifest.model_dump() | {"digest": run.manifest.digest()}
        if not evidence.problem:
            members, refusals = len(evidence.members), evidence.refused
            self._files["evidence.jsonl"] = {"entries": evidence.entries, "members": members, "refusals": refusals}
        self.cited: dict[str, RecordField] = {}

    def value(self, record: str) -> Any:
        """Return the value of a field, None for one that its object lacks; `_ABSENT` if there is no such object."""
        file, _, path = record.partition(":")
        value = self._files.get(file)
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else _ABSENT
        return value

    def cite(self, record: str) -> RecordField:
        """Return the field as a source, under the number that it keeps."""
        if record not in self.cited:
            file, _, path = record.partition(":")
            value = self.value(record)
            # An epsilon is rounded up, so that no claim is better than the truth.
            text = epsilon_text(value) if isinstance(value, float) and "epsilon" in path else shown(value)
            self.cited[record] = RecordField(len(self.cited) + 1, file, path, text)
        return self.cited[record]


def _duty(index: _RecordIndex, place: str, asks: str, blank: str, says: Iterable[Any] = ()) -> Duty:
    """Answer a requirement; sentences that several of them share are a list of their own."""
    sentences = chain.from_iterable(each if isinstance(each, list) else [each] for each in says)
    said = (_stated(index, **each) for each in sentences)
    return Duty(place, asks, tuple(each for each in said if each is not None), blank)


def _stated(
    index: _RecordIndex, text: str, where: tuple[str, object] | None = None, unless: tuple[str, object] | None = None
) -> Statement | None:
    """Return a sentence for a run. One without figures has the field of its condition as its source."""
    if where is not None and index.value(where[0]) != where[1]:
        return None
    if unless is not None and index.value(unless[0]) == unless[1]:
        return None
    records = _FIELD.findall(text)
    if any(index.value(each) in (_ABSENT, None, "", b"") for each in records):
        return None
    if where is not None and not records:
        records = [where[0]]
    sources = tuple(index.cite(each) for each in records)
    return Statement(_FIELD.sub(lambda found: index.cite(found[1]).shown, text), sources)


def shown(value: Any) -> str:
    """Return a value for a reader; a number keeps the digits that its record has, up to six."""
    match value:
        case None | "" | b"":
            return "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.6g}"
        case bytes():
            return value.hex()
        case Mapping():
            return ", ".join(f"{name.removeprefix('count_')}: {shown(each)}" for name, each in value.items())
        case list() | tuple():
            return ", ".join(map(shown, value))
    return str(value)
