"""User code named ``module:function``: how it is found, and how a digest names its source.

One rule finds a module, in the driver and in every worker alike. For ``a.b:f`` and a base folder (the folder of the
config file):

1. ``base/a/b.py``, or else ``base/a/b/__init__.py``, is loaded from that file;
2. only if neither exists, the installed module ``a.b`` is imported.

A relative base is relative to the process's working directory: see :func:`portable_base`. The base folder is on
``sys.path`` only while a file is executed, so the file may import its neighbours.

Another rule holds in a process that took a bundle (:func:`only_from`): a module is one of its files, or refused.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path
from types import ModuleType
from typing import Any

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.metrics.errors import ConfigError, EvidenceError
from raycloak.workers.inputs.code_bundle import CodeBundle, FromContent

UNPACKED = "working_dir_files"
"""The folder in which Ray unpacks working directories."""
SEE_WHY = "To see its traceback: raycloak plan CONFIG --debug."

_TELLING = ContextVar("telling", default=False)
_TAKEN: list[CodeBundle] = []
"""The bundle of this process, once it has one. It stays: what its code imports later is the bundle's as well."""


@contextmanager
def telling() -> Iterator[None]:
    """Let errors of user code keep the exception that they stand for, for a command that its own author runs.

    Never in a process of a run: the text of an exception may hold an example.
    """
    token = _TELLING.set(True)
    try:
        yield
    finally:
        _TELLING.reset(token)


def told(error: Exception) -> Exception | None:
    """Return ``error`` to raise another one from, or None where nobody may see it."""
    return error if _TELLING.get() else None


