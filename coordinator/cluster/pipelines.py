"""Pipelines of Ray Data, run for the data's owner on a Ray of their own, on this machine alone.

Ray Data is loaded only here, and needs pandas: ``pip install 'raycloak[data]'``.

A pipeline holds its rows in Ray's object store, and spills them to disk, in the clear. So it never joins a cluster:
its Ray has this machine alone, a token of its own, and its files in a folder of mode 0700 that is removed at the end.

The rows are shuffled by sorting them by a digest of their own content. So the same rows give the same bytes, in
whatever order the pipeline's tasks end, and a row's place tells nothing about where it came from.
"""

import hashlib
import importlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.attestation.files.private import publish
from raycloak.coordinator.cluster.ray_checks import start_failed, variables
from raycloak.metrics.errors import ConfigError, DatasetError, RaycloakError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.inputs.built_rows import PipelineIndex, write_rows
from raycloak.workers.inputs.user_code import resolve, told, unexecuted_digest

# Not a name that a pipeline would give to a column.
_ORDER = "__raycloak_order__"
_BATCH_ROWS = 2**14
_CLOSES_MEMORY = f"{keep_memory_private.__module__}.{keep_memory_private.__name__}"
"""Called by each process of the pipeline's Ray as it starts: they have the rows."""


def build_folder(function: str, base: Path, folder: Path) -> PipelineIndex:
    """Run the pipeline ``module:function`` and write its rows to a new folder, which appears as a whole or not at all.

    Args:
        base: folder that the module is looked up in first.
        folder: absolute; anything there is left as it is.

    Raises:
        ConfigError: ``built_exists``, ``built_folder``, ``ray_data_missing``, ``ray_running``, ``ray_start`` or
            ``module_function``.
        DatasetError: ``dataset_function`` if the pipeline fails, ``dataset_array``, ``dataset_empty``.
    """
    if os.path.lexists(folder):
        raise ConfigError(
            "built_exists",
            f"{folder} exists already.",
            "Remove it, or set dataset.path to a new folder; runs may be reading the old one.",
        )
    code, pipeline = unexecuted_digest(function, base), resolve(function, base)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, because a rename needs one file system. Made with mode 0700.
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise file_error("built_folder", "write", folder, error) from None
    try:
        with _own_ray(base):
            index = write_rows(_shuffled(pipeline, function), partial, function, code)
        partial.rename(folder)
    except OSError as error:
        raise file_error("built_folder", "write", folder, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


@contextmanager
def _own_ray(base: Path) -> Iterator[None]:
    """Start a Ray of this machine alone, whose files nobody else can read and which leaves none."""
    if ray.is_initialized():
        raise ConfigError("ray_running", "this process has joined a Ray cluster.", "Build in a process of its own.")
    # Ray has read it when it was imported, so it cannot be set here.
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        raise ConfigError("ray_start", "RAY_AUTH_MODE switches Ray's token off.", "Unset it, or set it to token.")
    try:
        # Found missing before Ray starts.
        importlib.import_module("ray.data")
    except ImportError:
        raise ConfigError(
            "ray_data_missing",
            "Ray Data cannot be imported: it needs pandas.",
            "Install it: pip install 'raycloak[data]'.",
        ) from None
    path = os.pathsep.join([str(base.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="raycloak-", ignore_cleanup_errors=True) as files:
        token = Path(files) / "token"
        publish(token, os.urandom(32).hex().encode())
        with variables({"RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(token), "RAY_ADDRESS": None}):
            try:
                _start_ray(files, path)
                yield
            finally:
                ray.shutdown()


def _start_ray(files: str, python_path: str) -> None:
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": {"PYTHONPATH": python_path}, "worker_process_setup_hook": _CLOSES_MEMORY},
            _temp_dir=files,
        )
    except Exception as error:  # noqa: BLE001 - Ray names no exceptions; nothing has been read yet
        remedy = "TMPDIR names the folder of its files: choose one with room, and a path of at most 30 characters."
        raise start_failed(error, remedy) from None


def _shuffled(pipeline: Any, function: str) -> Iterator[Any]:
    """Yield the pipeline's rows as pyarrow tables, in the order of their digests.

    Turns all that a pipeline raises into one error, which says no value of an example. What the caller does with a
    table raises nothing here.
    """
    try:
        for table in _ordered(pipeline, function):
            yield table.drop_columns([_ORDER])
    except RaycloakError:
        raise
    except Exception as error:  # noqa: BLE001 - only its type is told: its text may hold private data
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, RaycloakError):
            raise cause from None
        raise DatasetError(
            "dataset_function",
            f"the pipeline {function} fails with {type(cause).__name__}.",
            "To see its traceback: raycloak data build CONFIG --debug.",
        ) from told(error)


def _ordered(pipeline: Any, function: str) -> Iterable[Any]:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    # The functions travel to tasks with their code: a task cannot import a file by its private name.
    module = sys.modules.get(getattr(pipeline, "__module__", ""))
    if module is not None and module.__name__.startswith("_raycloak_user_"):
        ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    rows = pipeline()
    if not isinstance(rows, ray.data.Dataset):
        raise DatasetError(
            "dataset_array",
            f"{function} returned a {type(rows).__name__}, not a ray.data.Dataset.",
            "Return what ray.data reads, such as ray.data.read_csv(path).",
        )
    ordered = rows.map_batches(with_order, batch_format="pyarrow").sort(_ORDER)
    batches: Iterable[Any] = ordered.iter_batches(batch_size=_BATCH_ROWS, batch_format="pyarrow")
    return batches


def with_order(table: Any) -> Any:
    """Return a pyarrow table of plain columns, with a column of each row's digest.

    Raises:
        DatasetError: ``dataset_array`` for a column of tensors with more than one extent.
    """
    import pyarrow as pa

    plain = pa.table({name: _plain(table.column(name), name) for name in table.column_names})
    # Written out in full by repr, which gives a float back exactly.
    digests = [hashlib.sha256(repr(list(row.items())).encode()).digest() for row in plain.to_pylist()]
    return plain.append_column(_ORDER, pa.array(digests, pa.binary()))


def _plain(column: Any, name: str) -> Any:
    """Return a column as Arrow's own types; Ray gives NumPy's rows as an extension of lists."""
    import pyarrow as pa

    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    shape = getattr(column.type, "shape", None)
    if shape is None or len(shape) != 1:
        raise DatasetError(
            "dataset_array", f"column '{name}' holds tensors of more than one extent.", "Flatten them to lists."
        )
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
