"""Sections on the kernels of words: do they give the product's bytes, and at what speed."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.golden import Case, cases, digest, key, random_cases, stored, words_of
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found
from raycloak.workers.device import launches
from raycloak.workers.device.launches import Made, NoiseTables
from raycloak.workers.gradients.numerics import exact_sums
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.ring import RingBits, RingSpec

LONG = 2**27
"""Words of a vector whose passes are timed: GPT-2's parameters, and far more than any cache holds."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One pass over a vector.

    Attributes:
        memory_gb_s: bytes read and written, over the seconds.
        draws_gb_s: bytes of keystream that were drawn, over the seconds.
    """

    seconds: float
    memory_gb_s: float
    draws_gb_s: float = 0.0


def computed(case: Case, device: torch.device) -> Made:
    """Compute a case by the kernels."""
    if case.kind == "masks":
        none = torch.zeros(1, dtype=torch.int32, device=device)
        return Made(launches.masked(_moved(case, device), case.signed_masks(), case.start), none, none)
    if case.kind == "encoding":
        return launches.encoded(torch.from_numpy(case.values()).to(device), case.spec)
    tables = NoiseTables.of(NoiseSampler(case.sigma, case.bits), device)
    if case.kind == "noise":
        return launches.add_noise(_moved(case, device), tables, case.noise_key(), case.start)
    return launches.encoded_with_noise(
        torch.from_numpy(case.values()).to(device), case.spec, tables, case.noise_key()
    )  # fmt: skip


def _moved(case: Case, device: torch.device) -> Tensor:
    return torch.from_numpy(case.vector()).to(device)


def kernel_bytes(place: Place) -> Found:
    """Compare the kernels with the golden file, and with the product's functions where no file says what is right.

    The interpreter takes a second for a block of noise, so it computes fewer and shorter cases.
    """
    right = stored()
    known = [case for case in cases() if not place.interpreted or _is_short(case)]
    count, longest = (1, 5000) if place.interpreted else (8, 100_000)
    new = list(random_cases(seed=0, count=count, longest=longest))
    faults, tally = [], Counter[str]()
    for case in [*known, *new]:
        expected = right[case.name] if case in known else digest(words_of(case))
        with exact_sums():
            found = computed(case, place.device)
        if failed := int(found.unfinite) + int(found.unsettled):
            faults.append(f"{case.name}: {failed} words were not computed")
        elif hashlib.sha256(found.vector.cpu().numpy().tobytes()).hexdigest() != expected:
            faults.append(f"{case.name}: the bytes are not the product's")
        else:
            tally[case.kind] += 1
    faults += _unseen(place)
    return Found({"cases with the product's bytes": tally, "cases": len(known) + len(new)}, faults)


def _is_short(case: Case) -> bool:
    longest = {"masks": 2048, "noise": 8192, "encoding": 100_003}.get(case.kind, 0)
    return case.length <= longest and (case.kind != "noise" or case.length > 1)


def _unseen(place: Place) -> Iterator[str]:
    """Yield a sentence if an encoding does not count what is not finite."""
    values = torch.zeros(5000, device=place.device)
    values[[3, 4998, 4999]] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=place.device)
    found = int(launches.encoded(values, RingSpec(32, -20, 1.0)).unfinite)
    if found != 3:
        yield f"the encoding of 3 values that are not finite counts {found}"


def kernel_speed(place: Place) -> Found:
    """Time each kernel on a vector of `LONG` words; the bytes were compared before."""
    figures: dict[str, Speed] = {}
    rings: tuple[RingBits, RingBits] = (32, 64)
    for bits in rings:
        values = torch.randn(LONG, dtype=torch.float64, device=place.device)
        spec = RingSpec(bits, -20, 2.0**8)
        vector = launches.encoded(values, spec).vector
        size = vector.nbytes
        figures[f"encode, {bits} bits"] = _speed(place, partial(launches.encoded, values, spec), values.nbytes + size)
        for count in (1, 7, 31):
            masks = [(key(f"mask {each}"), 1) for each in range(count)]
            figures[f"{count} masks, {bits} bits"] = _speed(
                place, partial(launches.masked, vector, masks), 2 * size, count * size
            )
        for sigma in (300.0, 2.0**13 + 0.25, 1.5 * 2.0**20, 2.0**33):
            tables = NoiseTables.of(NoiseSampler(sigma, bits), place.device)
            figures[f"noise of {tables.draws} draws, {bits} bits"] = _speed(
                place, partial(launches.add_noise, vector, tables, key("noise")), 2 * size, 2 * LONG * tables.draws
            )
    return Found(figures)


def _speed(place: Place, work: Callable[[], object], moved: int, drawn: int = 0) -> Speed:
    # Elsewhere torch fills memory that it gives, which is one more pass.
    with exact_sums():
        seconds = place.median_s(work, 7)
    return Speed(seconds, moved / seconds / 1e9, drawn / seconds / 1e9)