def own_words(error: BaseException) -> str:
    """Return type and text of an exception on one line: of user code that sees public or released values alone."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    return f"{type(error).__name__}: {text}." if text else f"{type(error).__name__}."


def portable_base(config_dir: Path) -> str:
    """Return ``config_dir`` as text that means the same folder for a worker; every function here takes it as a base.

    Inside a job's uploaded folder it is relative, since each node has a copy of its own. Elsewhere it is absolute.
    """
    resolved = config_dir.resolve()
    working = Path.cwd().resolve()
    is_copied = UNPACKED in working.parts and resolved.is_relative_to(working)
    return resolved.relative_to(working).as_posix() if is_copied else resolved.as_posix()


def resolve(target: str, base: Path | str) -> Callable[..., Any]:
    """Return the callable that ``module:function`` names, by the rule of this module.

    Raises:
        ConfigError: ``module_function`` if the text has another form, the module is not found or fails when it is
            executed, or holds no such callable.
        EvidenceError: ``code_unlisted`` if this process took a bundle that does not have it.
    """
    module_name, function_name = _split(target)
    module = _load(module_name, base)
    found = getattr(module, function_name, None)
    if not callable(found):
        raise ConfigError(
            "module_function", f"{target}: {module.__file__} has no callable '{function_name}'.", "Check the name."
        )
    function: Callable[..., Any] = found
    return function


def only_from(bundle: CodeBundle) -> None:
    """Let this process take code of the user's from ``bundle`` alone, from now on.

    Guarantee: no function that a run names is found anywhere else, whatever lies on disk or is installed.

    Raises:
        ConfigError: as `raycloak.workers.inputs.code_bundle.CodeBundle.take`.
        EvidenceError: ``code_unlisted`` if it has taken another bundle.
    """
    if not _TAKEN:
        bundle.take()
        _TAKEN.append(bundle)
    elif _TAKEN[0].digest != bundle.digest:
        raise EvidenceError("code_unlisted", f"the files of {bundle.folder} changed since this process read them")


def source_digest(target: str | Callable[..., Any], base: Path | str) -> bytes:
    """Return a SHA-256 that names the source of ``target``, 32 bytes.

    For ``module:function`` beside the configuration it covers the module's file and every file of ``base`` that import
    statements lead to from there, also statements inside functions. For one of an installed package it covers every
    file of the package. It does not cover imports by a computed name, nor other installed packages. For a callable it
    covers its source text, its pickled form with the globals it uses if it is not importable, and the files of its
    module as of one that is named.

    Raises:
        ConfigError: ``module_function``, as :func:`resolve`.
    """
    if isinstance(target, str):
        resolve(target, base)
        return unexecuted_digest(target, base)
    try:
        source = inspect.getsource(target)
    # A callable from an interactive session has no source; its pickled form names it all the same.
    except (OSError, TypeError):
        source = ""
    module = getattr(target, "__module__", None) or "__main__"
    # A program's own file is left out: what it holds besides the callable computes no gradient.
    files = _installed_digest(module) if module != "__main__" else None
    import cloudpickle  # type: ignore[import-untyped]  # late: an auditor's program reaches this module without it

    return digest(length_prefixed("raycloak/callable/v2", source, cloudpickle.dumps(target), files or b""))


def unexecuted_digest(target: str, base: Path | str) -> bytes:
    """Return the :func:`source_digest` of ``module:function`` without executing it, 32 bytes.

    Raises:
        ConfigError: ``module_function`` if the text has another form, or its module is not found.
    """
    module, _ = _split(target)
    # Our own package is the installed one, also where a run begins in a checkout of it.
    local = None if module.partition(".")[0] == "raycloak" else _local_file(module, base)
    found = _files_digest(local, Path(base).resolve()) if local else _installed_digest(module)
    if found is None:
        raise ConfigError(
            "module_function",
            f"no module '{module}' with a file: it is neither in {Path(base).resolve()} nor installed.",
            "Modules are looked up beside the config file first.",
        )
    return found


def require_module(target: str, base: Path | str) -> None:
    """Require that the module of ``module:function`` is there, without executing any code of it.

    Not guaranteed: that an installed package has the submodule, that the module can be imported, or has the function.

    Raises:
        ConfigError: ``module_function`` if the text has another form, or its module is not found.
        EvidenceError: ``code_unlisted`` if this process took a bundle that does not have it.
    """
    module, _ = _split(target)
    # The outermost name alone: a search for a submodule imports the packages that it lies in.
    if _TAKEN:
        _TAKEN[0].require_module(module)
    if _local_file(module, base) is None and importlib.util.find_spec(module.partition(".")[0]) is None:
        raise _absent(module, base)


def source_place(target: str, base: Path | str) -> str:
    """Return the file that ``module:function`` is looked up in below ``base``; empty if it must be installed.

    Runs no code.
    """
    local = _local_file(_split(target)[0], base)
    return os.path.realpath(local) if local else ""


def _reached(start: Path, base: Path) -> set[Path]:
    """Return ``start`` and all files of ``base`` that it leads to by imports."""
    found, waiting = {start}, [start]
    while waiting:
        named = (_local_file(name, base) for name in _imports(waiting.pop(), base))
        new = {path for path in named if path is not None} - found
        found |= new
        waiting += new
    return found


def _files_digest(start: Path, base: Path) -> bytes:
    """Return a SHA-256 over names and content of :func:`_reached` files."""
    found = _reached(start, base)
    # Sorted and relative, so that the digest depends neither on the order of a set nor on the folder.
    named = sorted((os.path.relpath(path, start.parent), _content(path)) for path in found)
    return digest(length_prefixed("raycloak/source/v1", *(field for pair in named for field in pair)))


def _installed_digest(module: str) -> bytes | None:
    """Return a SHA-256 over the files of the installed package that ``module`` lies in, without importing any of it.

    A module that lies in no package is covered with the others of its distribution. If it has none, as in a source
    folder on the path, it is covered with the files that it imports from its folder.

    Returns:
        None for a module that is not there, or has no file.
    """
    found = _installed(module)
    if found is None:
        return None
    path, is_package = found
    if is_package or "." in module:
        return _named_digest(path.parent, _files_below(path.parent))
    # Of installed modules or Python's own, whatever distribution they are of.
    libraries = {os.path.realpath(folder) for folder in sysconfig.get_paths().values()}
    if path.parent.name in ("site-packages", "dist-packages") or os.path.realpath(path.parent) in libraries:
        return _named_digest(path.parent, _distribution_of(path))
    return _files_digest(path, path.parent)


def _installed(module: str) -> tuple[Path, bool] | None:
    """Return the file of the outermost package that a module lies in, or the module's own if no package has a file.

    The second value says which. Nothing of the package is imported.
    """
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    name = top
    # A namespace package has parts in several distributions, and no file of its own.
    while spec is not None and spec.origin is None and spec.submodule_search_locations is not None and rest:
        name = f"{name}.{rest.pop(0)}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    if spec is None:
        return None
    # Some of Python's own modules are frozen into it, and know their file all the same.
    origin = spec.origin if spec.has_location else getattr(spec.loader_state, "filename", None)
    is_package = spec.submodule_search_locations is not None
    if origin is None or (rest and not is_package):
        return None
    if rest:
        # A submodule is a package, a file of source, or a compiled one.
        inner = Path(origin).parent.joinpath(*rest)
        if not inner.is_dir() and not any(Path(f"{inner}{suffix}").is_file() for suffix in all_suffixes()):
            return None
    return Path(origin), is_package


def _files_below(folder: Path) -> list[Path]:
    """Return every file below a folder but Python's caches, which repeat their sources; also below links."""
    files: list[Path] = []
    seen: set[str] = set()
    for inner, folders, names in os.walk(folder, followlinks=True):
        # A link may lead back to where it lies.
        if (real := os.path.realpath(inner)) in seen or Path(inner).name == "__pycache__":
            folders.clear()
            continue
        seen.add(real)
        files += [Path(inner, name) for name in names if not name.endswith(".pyc")]
    return files


