"""Reads and checks Intel's collateral: TCB info, QE identity, revocation lists and the chains of their signers.

One check per stage, so that the verifier can take them in its order. Nothing is judged here about a quote.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from cryptography import x509

from attestation.certificates import (
    check_certificate_windows,
    check_crl_window,
    check_links,
    check_not_revoked,
    check_root,
    common_name,
    crl_number,
    key_id,
    load_chain,
    load_crl,
    remembered,
    signed_by,
)
from attestation.evidence import Collateral, Refusal, refuse
from attestation.floors import Fact, crl_fact
from attestation.tdx_platform import TdxPlatform
from metrics.errors import EvidenceError

TCB_SIGNER: Final = "Intel SGX TCB Signing"
PCK_LEAF: Final = "Intel SGX PCK Certificate"
PCK_ISSUERS: Final = ("Intel SGX PCK Platform CA", "Intel SGX PCK Processor CA")

Chain = tuple[x509.Certificate, ...]


@dataclass(frozen=True, slots=True, eq=False)  # each is read once, so that it stands for its bytes
class TdxDocuments:
    """The two signed documents, read; their signatures are checked by :func:`check_documents`."""

    raw: Collateral
    tcb_info: dict[str, Any]
    qe_identity: dict[str, Any]

    @property
    def fmspc(self) -> str:
        """Lower-case hexadecimal."""
        return str(self.tcb_info.get("fmspc", "")).lower()


@dataclass(frozen=True, slots=True)
class TdxChains:
    """The chains behind a quote and its collateral: leaf first, root last."""

    pck: Chain
    pck_crl: Chain
    tcb_info: Chain
    qe_identity: Chain

    def named(self) -> tuple[tuple[str, Chain], ...]:
        """Each with what it is called in a refusal."""
        names = ("PCK", "PCK CRL issuer", "TCB info issuer", "QE identity issuer")
        return tuple(zip(names, (self.pck, self.pck_crl, self.tcb_info, self.qe_identity), strict=True))


@dataclass(frozen=True, slots=True)
class TdxCrls:
    """Revocation lists whose signatures hold. ``missing`` says why one of them is not there."""

    root: x509.CertificateRevocationList | None
    pck: x509.CertificateRevocationList | None
    missing: str


def documents_for(platform: TdxPlatform | None, collateral: Sequence[Collateral]) -> TdxDocuments | None:
    """The documents for the platform's family, else any that can be read; None if there are none."""
    found = [each for each in map(_read_documents, collateral) if each is not None]
    own = (each for each in found if platform is not None and each.fmspc == platform.fmspc.hex())
    return next(own, found[0] if found else None)


