"""The storage of packages: a local folder, or a prefix of an S3 bucket.

Guarantee: a package exists as a whole or not at all. On a local disk it is written to a hidden folder, synced and
renamed. On S3 its ``manifest.sig`` is written last, and a prefix without one is not a package. An existing package is
never written to again: another package of the same step gets a name of its own. Not guaranteed: that no other party
writes there. Verify before use.
"""

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from pyarrow import fs
from pyarrow.lib import ArrowException

from raycloak.attestation.core.secret_urls import secret_in
from raycloak.attestation.files.whole import sync
from raycloak.coordinator.config import home
from raycloak.metrics.errors import ConfigError

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
RUN_MANIFEST = "manifest.run.json"

STORAGE_ERRORS = (OSError, ArrowException)
"""The errors that reading and writing raise if the storage fails."""

_NAME = re.compile(r"step-(\d{6,})(?:-(\d+))?\.tssp")
_DRAFT = ".draft-"


def storage_of(storage: str | None, run_id: str, base: Path) -> str:
    """Return the place of a run's packages. A storage that runs share has a folder per run."""
    if storage is None:
        return str(home.packages_folder(run_id))
    shared = storage if "://" in storage else str(base / storage)
    # Before the query of a URL, which stays at the end.
    return located(shared, run_id)


class PackageSource(Protocol):
    """Packages that can be read, by name: a storage, or one package in one file."""

    def files(self, name: str) -> Mapping[str, int]:
        """Return the size in bytes of everything in a package, by relative path; -1 for anything but a file."""
        ...

    def reader(self, name: str, file: str) -> AbstractContextManager[Any]:
        """Open a binary stream over a file of a package."""
        ...


