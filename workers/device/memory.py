"""Zeros a GPU's memory that this process has used and still holds: what the allocator keeps for later.

A step's gradients, their sides and its float sum lie there in clear once they are freed. No tensor can reach them, so
they are zeroed by address.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton

from raycloak.workers.device.word_kernels import ZERO_BYTES, zero_kernel


def clear_free_memory(device: torch.device) -> None:
    """Zero all memory on ``device`` that torch's allocator holds and no tensor has.

    Guarantee: when the device has done it, nothing that was freed before is left in memory of this process.
    Assumes that the process uses one GPU, that no other thread allocates meanwhile, and that all work is on one stream:
    nothing that is still to run reads what is freed.
    """
    for address, size in free_spans(torch.cuda.memory_snapshot()):  # type: ignore[no-untyped-call]
        zero_span(address, size, device)


def free_spans(segments: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of each free block of the allocator's segments, as its snapshot lists them."""
    for segment in segments:
        address = segment["address"]
        # The blocks of a segment lie side by side.
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                yield address, block["size"]
            address += block["size"]


def zero_span(address: int, size: int, device: torch.device) -> None:
    """Zero ``size`` bytes, a multiple of four, from ``address`` on, a multiple of four too."""
    place = torch.tensor([address], dtype=torch.int64, device=device)
    zero_kernel[(triton.cdiv(size, ZERO_BYTES.value),)](place, size // 4, num_warps=4)
