"""Reads and checks Intel's collateral: TCB info, QE identity, revocation lists and the chains of their signers.

Nothing is judged here about a quote.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from cryptography import x509

from raycloak.attestation.core.evidence import Collateral, Refusal, refuse
from raycloak.attestation.tdx.platform import TdxPlatform
from raycloak.attestation.trust.certificates import (
    check_certificate_windows,
    check_crl_window,
    check_links,
    check_not_revoked,
    common_name,
    crl_number,
    crl_scope,
    key_id,
    load_chain,
    load_crl,
    remembered,
    signed_by,
)
from raycloak.attestation.trust.floors import Fact, crl_fact, evaluation_fact
from raycloak.metrics.errors import EvidenceError

Chain = tuple[x509.Certificate, ...]


@dataclass(frozen=True, slots=True, eq=False)  # each is read once, so identity stands for equal bytes
class TdxDocuments:
    """The two signed documents, parsed. Their signatures are checked by :func:`settle`.

    An unreadable document is empty here. Its signature is judged first, and shows whether it was tampered with. A
    document without a validity is stale.
    """

    raw: Collateral
    tcb_info: dict[str, Any]
    qe_identity: dict[str, Any]

    @property
    def fmspc(self) -> str:
        """The platform family in lower-case hexadecimal."""
        return str(self.tcb_info.get("fmspc", "")).lower()


@dataclass(frozen=True, slots=True, eq=False)  # as for the documents
class TdxChains:
    """The chains behind a quote and its collateral: leaf first, root last."""

    pck: Chain
    pck_crl: Chain
    tcb_info: Chain
    qe_identity: Chain

    def named(self) -> Iterator[tuple[str, Chain]]:
        """Yield each chain with its name in a refusal."""
        names = ("PCK", "PCK CRL issuer", "TCB info issuer", "QE identity issuer")
        yield from zip(names, (self.pck, self.pck_crl, self.tcb_info, self.qe_identity), strict=True)


def documents_for(platform: TdxPlatform | None, collateral: Sequence[Collateral]) -> TdxDocuments | None:
    """Return the documents for the platform's family, else any readable ones, else any; None if there are none.

    Of several editions for one family the newest counts, so the order of files makes no difference.
    """
    found = [_read_documents(each) for each in collateral]
    own = [each for each in found if platform is not None and each.fmspc == platform.fmspc.hex()]
    readable = [each for each in found if each.tcb_info]
    return next(iter((*sorted(own, key=_edition_of, reverse=True), *readable, *found)), None)


def _edition_of(documents: TdxDocuments) -> tuple[int, str]:
    """Return its number, and the end of its validity, a time in one notation. Nothing of it is verified yet."""
    number = documents.tcb_info.get("tcbEvaluationDataNumber")
    return number if type(number) is int else 0, str(documents.tcb_info.get("nextUpdate", ""))


@remembered
def with_newest_lists(documents: TdxDocuments, chains: TdxChains, collateral: tuple[Collateral, ...]) -> TdxDocuments:
    """Return the documents with the newest editions of their two revocation lists in any of ``collateral``.

    Collateral of several families, fetched at different times, has common issuers' lists in several editions.
    """
    raw = documents.raw
    others = [each for each in collateral if each != raw]
    newest = {
        "root_ca_crl": _newest(raw.root_ca_crl, [each.root_ca_crl for each in others], chains.pck[-1]),
        "pck_crl": _newest(raw.pck_crl, [each.pck_crl for each in others], chains.pck_crl[0]),
    }
    changed = {name: der for name, der in newest.items() if der != getattr(raw, name)}
    return replace(documents, raw=raw.model_copy(update=changed)) if changed else documents


def _newest(own: bytes, others: Sequence[bytes], issuer: x509.Certificate) -> bytes:
    """Return the newest list: ``own``, or one of ``others`` that ``issuer`` signed for the same purpose."""
    best, scope = _edition(own, issuer)
    for der in dict.fromkeys(others):
        number, found = _edition(der, issuer)
        if best is not None and number is not None and found == scope and number > best:
            own, best = der, number
    return own


def _edition(der: bytes, issuer: x509.Certificate) -> tuple[int | None, str]:
    try:
        crl = load_crl(der, issuer, "")
    except EvidenceError:
        return None, ""
    return crl_number(crl), crl_scope(crl)


@remembered
def linked_chains(pck: Chain, collateral: Collateral, root_key_id: bytes) -> TdxChains:
    """Return the chains, after checking that each leads to the root with that key.

    Raises:
        EvidenceError: ``chain_broken``.
    """
    chains = TdxChains(
        pck=pck,
        pck_crl=load_chain(collateral.pck_crl_issuer_chain, "PCK CRL issuer"),
        tcb_info=load_chain(collateral.tcb_info_issuer_chain, "TCB info issuer"),
        qe_identity=load_chain(collateral.qe_identity_issuer_chain, "QE identity issuer"),
    )
    for what, chain in chains.named():
        check_links(chain, what)
        if key_id(chain[-1]) != root_key_id:
            refuse(Refusal.CHAIN_BROKEN, f"the {what} chain does not end in the root that vouches for the quote")
    if key_id(pck[1]) != key_id(chains.pck_crl[0]):
        refuse(Refusal.CHAIN_BROKEN, "the PCK revocation list is of another issuer than the PCK certificate")
    return chains


def check_family(documents: TdxDocuments, platform: TdxPlatform) -> None:
    """Require that readable TCB info is of this family; EvidenceError ``platform_mismatch`` otherwise."""
    info = documents.tcb_info
    if not info:
        return
    if info.get("id") != "TDX":
        refuse(Refusal.PLATFORM_MISMATCH, f"the TCB info is about {info.get('id')} platforms, not TDX")
    if documents.fmspc != platform.fmspc.hex() or str(info.get("pceId", "")).lower() != platform.pce_id.hex():
        family = f"{platform.fmspc.hex()}, the collateral of {documents.fmspc}"
        refuse(Refusal.PLATFORM_MISMATCH, f"the platform is of family {family}")


@remembered
def settle(documents: TdxDocuments, chains: TdxChains, now: int) -> tuple[int, tuple[Fact, ...]]:
    """Check collateral and chains at ``now``, for any quote: signatures, roles, revocation and validity.

    Returns: the unix second at which a part of this stops being valid, and the numbers of the revocation lists.

    Raises:
        EvidenceError: ``evidence_tampered``, ``signer_role``, ``revoked`` or ``collateral_stale``.
    """
    raw = documents.raw
    signed = {
        "TCB info": (chains.tcb_info[0], raw.tcb_info_signature, raw.tcb_info),
        "QE identity": (chains.qe_identity[0], raw.qe_identity_signature, raw.qe_identity),
    }
    # The exact bytes are signed.
    for what, (signer, signature, text) in signed.items():
        if not signed_by(signer, signature, text.encode()):
            refuse(Refusal.EVIDENCE_TAMPERED, f"the signature over the {what} does not hold")
    crls, missing = dict[str, x509.CertificateRevocationList](), ""
    issuers = {"root": (raw.root_ca_crl, chains.pck[-1]), "PCK": (raw.pck_crl, chains.pck_crl[0])}
    for what, (der, issuer) in issuers.items():
        try:
            crls[what] = load_crl(der, issuer, what)
        except EvidenceError as error:
            # A bad signature is refused now. A missing list is refused later, by the stage of validity.
            if error.code != Refusal.COLLATERAL_STALE:
                raise
            missing = error.message
    _check_roles(chains)
    listed = {"PCK": chains.pck[:1], "root": (*chains.pck[1:], chains.tcb_info[0], chains.qe_identity[0])}
    for what, crl in crls.items():
        check_not_revoked(crl, listed[what])
    if missing:
        refuse(Refusal.COLLATERAL_STALE, missing)
    instant = datetime.fromtimestamp(now, UTC)
    ends = [check_certificate_windows(chain, instant, what) for what, chain in chains.named()]
    ends += [check_crl_window(crl, instant, what) for what, crl in crls.items()]
    ends += [_document_window(document, instant) for document in (documents.tcb_info, documents.qe_identity)]
    numbers = [(issuers[what][1], crl, crl_number(crl)) for what, crl in crls.items()]
    facts = [crl_fact(key_id(issuer), crl_scope(crl), number) for issuer, crl, number in numbers if number is not None]
    return int(min(ends).timestamp()), tuple(facts)


def _check_roles(chains: TdxChains) -> None:
    """Require that each signer has the role in its name. dcap-qvl accepts TCB info of any certificate under the root.

    Raises:
        EvidenceError: ``signer_role``.
    """
    signer, authorities = ("Intel SGX TCB Signing",), ("Intel SGX PCK Platform CA", "Intel SGX PCK Processor CA")
    roles = {
        "TCB info signer": (chains.tcb_info[0], signer),
        "QE identity signer": (chains.qe_identity[0], signer),
        "PCK certificate": (chains.pck[0], ("Intel SGX PCK Certificate",)),
        "PCK issuer": (chains.pck[1], authorities),
    }
    for role, (certificate, names) in roles.items():
        if common_name(certificate) not in names:
            refuse(Refusal.SIGNER_ROLE, f"'{common_name(certificate)}' may not act as {role}")


def evaluation_facts(documents: TdxDocuments, root_key_id: bytes, floor: int) -> tuple[Fact, Fact]:
    """Return the evaluation numbers of TCB info and QE identity, each named after its document.

    Raises:
        EvidenceError: ``collateral_rollback`` if one of them is below ``floor``, or is not a number.
    """
    numbers = [document.get("tcbEvaluationDataNumber") for document in (documents.tcb_info, documents.qe_identity)]
    tcb_info, qe_identity = (number if type(number) is int else -1 for number in numbers)
    if min(tcb_info, qe_identity) < floor:
        refuse(Refusal.COLLATERAL_ROLLBACK, f"collateral of evaluation number {numbers} where {floor} is the lowest")
    return (
        evaluation_fact(root_key_id, f"TCB info for {documents.fmspc}", tcb_info),
        evaluation_fact(root_key_id, f"QE identity {documents.qe_identity.get('id')}", qe_identity),
    )


@remembered
def _read_documents(collateral: Collateral) -> TdxDocuments:
    return TdxDocuments(collateral, _read(collateral.tcb_info), _read(collateral.qe_identity))


def _read(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _document_window(document: dict[str, Any], now: datetime) -> datetime:
    try:
        start, end = (datetime.fromisoformat(document[name]) for name in ("issueDate", "nextUpdate"))
        # A document is no longer valid in the second of its next update. dcap-qvl still takes it then.
        current = start <= now < end
    except (KeyError, TypeError, ValueError):
        refuse(Refusal.COLLATERAL_STALE, "TCB info or QE identity has no readable validity")
    if not current:
        refuse(
            Refusal.COLLATERAL_STALE,
            f"the {document.get('id')} collateral is valid from {start} to {end}, not now",
        )
    return end