class PackageStorage:
    """The packages below one folder or prefix. Every method may raise ``STORAGE_ERRORS``.

    Args:
        filesystem: local or S3.
        root: path in it.
    """

    def __init__(self, filesystem: fs.FileSystem, root: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._is_local = isinstance(filesystem, fs.LocalFileSystem)

    @classmethod
    def open(cls, location: str) -> Self:
        """Open the storage at a path or ``s3://bucket/prefix``. An S3 URL may carry pyarrow's options as its query.

        Raises:
            ConfigError: ``storage`` if the location is neither, or the bucket does not answer; ``url_secret`` if it has
                a key, which the error does not repeat.
        """
        if "://" not in location:
            return cls(fs.LocalFileSystem(), str(Path(location).expanduser().absolute()))
        if (found := secret_in(location)) is not None:
            raise ConfigError("url_secret", "the storage's URL holds a secret.", f"{found[0].upper()}{found[1:]}.")
        if not re.match(r"s3://[^/?]", location):
            raise ConfigError(
                "storage", f"{location} is neither a path nor s3://bucket/prefix.", "Write it as one of the two."
            )
        try:
            return cls(*fs.FileSystem.from_uri(location))
        except (*STORAGE_ERRORS, ValueError) as error:
            raise ConfigError(
                "storage", f"cannot use {location}: {one_line(error)}.", "Check bucket, region and credentials."
            ) from None

    def names(self) -> tuple[str, ...]:
        """Return the names of all packages, by ascending step."""
        return tuple(sorted((name for name in self._folders() if self._is_complete(name)), key=package_order))

    def files(self, name: str) -> Mapping[str, int]:
        """Return the size in bytes of everything in a package, by relative path; -1 for anything but a file."""
        folder = f"{self._root}/{name}"
        selector = fs.FileSelector(folder, allow_not_found=True, recursive=True)
        found = self._filesystem.get_file_info(selector)
        return {info.path.removeprefix(f"{folder}/"): info.size if info.is_file else -1 for info in found}

    @contextmanager
    def reader(self, name: str, file: str) -> Iterator[Any]:
        """Open a binary stream over a file of a package."""
        with self._filesystem.open_input_stream(f"{self._root}/{name}/{file}") as stream:
            yield stream

    def draft(self, step: int) -> "Draft":
        """Begin a package of ``step``, which nobody sees yet."""
        if self._is_local:
            return LocalDraft(self._filesystem, self._root, step)
        taken = self._folders()
        name = next(name for name in _free_names(step) if name not in taken)
        return Draft(self._filesystem, f"{self._root}/{name}")

    def delete(self, name: str) -> None:
        """Remove a package. It disappears as a whole."""
        folder = f"{self._root}/{name}"
        if self._is_local:
            # Renamed first, so that the package disappears as a whole.
            hidden = f"{self._root}/{_DRAFT}{secrets.token_hex(8)}"
            Path(folder).rename(hidden)
            folder = hidden
        else:
            # Without its signature it is not a package any more.
            self._filesystem.delete_file(f"{folder}/{SIGNATURE}")
        self._filesystem.delete_dir(folder)

    def sweep(self) -> None:
        """Remove the unfinished work of a writer that died. There must be no other writer."""
        for name in self._folders():
            if name.startswith(_DRAFT) or (_NAME.fullmatch(name) and not self._is_complete(name)):
                self._filesystem.delete_dir(f"{self._root}/{name}")

    def _folders(self) -> set[str]:
        selector = fs.FileSelector(self._root, allow_not_found=True)
        return {info.base_name for info in self._filesystem.get_file_info(selector) if not info.is_file}

    def _is_complete(self, name: str) -> bool:
        if not _NAME.fullmatch(name):
            return False
        return bool(self._filesystem.get_file_info(f"{self._root}/{name}/{SIGNATURE}").is_file)


class Draft:
    """A package that is still being written: objects at their final place, until ``manifest.sig`` exists.

    Args:
        folder: the folder of its files; its last part is the package's name.
    """

    def __init__(self, filesystem: fs.FileSystem, folder: str) -> None:
        self._filesystem = filesystem
        self._folder = folder

    @contextmanager
    def sink(self, file: str) -> Iterator[Any]:
        """Open a binary stream into a new file, which is durable when the block ends."""
        with self._filesystem.open_output_stream(f"{self._folder}/{file}") as stream:
            yield stream

    def publish(self, files: Mapping[str, bytes]) -> str:
        """Add the last ``files`` in their order, let the package appear, and return its name."""
        for file, content in files.items():
            with self.sink(file) as sink:
                sink.write(content)
        return self._appear()

    def discard(self) -> None:
        """Remove the files written so far."""
        self._filesystem.delete_dir(self._folder)

    def _appear(self) -> str:
        """Let the package appear; return its name."""
        return self._folder.rpartition("/")[2]


class LocalDraft(Draft):
    """A draft in a hidden folder, which is renamed when it is whole."""

    def __init__(self, filesystem: fs.FileSystem, root: str, step: int) -> None:
        super().__init__(filesystem, f"{root}/{_DRAFT}{secrets.token_hex(8)}")
        self._root, self._step = Path(root), step
        Path(self._folder).mkdir(mode=0o700, parents=True)

    @contextmanager
    def sink(self, file: str) -> Iterator[Any]:
        with super().sink(file) as stream:
            yield stream
        sync(Path(self._folder, file))

    def _appear(self) -> str:
        # The draft is whole on disk before it gets its name, and the name is on disk before it counts.
        sync(Path(self._folder))
        for name in _free_names(self._step):
            try:
                Path(self._folder).rename(self._root / name)
            except OSError:
                # Another package has this name, or the rename failed for good.
                if not (self._root / name).exists():
                    raise
                continue
            sync(self._root)
            return name
        raise AssertionError("unreachable: the names do not end")


def split_location(location: str) -> tuple[str, str]:
    """Split the location of a package into storage and name. The query of an S3 URL stays with the storage."""
    path, mark, query = location.partition("?") if "://" in location else (location, "", "")
    storage, _, name = path.rstrip("/").rpartition("/")
    return (storage or ".") + mark + query, name


def located(storage: str, name: str) -> str:
    """Return the location of ``name`` in a storage, which :func:`split_location` splits again."""
    path, mark, query = storage.partition("?") if "://" in storage else (storage, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def is_package(location: str) -> bool:
    """Return whether a location is that of a package: the last part is a package's name, or it is a file."""
    return is_name(split_location(location)[1]) or ("://" not in location and Path(location).is_file())


def is_name(name: str) -> bool:
    """Return whether ``name`` is one that packages have."""
    return _NAME.fullmatch(name) is not None


def package_order(name: str) -> tuple[int, int]:
    """Return the step in a package's name, and its number among packages of that step."""
    match = _NAME.fullmatch(name)
    assert match is not None, "only names of packages are ordered"
    return int(match[1]), int(match[2] or 1)


def one_line(error: BaseException) -> str:
    """Return the message of a storage error, on one line and without its final full stop."""
    return " ".join(str(error).split()).rstrip(".")


def _free_names(step: int) -> Iterator[str]:
    yield f"step-{step:06}.tssp"
    for number in itertools.count(2):
        yield f"step-{step:06}-{number}.tssp"
