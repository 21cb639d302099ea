"""Numbers of a vendor's collateral that may only rise: evaluation numbers of documents, numbers of revocation lists.

A fact's name contains its root or issuer, so that a simulator's numbers say nothing about a vendor's. It also contains
the document or list, because vendors publish for each platform family at its own pace. A verifier keeps the highest
number it has seen of each (`raycloak.attestation.orchestrator.collateral_memory`). The check itself is a pure function.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from raycloak.attestation.core.evidence import Refusal, refuse

Fact = tuple[str, int]
"""A name and a number."""

Floors = Mapping[str, int]
"""The highest number seen, by name. A name without an entry has no floor."""

NO_FLOORS: Final[Floors] = MappingProxyType({})


def evaluation_fact(root_key_id: bytes, document: str, number: int) -> Fact:
    """Return the fact for the ``tcbEvaluationDataNumber`` of one document under one root."""
    # The name is a key of the site's book. Another wording would begin a new floor.
    return f"evaluation number of the {document} under {root_key_id.hex()[:16]}", number


def crl_fact(issuer_key_id: bytes, scope: str, number: int) -> Fact:
    """Return the fact for an issuer's revocation list; ``scope`` tells the lists of one issuer apart."""
    of = f" for {scope}" if scope else ""
    # A key of the site's book as well.
    return f"revocation list of {issuer_key_id.hex()[:16]}{of}", number


class SeenFacts:
    """The floors of a verifier without storage: the highest numbers since it was started."""

    def __init__(self) -> None:
        self.floors: Floors = NO_FLOORS

    def keep(self, facts: Sequence[Fact]) -> None:
        """Raise the floors to the numbers of verified collateral. A lower number changes nothing."""
        floors = dict(self.floors)
        for name, number in facts:
            floors[name] = max(number, floors.get(name, number))
        self.floors = floors


def check_not_older(facts: Sequence[Fact], floors: Floors) -> None:
    """Require that no number is below its floor; EvidenceError ``collateral_rollback`` otherwise."""
    for name, number in facts:
        if number < floors.get(name, 0):
            refuse(Refusal.COLLATERAL_ROLLBACK, f"{name}: {number}, where {floors[name]} was seen before")
