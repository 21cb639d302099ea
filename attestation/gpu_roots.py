"""NVIDIA's roots, pinned: one certifies devices, the other the signers of reference values (RIM)."""

from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

_ANCHORS: Final = Path(__file__).resolve().parent / "anchors"


def _read(name: str) -> bytes:
    return x509.load_pem_x509_certificate((_ANCHORS / name).read_bytes()).public_bytes(Encoding.DER)


NVIDIA_DEVICE_ROOT_DER: Final = _read("nvidia_device_identity_ca.pem")
NVIDIA_RIM_ROOT_DER: Final = _read("nvidia_corim_signing_root_ca.pem")
