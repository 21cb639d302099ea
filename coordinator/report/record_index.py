"""The record of a run by file and field, with a number for each field that a document names.

A field is written ``FILE:path.to.field``. Files of lines, which have no fields, are counted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.record.run_reader import RunData
from raycloak.coordinator.report.members import Evidence


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

    @property
    def anchor(self) -> str:
        """Its name as an anchor of a page."""
        return f"record-{self.number}"


class RecordIndex:
    """The fields of one run, and those that were cited so far."""

    def __init__(self, run: RunData, evidence: Evidence) -> None:
        self._files: dict[str, Any] = {
            "run.json": run.record.model_dump(mode="json"),
            "config.yaml": run.config.model_dump(mode="json"),
            "verdict.json": run.verdict,
            "measurements.json": {each.query: each.model_dump(mode="json") for each in run.released},
            "metrics.jsonl": _counted(run),
        }
        if run.manifest is not None:
            self._files["manifest.json"] = run.manifest.model_dump() | {"digest": run.manifest.digest()}
        if not evidence.problem:
            refusals = sum(each.count for each in evidence.refusals)
            counts = {"entries": evidence.entries, "members": len(evidence.members), "refusals": refusals}
            self._files["evidence.jsonl"] = counts
        self._cited: dict[str, RecordField] = {}

    @property
    def cited(self) -> tuple[RecordField, ...]:
        """Every field that was cited, in the order of their numbers."""
        return tuple(self._cited.values())

    def value(self, record: str) -> Any:
        """Return the value at ``FILE:path.to.field``; KeyError if the record has no such field."""
        file, _, path = record.partition(":")
        value = self._files[file]
        for name in path.split("."):
            if not isinstance(value, Mapping):
                raise KeyError(record)
            value = value[name]
        return value

    def has(self, record: str) -> bool:
        """Return whether the record has the field, whatever it holds."""
        try:
            self.value(record)
        except KeyError:
            return False
        return True

    def states(self, record: str) -> bool:
        """Return whether the field holds something: neither None nor an empty text."""
        return self.has(record) and self.value(record) not in (None, "", b"")

    def cite(self, record: str) -> RecordField:
        """Return the field as a source, under the number that it keeps."""
        if record not in self._cited:
            file, _, path = record.partition(":")
            self._cited[record] = RecordField(len(self._cited) + 1, file, path, _field_text(path, self.value(record)))
        return self._cited[record]


def _counted(run: RunData) -> dict[str, int]:
    kinds = Counter(str(event["event"]) for event in run.events)
    return {
        "events": len(run.events),
        **{kind: kinds[kind] for kind in ("step", "departure", "join", "restart")},
        "repeated": sum(event["attempts"] > 1 for event in run.steps),
        "resumed": max(0, kinds["admitted"] - 1),
    }


def _field_text(path: str, value: Any) -> str:
    # An epsilon is rounded up, so that no claim is better than the truth.
    return epsilon_text(value) if isinstance(value, float) and "epsilon" in path else shown(value)


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
