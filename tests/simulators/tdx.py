"""Simulated TDX platforms and their vendor, whose quotes and collateral can be wrong in one thing: changed, and then
signed anew."""

import json
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.evidence import Collateral, CollateralBundle
from raycloak.attestation.simulators.tdx_pki import Credential, new_key, raw_point, sign_raw
from raycloak.attestation.simulators.tdx_platform import (
    COMPONENT_SVNS,
    FMSPC,
    QE_ATTRIBUTES,
    QE_MRSIGNER,
    QE_SVN,
    TEE_TCB_SVN,
    SimulatedPlatform,
)
from raycloak.attestation.simulators.tdx_vendor import EVALUATION_NUMBER, SimulatedVendor

_SIGNED_BYTES, _HEADER_BYTES, _QE_REPORT_AT, _QE_REPORT_BYTES = 632, 48, 770, 384


@dataclass(frozen=True, slots=True)
class QuoteVariant:
    """A quote's content about guest and quoting enclave. The defaults pass, any other value is for testing refusals.

    Attributes:
        version: 4, or 5 for a quote with the longer TD 1.5 report. mr_service_td: 48 bytes, in version 5 only.
        tee_tcb_svn, tee_tcb_svn2: 16 bytes, at launch and now. The second is in version 5 only; None repeats the first.
        rtmrs: the four run-time registers, 192 bytes. mr_config_id: 48 bytes.
        td_attributes: 8 bytes. qe_mrsigner: 32 bytes. qe_attributes: 16 bytes.
        foreign_attestation_key: sign with a key that the quoting enclave's report does not certify.
    """

    version: int = 4
    mr_service_td: bytes = bytes(48)
    td_attributes: bytes = bytes.fromhex("0000001000000000")
    tee_tcb_svn: bytes = TEE_TCB_SVN
    tee_tcb_svn2: bytes | None = None
    rtmrs: bytes = bytes(4 * 48)
    mr_config_id: bytes = bytes(48)
    qe_vendor: bytes = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
    qe_mrsigner: bytes = QE_MRSIGNER
    qe_attributes: bytes = QE_ATTRIBUTES
    qe_svn: int = QE_SVN
    foreign_attestation_key: bool = False


GENUINE = QuoteVariant()


class VariantPlatform(SimulatedPlatform):
    """A platform whose quotes can be of any variant."""

    def quote(self, report_data: bytes, measurement: bytes, variant: QuoteVariant = GENUINE) -> bytes:
        genuine = super().quote(report_data, measurement)
        if variant == GENUINE:
            return genuine
        body = bytearray(genuine[_HEADER_BYTES:_SIGNED_BYTES])
        body[0:16], body[120:128] = variant.tee_tcb_svn, variant.td_attributes
        body[184:232], body[328:520] = variant.mr_config_id, variant.rtmrs
        if variant.version == 5:
            current = variant.tee_tcb_svn if variant.tee_tcb_svn2 is None else variant.tee_tcb_svn2
            body = bytearray(_sized(3, bytes(body) + current + variant.mr_service_td))
        header = variant.version.to_bytes(2, "little") + genuine[2:12] + variant.qe_vendor + genuine[28:_HEADER_BYTES]
        behind = _QE_REPORT_AT + _QE_REPORT_BYTES
        enclave = bytearray(genuine[_QE_REPORT_AT:behind])
        enclave[48:64], enclave[128:160] = variant.qe_attributes, variant.qe_mrsigner
        enclave[258:260] = variant.qe_svn.to_bytes(2, "little")
        signed, report = header + bytes(body), bytes(enclave)
        signer = new_key() if variant.foreign_attestation_key else self._attestation_key
        certification = _sized(6, report + self.pck.sign(report) + genuine[behind + 64 :])
        signature = sign_raw(signer, signed) + raw_point(signer.public_key()) + certification
        return signed + len(signature).to_bytes(4, "little") + signature


def _sized(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "little") + len(data).to_bytes(4, "little") + data


