"""Judges the cases of an index of evidence, each by the verifier of its family.

Guarantee: a case's verdict depends on that case and its files alone, not on the cases before it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from attestation.evidence import STAGES, EvidenceClass, Refusal
from attestation.gpu import GpuClaims
from attestation.snp import SnpClaims
from attestation.tdx import TdxClaims
from attestation.vector_gpu import appraise_gpu
from attestation.vector_index import Case
from attestation.vector_snp import appraise_snp
from attestation.vector_tdx import appraise_tdx
from metrics.errors import ConfigError, EvidenceError

Claims = TdxClaims | SnpClaims | GpuClaims

# One line per family: a function that returns the evidence's claims, or raises EvidenceError.
FAMILIES: Final[Mapping[str, Callable[[Case], Claims]]] = MappingProxyType(
    {
        "sev_snp": appraise_snp,
        "nvidia_gpu": appraise_gpu,
        "tdx": appraise_tdx,
    }
)
LAST_STEP: Final = "result"


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """The verdict on a case.

    Attributes:
        accepted: None if the case could not be appraised.
        evidence_class: class of accepted evidence.
        refusal: code of the first stage that failed; None if none did.
        step: name of that stage, or of the last.
        detail: one sentence for a person; empty for accepted evidence.
        milliseconds: time from reading the case's files to its verdict.
    """

    case: Case
    accepted: bool | None
    evidence_class: EvidenceClass | None
    refusal: str | None
    step: str
    detail: str
    milliseconds: float = 0.0

    @property
    def as_expected(self) -> bool | None:
        """Whether this is the verdict the index expects; None if it expects none."""
        fields = self.case.fields
        if fields.expect is None:
            return None
        return self.accepted is (fields.expect == "accept") and self.refusal == fields.refusal


def check(case: Case) -> CaseVerdict:
    """Appraise one case."""
    started = time.perf_counter()
    verdict = _judge(case)
    return replace(verdict, milliseconds=(time.perf_counter() - started) * 1000)


def _judge(case: Case) -> CaseVerdict:
    appraise = FAMILIES.get(case.fields.family)
    if appraise is None:
        unknown = f"there is no verifier for evidence of family '{case.fields.family}'"
        return CaseVerdict(case, None, None, None, "", case.flaw or unknown)
    try:
        claims = appraise(case)
    except EvidenceError as error:
        return CaseVerdict(case, False, None, error.code, STAGES[Refusal(error.code)], error.message)
    except ConfigError as error:
        return CaseVerdict(case, None, None, None, "", error.message)
    return CaseVerdict(case, True, claims.evidence_class, None, LAST_STEP, "")
