"""Compares a guest's verified claims with the expectations of a case of an index."""

from collections.abc import Sequence
from typing import Protocol

from attestation.evidence import Refusal, refuse
from attestation.vector_index import Case


class GuestClaims(Protocol):
    """The result of every guest verifier: 48 bytes of measurement and 64 of report data."""

    @property
    def measurement(self) -> bytes: ...
    @property
    def report_data(self) -> bytes: ...


def compare(case: Case, claims: GuestClaims, measurements: Sequence[bytes] | None) -> None:
    """Refuse a measurement that is not one of ``measurements``, and unexpected report data.

    Raises:
        EvidenceError: ``measurement_unknown`` or ``key_not_bound``.
    """
    if measurements is not None and claims.measurement not in [value for value in measurements if any(value)]:
        refuse(Refusal.MEASUREMENT_UNKNOWN, f"measurement {claims.measurement.hex()} is not a reference value")
    if case.report_data is not None and claims.report_data != case.report_data:
        refuse(Refusal.KEY_NOT_BOUND, "the report data is not the expected one")
