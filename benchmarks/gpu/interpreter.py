"""Triton's interpreter, mended where it lacks bfloat16."""

from typing import Any

import numpy as np


def mend_interpreter() -> None:
    """Let the interpreter write bfloat16 numbers, and multiply them: it holds their bits, and multiplies those."""
    from triton import language
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if hasattr(builder, "get_bf16"):
        return
    bits_multiplied = builder.create_dot

    def widened(side: Any) -> Any:
        if side.dtype.scalar != language.bfloat16:
            return side
        return interpreter.TensorHandle((side.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return bits_multiplied(self, widened(left), widened(right), *rest)

    def get_bf16(self: Any, value: float) -> Any:
        bits = np.array([value], np.float32).view(np.uint32) >> 16
        return interpreter.TensorHandle(bits.astype(np.uint16), language.bfloat16)

    builder.create_dot, builder.get_bf16 = create_dot, get_bf16
