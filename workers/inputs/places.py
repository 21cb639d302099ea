"""Places of data: digests by which a dataset is known where nobody has a key, however its place is spelled.

Hides how places are spelled: links, relative paths, schemes, queries, patterns. A folder, a pattern and the files
themselves have the files' places in common. A function is known by the file that it was written in and its name there,
and not by another name that it was given, nor by the folder that it wrote.

Places are digests of paths, and say nothing of an example. Somebody who guesses a path can confirm it.
"""

import heapq
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any
from urllib.parse import unquote

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.data_marks import MOST_PLACES, PLACE_BYTES
from raycloak.workers.inputs.user_code import source_place

Places = frozenset[bytes]
NOWHERE: Places = frozenset()

MOST_FILE_PLACES = MOST_PLACES - 4
"""Room is left for the places that a configuration names."""

_SAME_SCHEMES = {"gcs": "gs", "abfss": "abfs"}


def path_place(path: str, base: Path | str) -> bytes:
    """Return the place that a path names, which need not exist: a file, a folder or a pattern, on disk or elsewhere.

    Args:
        base: folder that a relative path starts from.
    """
    scheme, _, rest = path.rpartition("://")
    if scheme.lower() in ("", "file"):
        return _place("path", os.path.realpath(Path(base) / (unquote(rest) if scheme else rest)))
    # Neither options, such as a region, nor credentials say where the data is.
    return _remote(scheme, unquote(rest.partition("?")[0].rpartition("@")[2]))


def file_places(paths: Iterable[Path]) -> Places:
    """Return places of files on disk: where each lies, and which one it is, whatever link it was found by."""
    # Many files of a dataset lie in one folder.
    folder_of = cache(os.path.realpath)
    return _least(each for path in paths for each in _of_file(path, folder_of))


def remote_places(scheme: str, paths: Iterable[str]) -> Places:
    """Return places of files elsewhere, such as ``bucket/key`` of the scheme ``s3``."""
    return _least(_remote(scheme, path) for path in paths)


def named_function(target: str, base: Path | str) -> bytes:
    """Return the place of ``module:function``, by its names; runs no code."""
    module, _, function = target.partition(":")
    return _place("function", source_place(target, base) or module, function)


def written_function(function: Callable[..., Any]) -> Places:
    """Return the place that a loaded function was written at; none if it has no name of its own there.

    A function under a second name has the place of the first.
    """
    written = inspect.unwrap(function)
    # What one function makes, a lambda, and a method of several objects share their name with others.
    if not isinstance(written, FunctionType) or "<" in written.__qualname__:
        return NOWHERE
    return frozenset({_place("function", os.path.realpath(written.__code__.co_filename), written.__qualname__)})


def part_place(kind: str, part: str) -> bytes:
    """Return the place of data that comes with a package: its kind, and which part of it."""
    return _place("part", kind, part)


def _of_file(path: Path, folder_of: Callable[[Path], str]) -> Iterator[bytes]:
    yield _place("path", os.path.realpath(path) if path.is_symlink() else f"{folder_of(path.parent)}/{path.name}")
    try:
        status = path.stat()
    except OSError:
        return  # Who opens it will say so.
    # With its time: the number of a file that was removed is soon another's.
    yield _place("file", status.st_dev, status.st_ino, str(status.st_mtime_ns))


def _remote(scheme: str, path: str) -> bytes:
    plain = "/".join(part for part in path.split("/") if part not in ("", "."))
    return _place("remote", _SAME_SCHEMES.get(scheme.lower(), scheme.lower()), plain)


def _least(places: Iterable[bytes]) -> Places:
    """Return the least of many places: of a set and a part of it, some of the part's are among both."""
    return frozenset(heapq.nsmallest(MOST_FILE_PLACES, places))


def _place(kind: str, *fields: str | int) -> bytes:
    return digest(length_prefixed("raycloak/data-place/v2", kind, *fields))[:PLACE_BYTES]
