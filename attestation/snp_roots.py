"""AMD's pinned certificates: a root (ARK) per generation of processors, and below it one CA (ASK) per kind of key.

They are public and come from AMD's key distribution service. With them a report's endorsement certificate suffices.
"""

from functools import cache
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

_FOLDER: Final = Path(__file__).resolve().parent / "anchors"


@cache
def amd_intermediates() -> tuple[x509.Certificate, ...]:
    """Return the six CAs that issue endorsement certificates: for VCEK and VLEK of Milan, Genoa and Turin."""
    return tuple(intermediate for intermediate, _ in _pairs())


@cache
def amd_roots() -> tuple[x509.Certificate, ...]:
    """Return the three roots, of Milan, Genoa and Turin."""
    by_der = {root.public_bytes(Encoding.DER): root for _, root in _pairs()}
    return tuple(by_der.values())


def _pairs() -> list[tuple[x509.Certificate, x509.Certificate]]:
    files = sorted(_FOLDER.glob("ask_ark_*.pem"))
    chains = [x509.load_pem_x509_certificates(path.read_bytes()) for path in files]
    return [(intermediate, root) for intermediate, root in chains]
