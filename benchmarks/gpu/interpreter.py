"""Triton's interpreter, mended. Import it before a kernel is run; without ``TRITON_INTERPRET=1`` it does nothing."""

import os
from typing import Any

import numpy as np


def _mend() -> None:
    """Let a loop end at a number that the kernel was given.

    Triton 3.6 asks NumPy for the integer in an array of one element, and NumPy 2.4 gives none.
    """
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: int(np.asarray(value.handle.data).item()))

    interpreter._patch_lang_tensor = with_index


if os.environ.get("TRITON_INTERPRET") == "1":
    _mend()