@dataclass(frozen=True, slots=True)
class CollateralVariant:
    """The collateral's content. The defaults pass, any other value is for testing refusals.

    Attributes:
        old_module_status: status of the TDX module one version below the newest, which is unknown if None.
        signer: a platform whose PCK key signs TCB info and QE identity instead of the TCB signer.
        revoked_platforms: the platforms whose PCK certificates are on the PCK revocation list.
        revoke_tcb_signer, revoke_platform_ca: put it on the root's revocation list.
    """

    fmspc: bytes = FMSPC
    evaluation_number: int = EVALUATION_NUMBER
    tcb_status: str = "UpToDate"
    advisory_ids: tuple[str, ...] = ()
    component_svns: bytes = COMPONENT_SVNS
    old_module_status: str | None = None
    signer: SimulatedPlatform | None = None
    revoked_platforms: tuple[SimulatedPlatform, ...] = ()
    revoke_tcb_signer: bool = False
    revoke_platform_ca: bool = False


CURRENT = CollateralVariant()


class VariantVendor(SimulatedVendor):
    """A vendor whose platforms and collateral can be of any variant."""

    def platform(self, machine: str | None = None) -> VariantPlatform:
        key = new_key()
        return VariantPlatform.certified(key, self.certify(key.public_key(), machine))

    def collateral(self, now: int, variant: CollateralVariant = CURRENT) -> CollateralBundle:
        return CollateralBundle(tdx=(self.tdx_collateral(now, variant),))

    def tdx_collateral(self, now: int, variant: CollateralVariant = CURRENT) -> Collateral:
        genuine = super().tdx_collateral(now)
        if variant == CURRENT:
            return genuine
        tcb_info, qe_identity = json.loads(genuine.tcb_info), json.loads(genuine.qe_identity)
        for document in (tcb_info, qe_identity):
            document["tcbEvaluationDataNumber"] = variant.evaluation_number
        level, modules = tcb_info["tcbLevels"][0], tcb_info["tdxModuleIdentities"][0]["tcbLevels"]
        tcb_info["fmspc"], level["tcbStatus"] = variant.fmspc.hex(), variant.tcb_status
        level["tcb"]["sgxtcbcomponents"] = [{"svn": svn} for svn in variant.component_svns]
        level |= {"advisoryIDs": list(variant.advisory_ids)} if variant.advisory_ids else {}
        if variant.old_module_status is not None:
            older = {"tcb": {"isvsvn": TEE_TCB_SVN[0] - 1}, "tcbStatus": variant.old_module_status}
            modules.append(modules[0] | older)
        signer = variant.signer.pck if variant.signer else self._tcb_signer
        chain = variant.signer.chain_pem if variant.signer else genuine.tcb_info_issuer_chain
        texts = [canonical_json(document) for document in (tcb_info, qe_identity)]
        choices = ((variant.revoke_tcb_signer, self._tcb_signer), (variant.revoke_platform_ca, self._platform_ca))
        by_root = [credential.certificate for chosen, credential in choices if chosen]
        platforms = [platform.pck.certificate for platform in variant.revoked_platforms]
        window = [datetime.fromisoformat(tcb_info[name]) for name in ("issueDate", "nextUpdate")]
        return genuine.model_copy(
            update={
                "root_ca_crl": new_crl(self._root, by_root, *window, variant.evaluation_number),
                "pck_crl": new_crl(self._platform_ca, platforms, *window, variant.evaluation_number),
                "tcb_info": texts[0].decode(),
                "tcb_info_signature": signer.sign(texts[0]),
                "tcb_info_issuer_chain": chain,
                "qe_identity": texts[1].decode(),
                "qe_identity_signature": signer.sign(texts[1]),
                "qe_identity_issuer_chain": chain,
            }
        )


def new_crl(issuer: Credential, revoked: list[x509.Certificate], start: datetime, end: datetime, number: int) -> bytes:
    """Return the DER of a revocation list with ``revoked`` certificates."""
    builder = x509.CertificateRevocationListBuilder().issuer_name(issuer.certificate.subject)
    builder = builder.last_update(start).next_update(end).add_extension(x509.CRLNumber(number), critical=False)
    for certificate in revoked:
        entry = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number).revocation_date(start)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(issuer.key, SHA256()).public_bytes(Encoding.DER)