def _distribution_of(path: Path) -> list[Path]:
    """Return the files of the distribution that installed a module, those about the distribution left out."""
    for each in metadata.distributions():
        files = each.files or []
        if any(file.name == path.name and Path(str(each.locate_file(file))) == path for file in files):
            code = (Path(str(each.locate_file(file))) for file in files if file.suffix != ".pyc")
            return [file for file in code if file.is_file() and file.is_relative_to(path.parent) and not _about(file)]
    return [path]


def _about(path: Path) -> bool:
    """Return whether a file describes a distribution: it changes with the way that it was installed."""
    return path.parent.suffix in (".dist-info", ".egg-info")


def _named_digest(root: Path, files: list[Path]) -> bytes:
    """Return a SHA-256 over the names, relative to ``root``, and the content of files."""
    fields: list[bytes | str] = []
    for name, path in sorted((os.path.relpath(path, root), path) for path in files):
        # One after the other: some packages are larger than memory should be.
        with path.open("rb") as file:
            fields += [name, hashlib.file_digest(file, "sha256").digest()]
    return digest(length_prefixed("raycloak/package-source/v1", *fields))


def _imports(path: Path, base: Path) -> set[str]:
    """Return the modules that the import statements in ``path`` may mean, with the packages they lie in."""
    names: set[str] = set()
    inside = list(path.relative_to(base).parts[:-1]) if path.is_relative_to(base) else []
    for node in ast.walk(ast.parse(_content(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Each dot but the first leads to the package around.
            package = inside[: len(inside) - (node.level - 1)] if node.level else []
            stem = ".".join([*package, *([node.module] if node.module else [])])
            names |= {stem, *(f"{stem}.{alias.name}".lstrip(".") for alias in node.names)}
    parts = [name.split(".") for name in names if name]
    return {".".join(part[: length + 1]) for part in parts for length in range(len(part))}


def _split(target: str) -> tuple[str, str]:
    module, separator, function = target.partition(":")
    names = [*module.split("."), function]
    if not separator or not all(name.isidentifier() for name in names):
        raise ConfigError(
            "module_function",
            f"'{target}' is not of the form module:function.",
            "For example models:digits_mlp, from models.py beside the config file.",
        )
    return module, function


def _local_file(module: str, base: Path | str) -> Path | None:
    if _TAKEN:
        return _TAKEN[0].module(module)
    stem = Path(base).resolve().joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _content(path: Path) -> bytes:
    found = _TAKEN[0].content(path) if _TAKEN else None
    return path.read_bytes() if found is None else found


def absent_import(error: BaseException, target: str, base: Path | str) -> ConfigError | None:
    """Return the refusal of code that imports a module which is not there; None for any other failure.

    Guarantee: names a module only if an import statement in the code itself does. Any other text of an exception may
    hold private data.
    """
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    start = _local_file(_split(target)[0] if ":" in target else target, base)
    if name is None or start is None:
        return None
    folder = Path(base).resolve()
    try:
        stated = set().union(*(_imports(path, folder) for path in _reached(start, folder)))
    except (OSError, SyntaxError):
        return None
    return not_importable(target, name) if name in stated else None


def not_importable(target: str, name: str) -> ConfigError:
    """Return the refusal of code that needs a module which this process cannot import."""
    return ConfigError(
        "module_function",
        f"{target} imports '{name}', and there is no such module in this process.",
        "Install it on every node, put it beside the config file, or name its folder in PYTHONPATH before Ray starts.",
    )


def own_folders() -> tuple[str, ...]:
    """Return the folders that this process finds modules in beside the installed ones, as a notebook adds them."""
    installed = [Path(path).resolve() for path in sysconfig.get_paths().values()]
    folders = (Path(entry).resolve() for entry in sys.path)
    own = (each for each in folders if each.is_dir() and not any(each.is_relative_to(path) for path in installed))
    return tuple(dict.fromkeys(str(each) for each in own))


def find_in(folders: Iterable[str]) -> None:
    """Let this process find modules in ``folders`` as well, after all others: so none of them is shadowed."""
    sys.path.extend(folder for folder in folders if folder not in sys.path and Path(folder).is_dir())


def _load(name: str, base: Path | str) -> ModuleType:
    path = _local_file(name, base)
    if _TAKEN:
        _TAKEN[0].require_module(name)
    try:
        return importlib.import_module(name) if _TAKEN or path is None else _load_file(path, base)
    except ModuleNotFoundError as error:
        if path is None and error.name is not None and (name + ".").startswith(error.name + "."):
            raise _absent(name, base) from None
        raise absent_import(error, name, base) or _failed(name, error) from told(error)
    except Exception as error:  # noqa: BLE001 - only its type is told: its text may hold private data
        raise _failed(name, error) from told(error)


def _absent(name: str, base: Path | str) -> ConfigError:
    return ConfigError(
        "module_function",
        f"no module '{name}': it is neither in {Path(base).resolve()} nor installed.",
        "Modules are looked up beside the config file first.",
    )


def _failed(name: str, error: Exception) -> ConfigError:
    # Not the text: a module that reads its data as it is imported may name an example in it.
    return ConfigError(
        "module_function",
        f"module '{name}' fails with {type(error).__name__} when it is imported.",
        SEE_WHY,
    )


def _load_file(path: Path, base: Path | str) -> ModuleType:
    """Execute a file once per content; the module has a private name, so it shadows nothing."""
    content = path.read_bytes()
    name = "_raycloak_user_" + digest(length_prefixed("raycloak/module/v1", str(path), content)).hex()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=FromContent(name, path, content))
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as import does: dataclasses and pickle look a module up by its name.
    sys.modules[name] = module
    entry, kept = str(Path(base).resolve()), sys.dont_write_bytecode
    sys.path.insert(0, entry)
    # For the neighbours of a file: nothing is left in the user's folder, and no cache that a later edit could miss.
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    # A module that failed half-way must not be found by the next import.
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.dont_write_bytecode = kept
        sys.path.remove(entry)
    return module