@remembered
def linked_chains(pck: Chain, collateral: Collateral, root_key_id: bytes) -> TdxChains:
    """The chains, each of which leads to the root with that key.

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
        check_root(chain, root_key_id, what)
    if key_id(pck[1]) != key_id(chains.pck_crl[0]):
        refuse(Refusal.CHAIN_BROKEN, "the PCK revocation list is of another issuer than the PCK certificate")
    return chains


def check_family(documents: TdxDocuments, platform: TdxPlatform) -> None:
    """The TCB info is that of TDX platforms of this family; EvidenceError ``platform_mismatch`` otherwise."""
    info = documents.tcb_info
    if info.get("id") != "TDX":
        refuse(Refusal.PLATFORM_MISMATCH, f"the TCB info is about {info.get('id')} platforms, not TDX")
    if documents.fmspc != platform.fmspc.hex() or str(info.get("pceId", "")).lower() != platform.pce_id.hex():
        family = f"{platform.fmspc.hex()}, the collateral of {documents.fmspc}"
        refuse(Refusal.PLATFORM_MISMATCH, f"the platform is of family {family}")


@remembered
def settle(documents: TdxDocuments, chains: TdxChains, now: int) -> tuple[int, tuple[Fact, ...]]:
    """What holds of collateral and chains at ``now``, whatever quote they are for: signatures, roles, nothing revoked.

    Returns: the unix second at which something of this stops being valid, and the numbers of the revocation lists.

    Raises:
        EvidenceError: ``evidence_tampered``, ``signer_role``, ``revoked`` or ``collateral_stale``.
    """
    check_documents(documents, chains)
    crls = load_crls(documents.raw, chains)
    check_roles(chains)
    check_revocation(crls, chains)
    return check_windows(documents, chains, crls, now), crl_facts(crls, chains)


def check_documents(documents: TdxDocuments, chains: TdxChains) -> None:
    """The exact bytes of both documents are signed; EvidenceError ``evidence_tampered`` otherwise."""
    raw = documents.raw
    signatures = {
        "TCB info": signed_by(chains.tcb_info[0], raw.tcb_info_signature, raw.tcb_info.encode()),
        "QE identity": signed_by(chains.qe_identity[0], raw.qe_identity_signature, raw.qe_identity.encode()),
    }
    for what, holds in signatures.items():
        if not holds:
            refuse(Refusal.EVIDENCE_TAMPERED, f"the signature over the {what} does not hold")


def load_crls(collateral: Collateral, chains: TdxChains) -> TdxCrls:
    """The revocation lists; one that cannot be read is noted, and refused by :func:`check_windows` in its turn.

    Raises:
        EvidenceError: ``evidence_tampered`` if a list is not signed by its issuer.
    """
    found: list[x509.CertificateRevocationList | None] = []
    missing = ""
    sources = ((collateral.root_ca_crl, chains.pck[-1], "root"), (collateral.pck_crl, chains.pck_crl[0], "PCK"))
    for der, issuer, what in sources:
        try:
            found.append(load_crl(der, issuer, what))
        except EvidenceError as error:
            if error.code != Refusal.COLLATERAL_STALE:
                raise
            found.append(None)
            missing = error.message
    return TdxCrls(found[0], found[1], missing)


def crl_facts(crls: TdxCrls, chains: TdxChains) -> tuple[Fact, ...]:
    """The numbers of the lists that are there and have one."""
    lists = ((crls.root, chains.pck[-1]), (crls.pck, chains.pck_crl[0]))
    numbered = [(crl_number(crl), issuer) for crl, issuer in lists if crl is not None]
    return tuple(crl_fact(key_id(issuer), number) for number, issuer in numbered if number is not None)


def check_roles(chains: TdxChains) -> None:
    """Each signer has the role that its name gives it; dcap-qvl takes TCB info of any certificate under the root.

    Raises:
        EvidenceError: ``signer_role``.
    """
    roles = {
        "TCB info signer": (chains.tcb_info[0], (TCB_SIGNER,)),
        "QE identity signer": (chains.qe_identity[0], (TCB_SIGNER,)),
        "PCK certificate": (chains.pck[0], (PCK_LEAF,)),
        "PCK issuer": (chains.pck[1], PCK_ISSUERS),
    }
    for role, (certificate, names) in roles.items():
        if common_name(certificate) not in names:
            refuse(Refusal.SIGNER_ROLE, f"'{common_name(certificate)}' may not act as {role}")


def check_revocation(crls: TdxCrls, chains: TdxChains) -> None:
    """No certificate is on a list; EvidenceError ``revoked`` otherwise."""
    if crls.pck is not None:
        check_not_revoked(crls.pck, chains.pck[:1])
    if crls.root is not None:
        check_not_revoked(crls.root, (*chains.pck[1:], chains.tcb_info[0], chains.qe_identity[0]))


def check_windows(documents: TdxDocuments, chains: TdxChains, crls: TdxCrls, now: int) -> int:
    """The unix second at which something of this stops being valid.

    Raises:
        EvidenceError: ``collateral_stale`` if something is not valid at ``now``, or a list is missing.
    """
    if crls.root is None or crls.pck is None:
        refuse(Refusal.COLLATERAL_STALE, crls.missing)
    instant = datetime.fromtimestamp(now, UTC)
    ends = [check_certificate_windows(chain, instant, what) for what, chain in chains.named()]
    ends += [check_crl_window(crls.root, instant, "root"), check_crl_window(crls.pck, instant, "PCK")]
    ends += [_document_window(document, instant) for document in (documents.tcb_info, documents.qe_identity)]
    return int(min(ends).timestamp())


def check_evaluation_number(documents: TdxDocuments, floor: int) -> int:
    """The lower of the two evaluation numbers; EvidenceError ``collateral_rollback`` if it is below ``floor``."""
    both = (documents.tcb_info, documents.qe_identity)
    numbers = [document.get("tcbEvaluationDataNumber") for document in both]
    if not all(type(number) is int and number >= floor for number in numbers):
        refuse(Refusal.COLLATERAL_ROLLBACK, f"collateral of evaluation number {numbers} where {floor} is the lowest")
    return min(int(number) for number in numbers if number is not None)


@remembered
def _read_documents(collateral: Collateral) -> TdxDocuments | None:
    try:
        tcb_info, qe_identity = json.loads(collateral.tcb_info), json.loads(collateral.qe_identity)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tcb_info, dict) or not isinstance(qe_identity, dict):
        return None
    return TdxDocuments(collateral, tcb_info, qe_identity)


def _document_window(document: dict[str, Any], now: datetime) -> datetime:
    try:
        start, end = (datetime.fromisoformat(document[name]) for name in ("issueDate", "nextUpdate"))
        current = start <= now < end
    except (KeyError, TypeError, ValueError):
        refuse(Refusal.COLLATERAL_STALE, "TCB info or QE identity has no readable validity")
    if not current:
        refuse(Refusal.COLLATERAL_STALE, f"the {document.get('id')} collateral is valid from {start} to {end}, not now")
    return end
