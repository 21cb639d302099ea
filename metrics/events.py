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
    privacy: PrivacyClass


_DECLARED: Mapping[tuple[type[str] | type[int] | type[float], PrivacyClass], str] = {
    (str, _INDEPENDENT): (
        "event run account evidence_class privacy exactness code cause role member execution manifest_digest query "
        "value_name"
    ),
    (int, _INDEPENDENT): (
        "step steps steps_planned attempt attempts workers workers_refused virtual_workers virtual_workers_moved "
        "parameters masked_bytes ring_bits release"
    ),
    (float, _INDEPENDENT): (
        "noise_multiplier sample_rate epsilon_planned epsilon_cap delta learning_rate noise_deviation"
    ),
    (float, _PHYSICAL): (
        "time seconds charge_seconds roster_seconds compute_seconds reduce_seconds commit_seconds evaluate_seconds "
        "copy_seconds model_seconds sums_seconds words_seconds masks_seconds out_seconds"
    ),
    (str, _RELEASED): "model_digest",
    (float, _RELEASED): "value epsilon epsilon_one_worker evaluation_accuracy evaluation_loss",
    # Declared so that these names stay reserved: the writer refuses them.
    (float, _SECRET): "loss accuracy gradient_norm clipped_ratio",
    (int, _SECRET): "examples",
}
"""By type and privacy class, the names of fields."""

FIELDS = tuple(
    EventField(name, kind, privacy) for (kind, privacy), names in _DECLARED.items() for name in names.split()
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
        # A driver that was killed may have left half a line, which would spoil the next one. Byte by byte from the
        # end: a line is short, and most files end with a whole one.
        end = keep = self._file.seek(0, os.SEEK_END)
        while keep and self._file.seek(keep - 1) >= 0 and self._file.read(1) != b"\n":
            keep -= 1
        if keep != end:
            self._file.truncate(keep)

    def write(self, event: str, **fields: Value) -> None:
        """Append ``{"event": event, "time": now, **fields}``; a field that is None is left out.

        Raises:
            RefusedError: ``event_field`` for an undeclared field, ``event_secret`` for a secret one. ``event_value``
                for a value of another type, text that is not an identifier, or a number that is not finite. Nothing is
                written then.
        """
        line: dict[str, Value] = {"event": event, "time": round(self._clock(), 6)}
        for name, value in line.items():
            _check_value(FIELD_BY_NAME[name], value)
        for name, value in fields.items():
            check_field(name, value)
            if value is not None:
                line[name] = value
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
    """Require that a value may leave the run under this name, in a line or a span; None may under any that is shown.

    Raises:
        RefusedError: as :meth:`EventWriter.write`.
    """
    field = FIELD_BY_NAME.get(name)
    if field is None or name in ("event", "time"):
        raise RefusedError("event_field", f"'{name}' is not a declared field of an event")
    if not field.privacy.exportable:
        raise RefusedError("event_secret", f"'{name}' depends on private examples and is never written")
    if value is not None:
        _check_value(field, value)


def _check_value(field: EventField, value: Value) -> None:
    fits, description = _KINDS[field.kind]
    if not fits(value):
        raise RefusedError("event_value", f"the value of '{field.name}' is not a {description}")


def _is_whole_number(value: Value) -> bool:
    # To Python a bool is an int.
    return isinstance(value, int) and not isinstance(value, bool)


_KINDS: Mapping[type, tuple[Callable[[Value], bool], str]] = {
    str: (lambda value: isinstance(value, str) and is_identifier(value), "name, code or digest"),
    int: (_is_whole_number, "whole number"),
    float: (
        lambda value: _is_whole_number(value) or (isinstance(value, float) and math.isfinite(value)),
        "finite number",
    ),
}
