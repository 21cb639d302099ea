"""Digests of words that the product's functions give: a device gives the same, and so does every later version.

``python -m benchmarks.gpu.golden`` writes them anew. Words are fixed for ever, so a difference is a fault of the
code, unless CHANGELOG.md says that runs give other bytes.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.keys import Secret
from raycloak.workers.vectors.masks import masked_sum
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.ring import RingBits, RingSpec, RingVector, encode_into, ring_dtype
from raycloak.workers.vectors.streams import MAX_BLOCKS, KeyStream

PATH = Path(__file__).with_name("golden.json")


@dataclass(frozen=True, slots=True)
class Case:
    """Words from inputs that follow from the fields alone.

    Attributes:
        length: d.
        start: first block of each keystream where masks are added; first draw of noise.
        masks: how many are added and subtracted in turns.
        sigma: deviation of the noise in ring units. Its base draws: 1 for 300, 2 for 8192.25, 3 for 1.5 * 2^20, and
            5 for 2^33.
        gamma_log2, units: grid step and clamp of what is encoded.
    """

    kind: Literal["masks", "noise", "encoding", "encoding and noise"]
    bits: RingBits
    length: int
    start: int = 0
    masks: int = 0
    sigma: float = 0.0
    gamma_log2: int = 0
    units: int = 0

    @property
    def name(self) -> str:
        """The case in words, by which the file knows it."""
        details = {
            "from": self.start, "masks": self.masks, "sigma": self.sigma, "gamma 2^": self.gamma_log2,
            "units": self.units,
        }  # fmt: skip
        given = "".join(f", {name} {value}" for name, value in details.items() if value)
        return f"{self.kind} of {self.length} words of {self.bits} bits{given}"

    @property
    def spec(self) -> RingSpec:
        """The ring that values are encoded for."""
        return RingSpec(self.bits, self.gamma_log2, math.ldexp(float(self.units), self.gamma_log2))

    def vector(self) -> RingVector:
        """Return the words that masks or noise are added to."""
        words = np.empty(self.length, ring_dtype(self.bits))
        KeyStream(key("vector")).into(words)
        return words

    def values(self) -> NDArray[np.float64]:
        """Return the values to encode: within and beyond the clamp, ties, tiny ones and both zeros."""
        words = np.empty(self.length, "<i8")
        KeyStream(key("values")).into(words)
        values: NDArray[np.float64] = np.ldexp(words.astype(np.float64), -63) * (1.25 * self.spec.clamp)
        values[::4] = np.ldexp((words[::4] >> 34) + 0.5, self.gamma_log2)
        values[1::16] *= 1e-30
        values[2::64], values[3::64] = 0.0, -0.0
        return values

    def signed_masks(self) -> list[tuple[Secret, int]]:
        """Return the keys of the masks and their signs."""
        return [(key(f"mask {number}"), 1 - 2 * (number % 2)) for number in range(self.masks)]

    def noise_key(self) -> Secret:
        """Return the key of the noise."""
        return key("noise")


def key(label: str) -> Secret:
    """Return a key that everyone knows."""
    return Secret(hashlib.sha256(label.encode()).digest())


def cases() -> Iterator[Case]:
    """Yield every case of the file."""
    rings: tuple[RingBits, RingBits] = (32, 64)
    for bits in rings:
        for length, masks, start in (
            (1, 1, 0), (1000, 2, 0), (65_537, 7, 0), (300_000, 3, 1), (2048, 1, MAX_BLOCKS - 256)
        ):  # fmt: skip
            yield Case("masks", bits, length, start, masks=masks)
        for sigma in (300.0, 2.0**13 + 0.25, 1.5 * 2.0**20, 2.0**33):
            for length, start in ((1, 0), (8192, 0), (100_001, 0), (50_000, 8191), (9000, 2**26 + 5)):
                yield Case("noise", bits, length, start, sigma=sigma)
        for gamma_log2, units in ((-20, 2**28 if bits == 32 else 2**50), (-40, 2**24), (3, 12_345 << 5)):
            yield Case("encoding", bits, 100_003, gamma_log2=gamma_log2, units=units)
        yield Case("encoding and noise", bits, 100_001, sigma=1.5 * 2.0**20, gamma_log2=-20, units=2**28)


def random_cases(seed: int, count: int, longest: int) -> Iterator[Case]:
    """Yield ``count`` cases of each kind that are in no file."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        bits: Any = int(draw.choice([32, 64]))
        length, start = int(draw.integers(1, longest)), int(draw.choice([0, 1, 8191, 100_003, 2**26 + 5]))
        sigma = float(2.0 ** draw.uniform(4, 40))
        grid = {
            "gamma_log2": int(draw.integers(-40, 10)),
            "units": int(draw.integers(1, 2**24)) << int(draw.integers(0, 7 if bits == 32 else 38)),
        }
        yield Case("masks", bits, length, start, masks=int(draw.integers(1, 8)))
        yield Case("noise", bits, length, start, sigma=sigma)
        yield Case("encoding", bits, length, **grid)
        yield Case("encoding and noise", bits, length, sigma=sigma, **grid)


def words_of(case: Case) -> RingVector:
    """Compute a case by the product's functions."""
    if case.kind == "masks":
        out = case.vector()
        if case.start == 0:
            masked_sum([out], case.signed_masks(), out)
            return out
        # The product's masks begin at block 0; these show where a counter ends.
        mask = np.empty_like(out)
        for secret, sign in case.signed_masks():
            KeyStream(secret, block_counter=case.start).into(mask)
            (np.add if sign > 0 else np.subtract)(out, mask, out=out)
        return out
    if case.kind == "noise":
        out = case.vector()
    else:
        out = np.empty(case.length, ring_dtype(case.bits))
        encode_into(case.values(), case.spec, out)
    if case.sigma:
        NoiseSampler(case.sigma, case.bits).add_to(out, case.noise_key(), start=case.start)
    return out


def digest(words: RingVector) -> str:
    """Return the SHA-256 of words, in hexadecimal digits."""
    return hashlib.sha256(words.tobytes()).hexdigest()


def stored() -> dict[str, str]:
    """Return the digests of the file, by the name of the case."""
    found: dict[str, str] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    digests = {case.name: digest(words_of(case)) for case in cases()}
    PATH.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    print(f"{PATH}: {len(digests)} digests")
