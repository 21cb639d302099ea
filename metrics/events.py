"""The events of a run in metrics.jsonl, one JSON object per line, and the fields of events and spans.

Fields are declared with their privacy class, like series. Text values are identifiers and digests only, so a line
never carries a message that was composed from private data.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from raycloak.metrics.errors import RefusedError
from raycloak.metrics.file_errors import file_error
from raycloak.metrics.privacy_class import PrivacyClass
from raycloak.metrics.registry import is_identifier

Value = str | int | float | None
_INDEPENDENT, _PHYSICAL = PrivacyClass.DATA_INDEPENDENT, PrivacyClass.PHYSICAL
_RELEASED, _SECRET = PrivacyClass.RELEASED, PrivacyClass.SECRET


@dataclass(frozen=True)
class EventField:
    """A declared field of a line.

    Args:
        name: key in the JSON object; seconds end in ``seconds`` and bytes in ``bytes``.
        kind: type of its value; a float field takes integers too.
        privacy: the class of what the value may depend on.
    """

    name: str
    kind: type[str] | type[int] | type[float]
    privacy: PrivacyClass = _INDEPENDENT


FIELDS = (
    EventField("event", str),
    EventField("time", float, _PHYSICAL),
    EventField("run", str),
    EventField("account", str),
    EventField("evidence_class", str),
    EventField("privacy", str),
    EventField("exactness", str),
    EventField("step", int),
    EventField("steps", int),
    EventField("steps_planned", int),
    EventField("attempt", int),
    EventField("attempts", int),
    EventField("workers", int),
    EventField("workers_refused", int),
    EventField("virtual_workers", int),
    EventField("virtual_workers_moved", int),
    EventField("parameters", int),
    EventField("noise_multiplier", float),
    EventField("sample_rate", float),
    EventField("epsilon_planned", float),
    EventField("epsilon_cap", float),
    EventField("delta", float),
    EventField("learning_rate", float),
    EventField("masked_bytes", int),
    EventField("ring_bits", int),
    EventField("seconds", float, _PHYSICAL),
    EventField("charge_seconds", float, _PHYSICAL),
    EventField("roster_seconds", float, _PHYSICAL),
    EventField("compute_seconds", float, _PHYSICAL),
    EventField("mask_seconds", float, _PHYSICAL),
    EventField("reduce_seconds", float, _PHYSICAL),
    EventField("commit_seconds", float, _PHYSICAL),
    EventField("evaluate_seconds", float, _PHYSICAL),
    EventField("code", str),
    EventField("cause", str),
    EventField("role", str),
    EventField("member", str),
    EventField("execution", str),
    EventField("manifest_digest", str),
    EventField("query", str),
    EventField("release", int),
    EventField("value_name", str),
    EventField("noise_deviation", float),
    EventField("value", float, _RELEASED),
    EventField("model_digest", str, _RELEASED),
    EventField("epsilon", float, _RELEASED),
    EventField("epsilon_one_worker", float, _RELEASED),
    EventField("evaluation_accuracy", float, _RELEASED),
    EventField("evaluation_loss", float, _RELEASED),
    # Declared so that these names stay reserved: the writer refuses them.
    EventField("loss", float, _SECRET),
    EventField("accuracy", float, _SECRET),
    EventField("examples", int, _SECRET),
    EventField("gradient_norm", float, _SECRET),
    EventField("clipped_ratio", float, _SECRET),
)
FIELD_BY_NAME = {field.name: field for field in FIELDS}


class EventWriter:
    """Appends lines to a file; each is flushed to the operating system before :meth:`write` returns.

    Guarantee: a line holds declared fields of the classes that may be shown, and nothing else.

    A last line that an earlier process left unfinished is cut off, so every line of the file parses.

    Args:
        path: the file; created if absent, its directory must exist.
        clock: Unix time in seconds.

    Raises:
        ConfigError: ``events_file`` if the file cannot be opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise file_error("events_file", "append to", path, error) from None
        # A driver that was killed may have left half a line, which would spoil the next one.
        _cut_unfinished_line(self._file)

    def write(self, event: str, **fields: Value) -> None:
        """Append ``{"event": event, "time": now, **fields}``; a field that is None is left out.

        Raises:
            RefusedError: ``event_field`` for an undeclared field, ``event_secret`` for a secret one. ``event_value``
                for a value of another type, text that is not an identifier, or a number that is not finite. Nothing is
                written then.
        """
        line: dict[str, Value] = {"event": event, "time": round(self._clock(), 6)}
        line |= {name: value for name, value in fields.items() if value is not None}
        for name in fields:
            _check_name(name)
        for name, value in line.items():
            _check_value(FIELD_BY_NAME[name], value)
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        # At once, so that a reader beside the run sees each event, and a killed driver loses none.
        self._file.flush()

    def close(self) -> None:
        """Close the file; repeating it does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_field(name: str, value: Value) -> None:
    """Require that a value may leave the run under this name, in a line or a span.

    Raises:
        RefusedError: as :meth:`EventWriter.write`.
    """
    _check_name(name)
    _check_value(FIELD_BY_NAME[name], value)


def _check_name(name: str) -> None:
    field = FIELD_BY_NAME.get(name)
    if field is None or name in ("event", "time"):
        raise RefusedError("event_field", f"'{name}' is not a declared field of an event")
    if not field.privacy.exportable:
        raise RefusedError("event_secret", f"'{name}' depends on private examples and is never written")


def _check_value(field: EventField, value: Value) -> None:
    fits, description = _KINDS[field.kind]
    if not fits(value):
        raise RefusedError("event_value", f"the value of '{field.name}' is not a {description}")


def _is_name(value: Value) -> bool:
    return isinstance(value, str) and is_identifier(value)


def _is_whole_number(value: Value) -> bool:
    # To Python a bool is an int.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite_number(value: Value) -> bool:
    return _is_whole_number(value) or (isinstance(value, float) and math.isfinite(value))


_KINDS: Mapping[type, tuple[Callable[[Value], bool], str]] = {
    str: (_is_name, "name, code or digest"),
    int: (_is_whole_number, "whole number"),
    float: (_is_finite_number, "finite number"),
}


def _cut_unfinished_line(file: BinaryIO) -> None:
    # Byte by byte from the end: a line is short, and most files end with a whole one.
    end = keep = file.seek(0, os.SEEK_END)
    while keep and file.seek(keep - 1) >= 0 and file.read(1) != b"\n":
        keep -= 1
    if keep != end:
        file.truncate(keep)
