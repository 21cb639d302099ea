"""A vendor of simulated TDX platforms, for machines without a TEE.

It has its own root, which it keeps in a file that only its owner may read. It certifies platforms and publishes
collateral. Its evidence has the genuine format and goes through the verifier of hardware evidence. It proves nothing
about a machine: anyone who reads the file can sign anything. Every subject says ``O=SIMULATOR - NOT A TEE``.
"""

import hashlib
import os
import threading
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import ClassVar, Final, Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from raycloak.attestation.core.canonical import canonical_json, length_prefixed
from raycloak.attestation.core.evidence import Collateral, CollateralBundle
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.files.private import publish, read_private
from raycloak.attestation.simulators.tdx_pki import (
    Credential,
    StoredCredential,
    empty_crl,
    new_key,
    new_platform_ca,
    new_root,
    new_tcb_signer,
)
from raycloak.attestation.simulators.tdx_platform import (
    COMPONENT_SVNS,
    FMSPC,
    PCE_SVN,
    QE_ATTRIBUTES,
    QE_MRSIGNER,
    QE_PRODUCT,
    QE_SVN,
    TEE_TCB_SVN,
    PlatformCertificate,
    SimulatedPlatform,
    certify,
)
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.metrics.file_errors import file_error

VENDOR_FILE: Final = "vendor.json"
EVALUATION_NUMBER: Final = 18
COLLATERAL_AGE_S: Final = 3600  # so that nodes' clocks may differ
COLLATERAL_LIFETIME_S: Final = 30 * 24 * 3600
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_UP_TO_DATE: Final = {"tcbDate": "2026-01-01T00:00:00Z", "tcbStatus": "UpToDate"}
_MODULE: Final = {"mrsigner": "00" * 48, "attributes": "00" * 8, "attributesMask": "ff" * 8}
_MODULE_LEVELS: Final = [{"tcb": {"isvsvn": TEE_TCB_SVN[0]}, **_UP_TO_DATE}]
_TCB: Final = {
    "sgxtcbcomponents": [{"svn": svn} for svn in COMPONENT_SVNS],
    "tdxtcbcomponents": [{"svn": svn} for svn in TEE_TCB_SVN],
    "pcesvn": PCE_SVN,
}
# The two documents, but for their window.
_TCB_INFO: Final = {
    "id": "TDX",
    "version": 3,
    "tcbEvaluationDataNumber": EVALUATION_NUMBER,
    "fmspc": FMSPC.hex(),
    "pceId": "0000",
    "tcbType": 0,
    "tdxModule": _MODULE,
    "tdxModuleIdentities": [{"id": f"TDX_{TEE_TCB_SVN[1]:02X}", **_MODULE, "tcbLevels": _MODULE_LEVELS}],
    "tcbLevels": [{"tcb": _TCB, **_UP_TO_DATE}],
}
_QE_IDENTITY: Final = {
    "id": "TD_QE",
    "version": 2,
    "tcbEvaluationDataNumber": EVALUATION_NUMBER,
    "miscselect": "00" * 4,
    "miscselectMask": "ff" * 4,
    "attributes": QE_ATTRIBUTES[:8].hex() + "00" * 8,
    "attributesMask": "fb" + "ff" * 7 + "00" * 8,
    "mrsigner": QE_MRSIGNER.hex(),
    "isvprodid": QE_PRODUCT,
    "tcbLevels": [{"tcb": {"isvsvn": QE_SVN}, **_UP_TO_DATE}],
}


class VendorKeys(Message):
    """The vendor file's content."""

    DOMAIN: ClassVar[str] = "raycloak/simulator/vendor/v1"

    root: StoredCredential
    platform_ca: StoredCredential
    tcb_signer: StoredCredential


