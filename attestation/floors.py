"""Numbers of a vendor's collateral that may only rise: evaluation numbers of documents, numbers of revocation lists.

A fact is named after its root or issuer, so that a simulator's numbers say nothing about a vendor's, and after the
document or list that it is the number of: vendors publish for each platform family in its own time. Whoever verifies
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


def evaluation_fact(root_key_id: bytes, document: str, number: int) -> Fact:
    """``tcbEvaluationDataNumber`` of one document under one root."""
    return f"evaluation number of the {document} under {root_key_id.hex()[:16]}", number


def crl_fact(issuer_key_id: bytes, scope: str, number: int) -> Fact:
    """Number of an issuer's revocation list; ``scope`` tells the lists of one issuer apart."""
    of = f" for {scope}" if scope else ""
    return f"revocation list of {issuer_key_id.hex()[:16]}{of}", number


def highest(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Of facts of one name the highest, as of two editions of one list the newer one counts."""
    found: dict[str, int] = {}
    for name, number in facts:
        found[name] = max(number, found.get(name, number))
    return tuple(found.items())


class SeenFacts:
    """The floors of a verifier that keeps nothing on disk: what it has seen since it was started."""

    def __init__(self) -> None:
        self.floors: Floors = NO_FLOORS

    def keep(self, facts: Sequence[Fact]) -> None:
        """Raise the floors to the numbers of collateral that verified; a lower number changes nothing."""
        self.floors = dict(highest((*self.floors.items(), *facts)))


def check_not_older(facts: Sequence[Fact], floors: Floors) -> None:
    """No number is below its floor; EvidenceError ``collateral_rollback`` otherwise."""
    for name, number in facts:
        if number < floors.get(name, 0):
            refuse(Refusal.COLLATERAL_ROLLBACK, f"{name}: {number}, where {floors[name]} was seen before")
