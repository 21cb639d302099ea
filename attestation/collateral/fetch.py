"""Fetches collateral from the services that a policy names, and keeps only what its vendor signed.

Intel's interface (PCS version 4, which a PCCS speaks too) serves documents whose exact bytes are signed. The signers'
chains are in headers. AMD's interface serves revocation lists.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn
from urllib.parse import unquote

from raycloak.attestation.collateral.https_get import FetchError, HttpsResponse
from raycloak.attestation.core.canonical import read_json
from raycloak.attestation.core.evidence import Collateral, CollateralBundle, Refusal, refuse
from raycloak.attestation.policy.collateral_service import CollateralService
from raycloak.attestation.trust.certificates import check_links, crl_der, key_id, load_chain, load_crl, signed_by
from raycloak.attestation.trust.roots import Anchor
from raycloak.metrics.errors import EvidenceError

Get = Callable[[str], HttpsResponse]

_PCK_CHAIN: Final = ("sgx-pck-crl-issuer-chain",)
_TCB_CHAIN: Final = ("tcb-info-issuer-chain", "sgx-tcb-info-issuer-chain")
_QE_CHAIN: Final = ("sgx-enclave-identity-issuer-chain",)


def fetch_collateral(service: CollateralService, anchors: Sequence[Anchor], get: Get) -> CollateralBundle:
    """Fetch what the services publish now about the families that ``service`` names.

    Guarantee: documents and lists about TDX are signed under a root of ``anchors``. Each appraisal judges their
    content, and whether they are current.

    Raises:
        EvidenceError: ``collateral_stale``, with the missing part and the reason.
    """
    roots = {anchor.root_key_id for anchor in anchors if anchor.family == "tdx"}
    client = _Client(get)
    tdx = tuple(_tdx(client, service, fmspc.hex(), roots) for fmspc in service.tdx_families)
    return CollateralBundle(
        tdx=tdx,
        snp_vcek_crls=tuple(_amd_lists(client, service, "vcek")),
        snp_vlek_crls=tuple(_amd_lists(client, service, "vlek")),
    )


def _amd_lists(client: "_Client", service: CollateralService, wanted: str) -> Iterator[bytes]:
    """Fetch the lists for one kind of endorsement key; only their address says which kind they are for."""
    for each in service.snp_lists:
        kind, _, generation = each.partition("/")
        if kind == wanted:
            url = f"{service.amd}/{kind}/v1/{generation}/crl"
            yield client.crl(url, f"{kind.upper()} list of {generation}")[0]


@dataclass(frozen=True, slots=True)
class _Client:
    get: Get

    def ask(self, url: str, what: str) -> HttpsResponse:
        try:
            return self.get(url)
        except FetchError as error:
            _refuse(what, url, str(error))

    def crl(self, url: str, what: str) -> tuple[bytes, HttpsResponse]:
        answer = self.ask(url, what)
        # PCS serves DER or PEM, PCCS hexadecimal digits.
        try:
            return bytes.fromhex(answer.body.decode("ascii").strip()), answer
        except ValueError:
            return crl_der(answer.body), answer

    def document(self, url: str, name: str, chain: Sequence[str]) -> tuple[str, bytes, str]:
        """Return the exact text of a signed document, its signature, and the chain of its signer."""
        answer = self.ask(url, name)
        try:
            text = answer.body.decode()
            signature = bytes.fromhex(read_json(text)["signature"])
            # What is signed is the document's text exactly as written.
            start = text.index("{", text.index(f'"{name}"'))
            _, end = json.JSONDecoder().raw_decode(text, start)
        except (LookupError, TypeError, ValueError, RecursionError):
            _refuse(name, url, "the answer is not a signed document")
        return text[start:end], signature, _chain(answer, chain, name, url)


def _tdx(client: _Client, service: CollateralService, fmspc: str, roots: set[bytes]) -> Collateral:
    sgx, tdx = f"{service.intel}/sgx/certification/v4", f"{service.intel}/tdx/certification/v4"
    pck_url = f"{sgx}/pckcrl?ca={service.pck_ca}&encoding=der"
    pck_crl, answer = client.crl(pck_url, "PCK revocation list")
    root_crl, _ = client.crl(service.root_crl, "root revocation list")
    tcb_info, tcb_signature, tcb_chain = client.document(f"{tdx}/tcb?fmspc={fmspc}", "tcbInfo", _TCB_CHAIN)
    identity, qe_signature, qe_chain = client.document(f"{tdx}/qe/identity", "enclaveIdentity", _QE_CHAIN)
    found = Collateral(
        pck_crl_issuer_chain=_chain(answer, _PCK_CHAIN, "PCK revocation list", pck_url),
        root_ca_crl=root_crl,
        pck_crl=pck_crl,
        tcb_info_issuer_chain=tcb_chain,
        tcb_info=tcb_info,
        tcb_info_signature=tcb_signature,
        qe_identity_issuer_chain=qe_chain,
        qe_identity=identity,
        qe_identity_signature=qe_signature,
    )
    # Checked before it is kept: a mirror's wrong answer must not replace good collateral.
    try:
        _check_signed(found, roots)
    except EvidenceError as error:
        _refuse(f"collateral of family {fmspc}", service.intel or "", error.message)
    # An answer about another family is genuine too, so no signature refuses it.
    if str(json.loads(tcb_info).get("fmspc", "")).lower() != fmspc:
        _refuse(f"collateral of family {fmspc}", service.intel or "", "the TCB info is of another family")
    return found


def _check_signed(found: Collateral, roots: set[bytes]) -> None:
    """Require that every part is signed under one of ``roots``."""
    chains = [
        load_chain(pem, what)
        for pem, what in (
            (found.pck_crl_issuer_chain, "PCK CRL issuer"),
            (found.tcb_info_issuer_chain, "TCB info issuer"),
            (found.qe_identity_issuer_chain, "QE identity issuer"),
        )
    ]
    for chain in chains:
        check_links(chain, "collateral")
        if key_id(chain[-1]) not in roots:
            refuse(Refusal.ROOT_UNKNOWN, "it is signed under a root that the policy does not know")
    load_crl(found.pck_crl, chains[0][0], "PCK")
    load_crl(found.root_ca_crl, chains[0][-1], "root")
    documents = (
        (chains[1], found.tcb_info, found.tcb_info_signature),
        (chains[2], found.qe_identity, found.qe_identity_signature),
    )
    for (signer, *_), text, signature in documents:
        if not signed_by(signer, signature, text.encode()):
            refuse(Refusal.EVIDENCE_TAMPERED, "the signature over a document does not hold")


def _chain(answer: HttpsResponse, names: Sequence[str], what: str, url: str) -> str:
    found = next((answer.headers[name] for name in names if name in answer.headers), None)
    if found is None:
        _refuse(what, url, "the answer has no chain of its signer")
    # Intel sends the PEM text percent-encoded.
    return unquote(found)


def _refuse(what: str, url: str, why: str) -> NoReturn:
    host = url.partition("://")[2].partition("/")[0]
    refuse(Refusal.COLLATERAL_STALE, f"the {what} cannot be fetched from {host}: {why}")
