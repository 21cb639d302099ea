"""Reads what Weights & Biases wrote offline: records of protobuf in the log format of LevelDB."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as messages

BLOCK, HEADER = 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Yield every record of a ``.wandb`` file."""
    data, part = path.read_bytes(), b""
    place = 7  # after the file's own header
    while place + HEADER.size <= len(data):
        if (left := BLOCK - place % BLOCK) < HEADER.size:
            place += left
            continue
        _, length, kind = HEADER.unpack_from(data, place)
        place += HEADER.size + length
        part += data[place - length : place]
        if kind in (WHOLE, LAST):
            yield messages.Record.FromString(part)
            part = b""


def items(updates: Any) -> dict[str, Any]:
    """Return the values of a history, summary or configuration by name."""
    return {".".join(each.nested_key) or each.key: json.loads(each.value_json) for each in updates}
