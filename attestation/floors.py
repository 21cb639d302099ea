"""Numbers of a vendor's collateral that may only rise: evaluation numbers of TCB info, numbers of revocation lists.

A fact is named after its root or issuer, so that a simulator's numbers say nothing about a vendor's. Whoever verifies
keeps the highest it has seen of each (`attestation.fact_book`); the check itself is a pure function.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attestation.evidence import Refusal, refuse

Fact = tuple[str, int]
"""Name and number."""

Floors = Mapping[str, int]
"""The highest number seen by name; a name that is not in it has no floor."""

NO_FLOORS: Final[Floors] = MappingProxyType({})


def evaluation_fact(root_key_id: bytes, number: int) -> Fact:
    """``tcbEvaluationDataNumber`` of the collateral under one root."""
    return f"evaluation number under {root_key_id.hex()[:16]}", number


def crl_fact(issuer_key_id: bytes, number: int) -> Fact:
    """Number of an issuer's revocation list."""
    return f"revocation list of {issuer_key_id.hex()[:16]}", number


def check_not_older(facts: Sequence[Fact], floors: Floors) -> None:
    """No number is below its floor; EvidenceError ``collateral_rollback`` otherwise."""
    for name, number in facts:
        if number < floors.get(name, 0):
            refuse(Refusal.COLLATERAL_ROLLBACK, f"{name}: {number}, where {floors[name]} was seen before")
