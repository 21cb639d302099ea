"""Recorded TDX quotes and collateral, one byte changed at a time.

A seeded sample of positions in the suite; every position with RAYCLOAK_LONG_SWEEP set.
"""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from attestation.evidence import Collateral
from attestation.tdx import TdxClaims, verify_tdx
from attestation.tdx_rules import TdxRules
from attestation.vector_index import Case, read_index
from metrics.errors import EvidenceError

SAMPLE = 40
GENUINE = ("tdx-near-uptodate", "tdx-cos-uptodate", "tdx-dcaprs-outofdate-tolerated", "tdx-sim-allowed-v5")


@pytest.fixture(params=GENUINE)
def case(request: pytest.FixtureRequest, vectors: Path) -> Case:
    return next(each for each in read_index(vectors / "INDEX.json") if each.fields.id == request.param)


def appraise(case: Case, quote: bytes, collateral: Collateral) -> TdxClaims:
    return verify_tdx(
        quote,
        (collateral,),
        anchors=case.anchors("tdx"),
        accepted=case.accepted,
        rules=case.rules(TdxRules),
        now=case.now,
    )


def positions(size: int, draw: random.Random) -> list[int]:
    return list(range(size)) if os.environ.get("RAYCLOAK_LONG_SWEEP") else sorted(draw.sample(range(size), SAMPLE))


def collateral_of(case: Case) -> Collateral:
    return Collateral.from_json(case.file(case.fields.collateral or "").decode())


def test_a_changed_byte_of_a_quote_is_refused_or_says_the_same(case: Case) -> None:
    quote, collateral, draw = case.evidence(), collateral_of(case), random.Random(case.fields.id)
    genuine = appraise(case, quote, collateral)
    for position in positions(len(quote.rstrip(b"\0")), draw):
        changed = bytearray(quote)
        changed[position] ^= draw.randrange(1, 256)
        try:
            found = appraise(case, bytes(changed), collateral)
        except EvidenceError:
            continue
        assert position >= genuine_signed_bytes(quote), position
        assert found == replace(genuine, steps=found.steps), position


def genuine_signed_bytes(quote: bytes) -> int:
    return 632 if quote[0] == 4 else 48 + 6 + 648


@pytest.mark.parametrize("name", ["tcb_info", "qe_identity", "root_ca_crl", "pck_crl"])
def test_a_changed_byte_of_collateral_is_refused(case: Case, name: str) -> None:
    quote, collateral, draw = case.evidence(), collateral_of(case), random.Random(name)
    original = getattr(collateral, name)
    raw = original.encode() if isinstance(original, str) else original
    for position in positions(len(raw), draw)[:: 1 if os.environ.get("RAYCLOAK_LONG_SWEEP") else 4]:
        changed = bytearray(raw)
        changed[position] ^= draw.randrange(1, 128)
        value = changed.decode("latin-1") if isinstance(original, str) else bytes(changed)
        with pytest.raises(EvidenceError):
            appraise(case, quote, collateral.model_copy(update={name: value}))
