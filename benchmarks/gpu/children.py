"""Processes that the check starts: ``python -m benchmarks.gpu.children NAME ARGUMENT ...`` prints one line."""

import json
import sys
from collections.abc import Callable

import torch

MARK = 0x5EC2E7A1 - 2**32
"""The pattern of bits, as an int32."""


def _sum(device: str, model: str, precision: str) -> str:
    """Return the digest of a clipped sum."""
    from benchmarks.gpu.engine import Model, Sums, digest
    from raycloak.workers.gradients.numerics import pin_numerics

    pin_numerics()
    sums = Sums(Model(model, "bf16" if precision == "bf16" else "float32"), torch.device(device))
    return digest(sums.of(sums.batch))


def _write() -> str:
    """Fill memory of the GPU with the mark."""
    torch.full((2**29,), MARK, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    return "written"


def _read() -> str:
    """Return how often the mark is in the memory that is free."""
    free, _ = torch.cuda.mem_get_info()
    words = torch.empty(int(0.9 * free) // 4, dtype=torch.int32, device="cuda")
    return str(int((words == MARK).sum()))


def _errors() -> str:
    """Return, for each act, the class that it raises and the code that a worker would answer with."""
    from raycloak.workers.answer_codes import answer_code

    def wrong_index() -> None:
        table = torch.randn(10, 4, device="cuda")
        torch.nn.functional.embedding(torch.tensor([11], device="cuda"), table)
        torch.cuda.synchronize()

    acts: dict[str, Callable[[], object]] = {
        "too much memory": lambda: torch.empty(2**45, dtype=torch.uint8, device="cuda"),
        "a wrong index": wrong_index,
        "anything after it": lambda: torch.zeros(1, device="cuda").item(),
    }
    found = {}
    for name, act in acts.items():
        try:
            act()
        except Exception as error:  # noqa: BLE001 - which one is the question
            found[name] = [type(error).__name__, answer_code(error)]
        else:
            found[name] = ["none", "none"]
    return json.dumps(found)


def _products() -> str:
    """Return what a float32 and a float64 product are off by, and whether a float32 product keeps 2^-12 beside 1.

    The errors are over the product of both norms; the last is exact in float32 in any order, and lost in ten bits.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    narrow = torch.randn(512, 2048, device="cuda")
    wide = narrow.double()
    norms = wide.norm(dim=1)
    off = ((narrow @ narrow.T).double() - wide @ wide.T).abs() / (norms[:, None] * norms)
    # One wide column that meets zeros: where float64 is made of integers, they are scaled for it.
    uneven, without = wide.clone(), wide.clone()
    uneven[:, 0], without[:, 0] = uneven[:, 0] * 2.0**40, 0.0
    right = torch.stack([(uneven * row).sum(1) for row in without], 1)
    off_wide = ((uneven @ without.T - right).abs() / (norms[:, None] * norms)).max()
    kept = torch.full((64, 64), 1 + 2.0**-12, device="cuda") @ torch.ones(64, 64, device="cuda")
    return json.dumps([float(off.max()), float(off_wide), bool((kept == 64 * (1 + 2.0**-12)).all())])


if __name__ == "__main__":
    known: dict[str, Callable[..., str]] = {
        "sum": _sum, "write": _write, "read": _read, "errors": _errors, "products": _products,
    }  # fmt: skip
    print(known[sys.argv[1]](*sys.argv[2:]))
