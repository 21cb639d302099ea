"""A bundle of code: the Python files of a project folder, read once, named by one digest and imported from those bytes.

The rule is the simplest that nothing escapes: every file that an import statement could find below the folder is in
the bundle, whether or not a run reaches it. So nobody has to follow imports to know what a digest stands for.

Guarantee: another content, name or number of these files gives another digest. Once a process takes a bundle, each
module that it imports is the bundle's or an installed one, and a file that changes on disk changes nothing.
Not guaranteed: what the bundle's own code opens and executes by other ways than an import, such as ``exec``. Whoever
lists its digest has read it.
"""

import importlib
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, ModuleSpec, SourceFileLoader
from importlib.util import decode_source, find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Self

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.metrics.errors import ConfigError, EvidenceError
from raycloak.metrics.file_errors import file_errors

_COMPILED = (*BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
_CACHE = "__pycache__"


@dataclass(frozen=True, slots=True)
class CodeBundle:
    """The files of a bundle, in memory.

    Attributes:
        folder: the absolute folder that they were read from.
        files: by path below it, with ``/`` between names.
    """

    folder: Path
    files: Mapping[str, bytes]

    @classmethod
    def read(cls, folder: Path | str) -> Self:
        """Read each ``.py`` file that an import statement could find below ``folder``.

        Left out are Python's caches, and what no import statement can name: a file or folder whose name is no
        identifier, such as ``.venv``.

        Raises:
            ConfigError: ``code_compiled`` if there is a compiled module, which nobody can read; ``code_unreadable``.
        """
        root = Path(folder).resolve()
        with file_errors("code_unreadable", "read", root):
            found = dict(_modules(root))
        return cls(root, {name: found[name] for name in sorted(found)})

    @property
    def digest(self) -> bytes:
        """SHA-256 over the sorted paths and the content of all files, 32 bytes."""
        return digest(
            length_prefixed("raycloak/code-bundle/v1", *(part for each in self.files.items() for part in each))
        )

    def require_listed(self, listed: Sequence[bytes], named: Sequence[str]) -> None:
        """Require that the policy lists this bundle.

        Args:
            named: the code that is to come from it, for the refusal.

        Raises:
            EvidenceError: ``code_unlisted``.
        """
        if self.digest not in listed:
            raise EvidenceError(
                "code_unlisted",
                f"{', '.join(named)}: the policy does not list the code in {self.folder}, {self.digest.hex()}.",
                "Run code that the policy lists, or add that digest after review.",
            )

    def require_module(self, name: str) -> None:
        """Require that a module is one of the bundle's; EvidenceError ``code_unlisted``."""
        if self.module(name) is None:
            raise EvidenceError(
                "code_unlisted",
                f"module '{name}' is in no file of {self.folder}, and the policy lists code by such a folder.",
                "Import it in a file beside the config file, and name that file.",
            )

    def module(self, name: str) -> Path | None:
        """Return the path of the file that a module is loaded from; None if it is none of the bundle."""
        stem = name.replace(".", "/")
        found = next((each for each in (f"{stem}.py", f"{stem}/__init__.py") if each in self.files), None)
        return None if found is None else self.folder / found

    def content(self, path: Path) -> bytes | None:
        """Return the content of the file ``path``; None if it is none of the bundle."""
        return self.files.get(path.relative_to(self.folder).as_posix()) if path.is_relative_to(self.folder) else None

    def take(self) -> None:
        """Let this process import the files of the bundle beside installed modules, and no other module any more.

        Raises:
            ConfigError: ``code_name`` if a file has the name of a module that is installed or loaded already: one of
                the two would be taken for the other.
        """
        # First: the folder itself may be on the path, as the working directory is.
        sys.path[:] = [entry for entry in sys.path if _is_installed(entry)]
        importlib.invalidate_caches()
        for name in sorted({Path(each).parts[0].removesuffix(".py") for each in self.files}):
            if name in sys.modules or find_spec(name) is not None:
                raise ConfigError(
                    "code_name",
                    f"{self.folder / name} has the name of a module that is installed or in use.",
                    "Give it another name.",
                )
        sys.meta_path.insert(0, _Finder(self))


def _modules(root: Path) -> Iterator[tuple[str, bytes]]:
    for inner, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name.isidentifier() and name != _CACHE]
        for name in names:
            path = Path(inner, name)
            # Up to the first dot: a compiled module has its platform behind that.
            if not name.partition(".")[0].isidentifier():
                continue
            if name.endswith(_COMPILED):
                raise ConfigError(
                    "code_compiled", f"{path} is compiled, so nobody can read what it does.", "Give its source instead."
                )
            if path.suffix == ".py" and path.stem.isidentifier():
                yield path.relative_to(root).as_posix(), path.read_bytes()


def _raise(error: OSError) -> None:
    # `os.walk` would leave the folder out.
    raise error


def _is_installed(entry: str) -> bool:
    """Return whether an entry of ``sys.path`` is of installed modules or of Python's own."""
    known = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        known.append(site.getusersitepackages())
    return any(Path(entry).resolve().is_relative_to(os.path.realpath(folder)) for folder in known)


class FromContent(SourceFileLoader):
    """Loads a module from the very bytes that were digested, and from no cache.

    Python takes a cache for current whose file has the same size and second; the digest would then be of other code.
    """

    def __init__(self, name: str, path: Path, content: bytes) -> None:
        super().__init__(name, str(path))
        self._content = content

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the bytes."""
        code: CodeType = self.source_to_code(self._content, self.path)
        # For those who compile a function's source once more, as torch.jit does. Without a time nobody asks the disk.
        lines = decode_source(self._content).splitlines(keepends=True)
        linecache.cache[self.path] = (len(self._content), None, lines, self.path)
        return code


class _Finder(MetaPathFinder):
    """Finds the modules of a bundle before any on disk. It stays: a function may import when it is called."""

    def __init__(self, bundle: CodeBundle) -> None:
        self._bundle = bundle

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a module of the bundle is loaded; None for any other."""
        found, stem = self._bundle.module(fullname), fullname.replace(".", "/")
        content = None if found is None else self._bundle.content(found)
        if found is not None and content is not None:
            inside = [str(found.parent)] if found.name == "__init__.py" else None
            loader = FromContent(fullname, found, content)
            return spec_from_file_location(fullname, found, loader=loader, submodule_search_locations=inside)
        if any(name.startswith(f"{stem}/") for name in self._bundle.files):
            return ModuleSpec(fullname, None, is_package=True)  # a folder without a file of its own
        return None
