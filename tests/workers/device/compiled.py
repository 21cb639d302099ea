"""Compiles the kernels of `workers/device` for GPUs that are not here; prints one line of JSON for each binary.

Triton brings the assembler and the tool that reads a binary. This is a process of its own: what was decorated under
``TRITON_INTERPRET`` cannot be compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from raycloak.workers.device import leaf_kernel, row_kernel, word_kernels

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    "keys_ptr": "*u32", "key_ptr": "*u32", "open_ptr": "*u32", "words_ptr": "*u32", "constants_ptr": "*u32",
    "index_ptr": "*i16", "count_ptr": "*i32", "unfinite_ptr": "*i32", "lengths_ptr": "*i32", "starts_ptr": "*i64",
    "place_ptr": "*i64", "high_ptr": "*u64", "low_ptr": "*u64", "values_ptr": "*fp64", "limits_ptr": "*fp64",
    "ids_ptr": "*i32", "weights_ptr": "*fp64", "squares_ptr": "*fp64", "total_ptr": "*fp64",
}  # fmt: skip
SIDES = ("left_ptr", "right_ptr")
ROWS = [(side, aligned, tied) for side in ("*fp32", "*bf16") for aligned, tied in ((True, False), (False, True))]
ALIGNED = (*SIDES, "height", "width")


def usage(function, target: int, warps: int, side: str = "", aligned: bool = False, **constants: bool):
    """Return registers and bytes of stack of a kernel's threads on a GPU of compute capability ``target`` / 10.

    Args:
        side: type of the sides of rows. aligned: whether these and their extents are multiples of 16.
    """
    word = "*u64" if constants.get("WIDE") else "*u32"
    words = dict.fromkeys(("vector_ptr", "signs_ptr", "powers_ptr", "out_ptr"), word)
    known = {**TYPES, **words, **dict.fromkeys(SIDES, side)}
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED if aligned}
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    return {"registers": int(found[1]), "stack": int(found[2])}


def main(targets: list[int]) -> None:
    """Compile every kernel for each target; of 64-bit words for the first alone."""
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        for target in targets:
            for wide in (False, True)[: 2 if target == targets[0] else 1]:
                kernels = {
                    "mask": (word_kernels.mask_kernel, 4, {"WIDE": wide}),
                    "encode": (word_kernels.encode_kernel, 4, {"WIDE": wide}),
                    "draw": (word_kernels.draw_kernel, 8, {"WIDE": wide, "ENCODES": True}),
                    "settle": (word_kernels.settle_kernel, 1, {"WIDE": wide}),
                }
                if not wide:
                    kernels |= {
                        "leaf": (leaf_kernel.leaf_kernel, 1, {}),
                        "zero": (word_kernels.zero_kernel, 4, {}),
                    }
                    for side, aligned, tied in ROWS:
                        of = {"side": side, "aligned": aligned, "TIED": tied}
                        kernels[f"rows {side} {aligned} {tied}"] = (row_kernel.row_kernel, 8, of)
                for name, (function, warps, constants) in kernels.items():
                    found = usage(function, target, warps, **constants)
                    print(json.dumps({"kernel": name, "target": target, "wide": wide, **found}), flush=True)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
