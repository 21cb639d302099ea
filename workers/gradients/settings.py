"""Torch's process-wide settings that change what is computed: which they are, and that nobody changes them in a sum.

A model, its hooks and its loss run in the process that computes sums, and may set whatever torch lets them set. What
they set would hold for the next sum too, on this machine alone, and products of ten bits have none of the proofs.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from raycloak.metrics.errors import ModelError

# Of torch's own: its public names take twenty times as long to read, and every sum reads all of them twice.
_C: Any = torch._C


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting of torch.

    Attributes:
        name: as a user sets it.
        needed: its value in every sum; None for one that a run chooses, which stays what it was when the sum began.
            Those come last.
        read: returns its value; None where torch cannot say, because two of its interfaces were mixed.
    """

    name: str
    needed: object
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _legacy(read: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``read`` for a setting that has a newer interface, which torch refuses to read after both were used."""

    def value() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return value


def _precision(backend: str, operation: str) -> _Setting:
    """Return a setting of the newer interface for float32 products; given one by one, they follow no other."""
    return _Setting(
        f"torch.backends.{backend}.{operation}.fp32_precision",
        "ieee",
        partial(_C._get_fp32_precision_getter, backend, operation),
        partial(_C._set_fp32_precision_setter, backend, operation),
    )


def _own(name: str, needed: object, own: str, *, legacy: bool = False) -> _Setting:
    """Return a setting that torch itself calls ``own``; a legacy one has a newer interface."""
    read = getattr(_C, f"_get_{own}")
    return _Setting(name, needed, _legacy(read) if legacy else read, getattr(_C, f"_set_{own}"))


_SMALLEST = sys.float_info.min

# The first three have a newer interface below, which follows what is set here; so they are written first.
_SETTINGS = (
    _own("torch.set_float32_matmul_precision", "highest", "float32_matmul_precision", legacy=True),
    _own("torch.backends.cuda.matmul.allow_tf32", False, "cublas_allow_tf32", legacy=True),
    _own("torch.backends.cudnn.allow_tf32", False, "cudnn_allow_tf32", legacy=True),
    *(_precision(backend, each) for backend in ("cuda", "mkldnn") for each in ("matmul", "conv", "rnn")),
    # Products of narrow numbers are summed in float32, whole.
    *(
        _Setting(
            f"torch.backends.cuda.matmul.{reduction}",
            (False, True),
            getattr(_C, f"_get_cublas_{reduction}"),
            partial(setattr, torch.backends.cuda.matmul, reduction),
        )
        for reduction in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    ),
    _own("torch.backends.cuda.matmul.allow_fp16_accumulation", False, "cublas_allow_fp16_accumulation"),
    # Another library has other kernels.
    _own("torch.backends.cuda.preferred_blas_library", _C._BlasBackend.Cublas, "blas_preferred_backend"),
    # A benchmark picks the kernel that is fastest today.
    _own("torch.backends.cudnn.benchmark", False, "cudnn_benchmark"),
    _own("torch.backends.cudnn.deterministic", True, "cudnn_deterministic"),
    # Torch's fused transformer layers have other bits than their parts, and no gradients.
    _Setting(
        "torch.backends.mha.set_fastpath_enabled",
        False,
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    # A denormal that is flushed on one CPU alone would be another bit. Torch does not say what it has set, so one is
    # computed.
    _Setting(
        "torch.set_flush_denormal",
        True,
        lambda: _SMALLEST / 2 != 0,
        lambda kept: torch.set_flush_denormal(not kept),
    ),
    # Memory that is read before it is written would hold what another example left there.
    _Setting(
        "torch.utils.deterministic.fill_uninitialized_memory",
        True,
        _C._get_deterministic_fill_uninitialized_memory,
        _C._set_deterministic_fill_uninitialized_memory,
    ),
    _Setting("torch.set_default_dtype", torch.float32, torch.get_default_dtype, torch.set_default_dtype),
    *(
        _Setting(
            "torch.set_autocast_enabled",
            False,
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        for device in ("cpu", "cuda")
    ),
    _Setting(
        "torch.use_deterministic_algorithms",
        None,
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    # Torch lets it be set once, and `pin_numerics` has.
    _Setting("torch.set_num_interop_threads", None, torch.get_num_interop_threads, lambda value: None),
    _Setting("torch.set_num_threads", None, torch.get_num_threads, torch.set_num_threads),
)
_READERS = tuple(each.read for each in _SETTINGS)
_FIXED = [each.needed for each in _SETTINGS if each.needed is not None]

# Code that no sum runs may change the number of threads between two sums, on this machine alone. Empty, or one number.
_pinned_threads: list[int] = []


def pin_settings(threads: int) -> None:
    """Give every setting the value that sums need, from now on; and so many threads within one operation."""
    _pinned_threads[:] = [threads]
    found = _read()
    _set(_needed(found), found)


@contextmanager
def held_settings() -> Iterator[None]:
    """Run a block under the settings that sums need, whatever was set before, and set that again afterwards.

    Guarantee: a block in which anything changed a setting, and left it changed, ends in an error that names it.

    Raises:
        ModelError: ``changed_setting``; also in place of another error, which may follow from the change.
    """
    before = _read()
    needed = _needed(before)
    _set(needed, before)
    try:
        yield
    except Exception as error:
        _end(needed, before, error)
        raise
    except BaseException:
        _set(before, _read())
        raise
    _end(needed, before)


def _end(needed: Sequence[object], before: Sequence[object], cause: Exception | None = None) -> None:
    """Set what was set before; refuse settings that are no longer the needed ones."""
    found = _read()
    _set(before, found)
    if found != needed:
        # What an older interface cannot say, the newer one does.
        triples = zip(_SETTINGS, found, needed, strict=True)
        changed = dict.fromkeys(each.name for each, now, value in triples if now not in (value, None))
        raise ModelError(
            "changed_setting",
            f"the model, a hook of it or the loss changes {' and '.join(changed)}, so a sum would hold other numbers "
            "than are proved.",
            "Leave torch's settings to raycloak; precision and threads_per_worker are what a run may choose.",
        ) from cause


def _read() -> list[object]:
    return [read() for read in _READERS]


def _needed(found: Sequence[object]) -> list[object]:
    chosen = [*found[len(_FIXED) : -1], *_pinned_threads] if _pinned_threads else found[len(_FIXED) :]
    return [*_FIXED, *chosen]


def _set(values: Sequence[object], found: Sequence[object]) -> None:
    """Set what differs from ``values``; one that torch could not say is left to its newer interface.

    Args:
        found: the values now.
    """
    if found == values:
        return
    for each, value in zip(_SETTINGS, values, strict=True):
        # Read again: an older interface has set newer ones too.
        if value is not None and each.read() != value:
            each.write(value)
