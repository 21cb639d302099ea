"""Sections on the kernels of words: do they give the product's bytes, and at what speed."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.golden import Case, cases, digest, key, random_cases, stored, words_of
from benchmarks.gpu.machine import keystream_gb_s
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found
from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.workers.device import launches
from raycloak.workers.device.gpu_words import mixed_words
from raycloak.workers.device.launches import Made, NoiseTables
from raycloak.workers.gradients.numerics import exact_sums
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.ring import RingBits, RingSpec, mix_into, ring_dtype
from raycloak.workers.vectors.streams import KeyStream
from raycloak.workers.vectors.threads import ONE_THREAD
from raycloak.workers.vectors.vector_tag import by_tensor, leaf_places, tensor_leaves

LONG = 2**27
"""Words of a vector whose passes are timed: GPT-2's parameters, and far more than any cache holds."""

MIXED = (COEFFICIENT_UNIT, COEFFICIENT_UNIT // 2, 41_287)
"""Coefficients of sums that are mixed: of the second, every other word is a tie that is rounded."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One pass over a vector.

    Attributes:
        share_of_copy: bytes read and written over the seconds, as a share of the rate of a copy of the vector.
        share_of_arithmetic: bytes of keystream that were drawn over the seconds, as a share of `keystream_gb_s`.
    """

    seconds: float
    share_of_copy: float
    share_of_arithmetic: float = 0.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The rates of a device that speeds are shares of, in bytes a second."""

    copy: float
    keystream: float

    def speed(self, seconds: float, moved: int, drawn: int = 0) -> Speed:
        """Return the speed of a pass that moves and draws so many bytes."""
        return Speed(seconds, moved / seconds / self.copy, drawn / seconds / self.keystream)


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
    known = [case for case in cases() if place.on_gpu or _is_short(case)]
    count, longest = (8, 100_000) if place.on_gpu else (1, 5000)
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
    faults += [*_wrong_digests(place), *_wrong_mixes(place), *_unseen(place)]
    return Found({"cases with the product's bytes": tally, "cases": len(known) + len(new)}, faults)


def _is_short(case: Case) -> bool:
    longest = {"masks": 2048, "noise": 8192, "encoding": 100_003}.get(case.kind, 0)
    return case.length <= longest and (case.kind != "noise" or (case.length > 1 and case.bits == 32))


def _wrong_digests(place: Place) -> Iterator[str]:
    """Yield a sentence if the digests of a vector's tensors are not the product's."""
    # Of 30 words, padding takes a block of its own. Where the last is, one has many leaves.
    sizes = [30, 1, 100] + [3_000_001] * place.on_gpu
    case = Case("masks", 32, sum(sizes))
    found = launches.leaf_digests(_moved(case, place.device), leaf_places(sizes, 4))
    if by_tensor(sizes, 4, found) != tensor_leaves(case.vector(), sizes, ONE_THREAD):
        yield "the digests of tensors are not the product's"


def _wrong_mixes(place: Place) -> Iterator[str]:
    """Yield a sentence for each ring in which a mix of sums is not the product's."""
    rings: tuple[RingBits, RingBits] = (32, 64)
    for bits in rings:
        sums = [np.empty(3_000_001 if place.on_gpu else 5000, ring_dtype(bits)) for _ in MIXED]
        for number, words in enumerate(sums):
            KeyStream(key(f"sum {number}")).into(words)
            # A mix is computed in 64 bits, and what is planned leaves 62 of them free.
            words.view(f"<i{bits // 8}")[:] >>= 0 if bits == 32 else 24
        expected = np.empty_like(sums[0])
        mix_into(sums, MIXED, expected)
        found = mixed_words([torch.from_numpy(words).to(place.device) for words in sums], MIXED)
        if not np.array_equal(found.cpu().numpy().astype(f"<i{bits // 8}").view(expected.dtype), expected):
            yield f"the mix of sums of {bits} bits is not the product's"


def _unseen(place: Place) -> Iterator[str]:
    """Yield a sentence if an encoding does not count what is not finite."""
    values = torch.zeros(5000, device=place.device)
    values[[3, 4998, 4999]] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=place.device)
    found = int(launches.encoded(values, RingSpec(32, -20, 1.0)).unfinite)
    if found != 3:
        yield f"the encoding of 3 values that are not finite counts {found}"


def kernel_speed(place: Place) -> Found:
    """Time each kernel on a vector of `LONG` words; the bytes were compared before."""
    figures: dict[str, object] = {}
    rings: tuple[RingBits, RingBits] = (32, 64)
    for bits in rings:
        values = torch.randn(LONG, dtype=torch.float64, device=place.device)
        spec = RingSpec(bits, -20, 2.0**8)
        vector = launches.encoded(values, spec).vector
        size, other = vector.nbytes, torch.empty_like(vector)
        scale = Scale(2 * size / _seconds(place, partial(other.copy_, vector)), 1e9 * keystream_gb_s(place))
        leaves = leaf_places([LONG // 3, LONG - LONG // 3], vector.itemsize)
        passes: dict[str, tuple[Callable[[], object], int, int]] = {
            "encode": (partial(launches.encoded, values, spec), values.nbytes + size, 0),
            "digests": (partial(launches.leaf_digests, vector, leaves), size, 0),
        }
        for count in (1, 3, 7, 31):
            masks = [(key(f"mask {each}"), 1) for each in range(count)]
            passes[f"{count} masks"] = partial(launches.masked, vector, masks), 2 * size, count * size
        for sigma in (300.0, 2.0**13 + 0.25, 1.5 * 2.0**20, 2.0**33):
            tables = NoiseTables.of(NoiseSampler(sigma, bits), place.device)
            drawn = 2 * LONG * tables.draws
            name, noise = f"noise of {tables.draws} draws", key("noise")
            passes[name] = partial(launches.add_noise, vector, tables, noise), 2 * size, drawn
            both = partial(launches.encoded_with_noise, values, spec, tables, noise)
            passes[f"encode, {name}"] = both, values.nbytes + size, drawn
        speeds = {name: scale.speed(_seconds(place, work), *moved) for name, (work, *moved) in passes.items()}
        together = [(speeds[name].seconds, *passes[name][1:]) for name in ("encode, noise of 3 draws", "3 masks")]
        speeds["encode, noise of 3 draws, and 3 masks"] = scale.speed(*map(sum, zip(*together, strict=True)))
        figures[f"{bits} bits"] = {"copy, bytes a second": scale.copy, **speeds}
    return Found(figures)


def _seconds(place: Place, work: Callable[[], object]) -> float:
    # Elsewhere torch fills memory that it gives, which is one more pass.
    with exact_sums():
        return place.median_s(work, 7)
