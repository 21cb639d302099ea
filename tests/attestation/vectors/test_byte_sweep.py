"""Every file of every accepted case of the recorded index, one byte changed at a time: refused, or it says the same.

A seeded sample of positions in the suite. `RAYCLOAK_ALL_ROUNDS=1` changes every byte once, by a seeded non-zero XOR;
`RAYCLOAK_ALL_ROUNDS=all` tries all other values of every byte.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from raycloak.attestation.vectors.check import FAMILIES, Claims
from raycloak.attestation.vectors.index import VectorCase, read_index
from raycloak.metrics.errors import EvidenceError
from tests.rounds import ALL

VECTORS = Path(__file__).resolve().parents[4] / "shared" / "vectors" / "INDEX.json"
SAMPLE = 20


@dataclass(frozen=True, slots=True)
class Altered(VectorCase):
    """A case in which one of its parts is other bytes than its file holds.

    Attributes:
        part: ``evidence``, ``chain`` and a position, or the name of a file.
    """

    part: str = ""
    data: bytes = b""

    def evidence(self) -> bytes:
        return self.data if self.part == "evidence" else VectorCase.evidence(self)

    def chain(self) -> tuple[bytes, ...]:
        return tuple(
            self.data if self.part == f"chain {position}" else entry
            for position, entry in enumerate(VectorCase.chain(self))
        )

    def file(self, name: str) -> bytes:
        return self.data if self.part == name else VectorCase.file(self, name)


def parts_of(case: VectorCase) -> Iterator[tuple[str, bytes]]:
    """Return the parts of a case, by the names of `Altered`."""
    named = case.fields
    yield "evidence", case.evidence()
    yield from ((f"chain {position}", entry) for position, entry in enumerate(case.chain()))
    if named.collateral is not None:
        yield named.collateral, case.file(named.collateral)
    manifests = (named.rim.driver, named.rim.vbios) if named.rim is not None else ()
    yield from ((name, case.file(name)) for name in manifests if name is not None)
    yield from ((name, case.base64_file(name)) for name in (*(named.ocsp or ()), *(named.crl or ())))


def sweeps() -> list[object]:
    """Return each distinct part of the accepted cases, once."""
    cases = read_index(VECTORS) if VECTORS.is_file() else ()
    seen: dict[bytes, object] = {}
    for case in cases:
        if case.fields.expect == "accept":
            for part, data in parts_of(case):
                seen.setdefault(data, pytest.param(case, part, data, id=f"{case.fields.id}-{part}"))
    absent = pytest.mark.skip(reason="no recorded hardware evidence beside the repository (../shared/vectors)")
    return list(seen.values()) or [pytest.param(None, "", b"", marks=absent, id="absent")]


def changes(data: bytes, seed: str) -> Iterator[tuple[int, int]]:
    """Yield positions and non-zero masks."""
    draw = random.Random(seed)
    if ALL == "all":
        yield from ((position, mask) for position in range(len(data)) for mask in range(1, 256))
    else:
        positions = range(len(data)) if ALL else sorted(draw.sample(range(len(data)), SAMPLE))
        yield from ((position, draw.randrange(1, 256)) for position in positions)


def appraise(case: VectorCase, part: str, data: bytes) -> Claims:
    own = {field.name: getattr(case, field.name) for field in fields(VectorCase)}
    return FAMILIES[case.fields.family](Altered(**own, part=part, data=data))


def bytes_that_count(case: VectorCase, data: bytes) -> int:
    """Return the leading bytes that may not change: what a TDX quote signs; all else with its signature."""
    if case.fields.family == "tdx":
        return 632 if data[0] == 4 else 48 + 6 + 648
    return len(data) if case.fields.family == "sev_snp" else len(data.rstrip(b"\0"))


@pytest.mark.parametrize(("case", "part", "data"), sweeps())
def test_a_changed_byte_is_refused_or_says_the_same(case: VectorCase, part: str, data: bytes) -> None:
    genuine = appraise(case, part, data)
    for position, mask in changes(data, f"{case.fields.id} {part}"):
        changed = bytearray(data)
        changed[position] ^= mask
        try:
            found = appraise(case, part, bytes(changed))
        except EvidenceError:
            continue
        assert part != "evidence" or position >= bytes_that_count(case, data), (position, mask)
        assert found == replace(genuine, steps=found.steps), (position, mask)
