"""Has dcap-qvl verify the whole TDX quote again, under the same rules. Only quotes that both accept pass.

It refuses debug guests, and guests without SEPT_VE_DISABLE, whatever a policy tolerates. It says so after every check
except the platform's status. So for a guest that the rules tolerate, only that refusal is ignored.
`raycloak.attestation.tdx.rating` alone then rates the status.
"""

import re
from collections.abc import Iterator
from typing import Final, NoReturn

import dcap_qvl
from pydantic_core import from_json

from raycloak.attestation.core.evidence import Collateral, Refusal, refuse
from raycloak.attestation.tdx.quote import DEBUG_ATTRIBUTES, SEPT_VE_DISABLE, TdxQuote
from raycloak.attestation.tdx.rules import RELAUNCH_STATUSES, TdxRules
from raycloak.attestation.trust.certificates import remembered
from raycloak.attestation.trust.roots import Anchor

# Our rules decide on statuses, so the library's grace period must not end first.
_FOREVER_S: Final = 2**31
_PREFIX: Final = "Verification failed: "

# The quote is refused whatever the library's text says. The text only selects the name of the refusal.
_TEXT_CODES: Final = (
    (r"^No matching TCB level|TEE_TCB_SVN2|TDX module|^Advisory|^TCB status is invalid", Refusal.TCB_UNACCEPTABLE),
    (r"^TCB status \w+ is not acceptable|TCB too old", Refusal.TCB_STATUS),
    (r"^TCB eval data number", Refusal.COLLATERAL_ROLLBACK),
    (r"^Debug mode", Refusal.DEBUG),
    (r"^SEPT_VE_DISABLE|^TD (profiling|migration)|^SERVTD|TD attributes|not allowed by policy", Refusal.ATTRIBUTES),
    (r"expired|in the future", Refusal.COLLATERAL_STALE),
    (r"^Fmspc mismatch", Refusal.PLATFORM_MISMATCH),
    (r"^Unknown QE vendor", Refusal.ATTESTATION_KEY_UNCERTIFIED),
)


def check_again(
    quote: TdxQuote, collateral: Collateral, anchor: Anchor, now: int, rules: TdxRules, number: int
) -> None:
    """Ask the library, with ``number`` as the lowest evaluation number.

    Raises:
        EvidenceError: the code nearest to the library's text, ``evidence_tampered`` if none is near.
    """
    try:
        verifier = dcap_qvl.QuoteVerifier(anchor.root_der)
        # Every setter returns a new object. Dropping a result would silently drop that limit.
        policy = dcap_qvl.QuotePolicy.strict(now).allow_dynamic_platform(True).allow_cached_keys(True).allow_smt(True)
        policy = policy.min_tcb_eval_data_number(number).reject_advisories(list(rules.rejected_advisories))
        policy = policy.platform_grace_period(_FOREVER_S).qe_grace_period(_FOREVER_S)
        for allowed in rules.tcb_statuses:
            policy = policy.allow_status(allowed)
        claims = verifier.verify_with_policy(quote.raw, _library_collateral(collateral), now, policy)
    except ValueError as error:
        text = str(error).removeprefix(_PREFIX)
        if text in _tolerated(quote, rules):
            return
        _refuse_by_text(text)
    rating = from_json(claims.to_json())
    if bytes(rating["platform"]["root_key_id"]) != anchor.root_key_id:
        refuse(Refusal.CHAIN_BROKEN, "the quote was verified under another root than the anchor")
    status = str(rating["tcb"]["status"])
    # An advised relaunch replaces the status at launch, which the library adds.
    parts = ("qe",) if status in RELAUNCH_STATUSES else ("qe", "platform")
    found = {status, *(str(rating[part]["tcb_level"]["tcbStatus"]) for part in parts)}
    if not found <= set(rules.tcb_statuses):
        refuse(Refusal.TCB_STATUS, f"the quote verifier finds the TCB status {sorted(found)}")


def _tolerated(quote: TdxQuote, rules: TdxRules) -> Iterator[str]:
    """Yield the complaints that the library may have about this guest, because the rules allow it."""
    if rules.allow_debug and quote.report.td_attributes & DEBUG_ATTRIBUTES:
        yield from ("Debug mode is enabled", "TD profiling is enabled", "Reserved bits in TD attributes are set")
    if not rules.require_sept_ve_disable and not quote.report.td_attributes & SEPT_VE_DISABLE:
        yield "SEPT_VE_DISABLE is not enabled"


@remembered
def _library_collateral(collateral: Collateral) -> dcap_qvl.QuoteCollateralV3:
    return dcap_qvl.QuoteCollateralV3(**{name: getattr(collateral, name) for name in Collateral.model_fields})


def _refuse_by_text(text: str) -> NoReturn:
    code = next((code for pattern, code in _TEXT_CODES if re.search(pattern, text)), Refusal.EVIDENCE_TAMPERED)
    refuse(code, f"the quote verifier refuses: {text}")
