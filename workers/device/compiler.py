"""Triton, which compiles the kernels of this room when they first run."""

import tempfile
from functools import cache
from importlib.util import find_spec

from raycloak.metrics.errors import ConfigError


@cache
def take_triton() -> None:
    """Require Triton, and let it keep its binaries in a folder of this process alone.

    Raises:
        ConfigError: ``no_triton``.
    """
    if find_spec("triton") is None:
        raise ConfigError(
            "no_triton",
            "this worker was given a GPU, and Triton, which compiles its kernels, is not installed.",
            "Install raycloak[gpu] on the nodes, or set use_gpu: false.",
        )
    # Imported here: it takes a second, and only a machine with a GPU has it.
    from triton import knobs

    # Mode 0700: a kernel that somebody else left in a common folder would be run as ours.
    knobs.cache.dir = _folder().name


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder that is removed as the process ends."""
    return tempfile.TemporaryDirectory(prefix="raycloak-triton-", ignore_cleanup_errors=True)