class SimulatedVendor:
    """The root, platform CA and TCB signer of one simulated vendor."""

    def __init__(self, root: Credential, platform_ca: Credential, tcb_signer: Credential) -> None:
        self._root = root
        self._platform_ca = platform_ca
        self._tcb_signer = tcb_signer

    @classmethod
    def create(cls) -> Self:
        """Make a new vendor, held in memory only."""
        root = new_root()
        return cls(root, new_platform_ca(root), new_tcb_signer(root))

    @classmethod
    def load_or_create(cls, directory: Path) -> Self:
        """Load the vendor whose keys are in ``directory``; the first caller creates it.

        Guarantee: all callers, also concurrent ones, get the same root. Only the owner can read the file.

        Raises:
            ConfigError: ``simulator_state`` if the file is damaged, cannot be used, or others may read it.
        """
        path = directory / VENDOR_FILE
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                publish(path, cls.create()._stored().encode())
            keys = parse(VendorKeys, read_private(path, "simulator_state"))
            return cls(*map(Credential.load, (keys.root, keys.platform_ca, keys.tcb_signer)))
        except OSError as error:
            raise file_error("simulator_state", "use", path, error) from None
        except (ProtocolError, ValueError, TypeError, UnsupportedAlgorithm):
            raise ConfigError("simulator_state", f"{path} is damaged.", "Remove it to get a new simulator.") from None

    @property
    def root_der(self) -> bytes:
        """The root certificate, which a policy names as anchor of class ``simulated``."""
        return self._root.certificate.public_bytes(Encoding.DER)

    def platform(self, machine: str | None = None) -> SimulatedPlatform:
        """Make a new platform under this vendor. A node needs one.

        Args:
            machine: name of the machine that it stands for; all platforms of one name have the same identity. None for
                a machine that is used only once.
        """
        key = new_key()
        return SimulatedPlatform.certified(key, self.certify(key.public_key(), machine))

    def certify(self, key: EllipticCurvePublicKey, machine: str | None = None) -> PlatformCertificate:
        """Certify the key that a platform made for itself, so that no other process has it; see :meth:`platform`."""
        return certify(self._platform_ca, self._root, key, machine)

    def collateral(self, now: int) -> CollateralBundle:
        """Return everything the vendor publishes at unix second ``now``; see :meth:`tdx_collateral`."""
        return CollateralBundle(tdx=(self.tdx_collateral(now),))

    def tdx_collateral(self, now: int) -> Collateral:
        """Return what the vendor publishes about its TDX platforms at unix second ``now``.

        Valid from one hour before, so that nodes' clocks may differ, to 30 days after.
        """
        instant = datetime.fromtimestamp(now, UTC)
        start, end = instant - timedelta(seconds=COLLATERAL_AGE_S), instant + timedelta(seconds=COLLATERAL_LIFETIME_S)
        window = {"issueDate": start.strftime(_TIME), "nextUpdate": end.strftime(_TIME)}
        tcb_info, qe_identity = canonical_json(_TCB_INFO | window), canonical_json(_QE_IDENTITY | window)
        signer_chain = self._tcb_signer.pem + self._root.pem
        return Collateral(
            pck_crl_issuer_chain=self._platform_ca.pem + self._root.pem,
            root_ca_crl=empty_crl(self._root, start, end, EVALUATION_NUMBER),
            pck_crl=empty_crl(self._platform_ca, start, end, EVALUATION_NUMBER),
            tcb_info_issuer_chain=signer_chain,
            tcb_info=tcb_info.decode(),
            tcb_info_signature=self._tcb_signer.sign(tcb_info),
            qe_identity_issuer_chain=signer_chain,
            qe_identity=qe_identity.decode(),
            qe_identity_signature=self._tcb_signer.sign(qe_identity),
        )

    def _stored(self) -> VendorKeys:
        return VendorKeys(
            root=self._root.store(), platform_ca=self._platform_ca.store(), tcb_signer=self._tcb_signer.store()
        )


def code_measurement(root: Path | None = None) -> bytes:
    """Compute SHA-384 (48 bytes) over names and content of the Python files below ``root``.

    A simulated platform reports it as ``mr_td``, and the default policy pins it. So two machines with different
    versions of the code refuse each other. The files are read once per process, also if several threads ask first.

    Args:
        root: folder of the package ``raycloak``; by default the one that was imported.
    """
    with _MEASURING:
        return _measured(root)


# Two threads that ask first would each read all files.
_MEASURING: Final = threading.Lock()


@cache
def _measured(root: Path | None) -> bytes:
    base = root or Path(__file__).absolute().parents[2]
    # In a checkout the four packages are links, which `Path.rglob` does not follow.
    folders = ((Path(folder), names) for folder, _, names in os.walk(base, followlinks=True))
    files = (folder / name for folder, names in folders for name in names if name.endswith(".py"))
    named = sorted((path.relative_to(base).as_posix(), path) for path in files)
    fields = [field for name, path in named for field in (name, path.read_bytes())]
    return hashlib.sha384(length_prefixed("raycloak/code-measurement/v1", *fields)).digest()
