"""Reads what Weights & Biases wrote offline: records of protobuf in the log format of LevelDB."""

import json
import struct
import time
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
        if place > len(data):
            return  # still being written
        part += data[place - length : place]
        if kind in (WHOLE, LAST):
            yield messages.Record.FromString(part)
            part = b""


def finished(path: Path, deadline_s: float = 60.0) -> list[Any]:
    """Return every record of a file, once its writer, which is another process, has come to the end."""
    deadline = time.monotonic() + deadline_s
    while not ((found := list(records(path))) and found[-1].HasField("exit")):
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.02)
    return found


def items(updates: Any) -> dict[str, Any]:
    """Return the values of a history, summary or configuration by name."""
    return {".".join(each.nested_key) or each.key: json.loads(each.value_json) for each in updates}
