"""Collects the evidence of a machine's NVSwitches through NSCQ, the query library of the switches' driver.

NSCQ has no binding for Python. A caller observes a path; the library then calls back once for each device, with a
structure that depends on the path. Nothing here is verified: the receiver of the evidence appraises it.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from raycloak.attestation.core.evidence import SwitchEvidence
from raycloak.attestation.gpu.device import CHAIN_LENGTH, chain_in
from raycloak.attestation.gpu.report import NONCE_BYTES
from raycloak.metrics.errors import EvidenceError

LIBRARY: Final = "libnvidia-nscq.so.2"
# From the library's header.
_UUID_BYTES: Final = 16
_REPORT_BYTES: Final = 0x2000
_CHAIN_BYTES: Final = 0x1400
_MOUNT_DEVICES: Final = 1
_REPORT_PATH: Final = b"/{nvswitch}/config/attestation_report"
_CHAIN_PATH: Final = b"/{nvswitch}/config/certificate"
_REMEDY: Final = (
    f"Install {LIBRARY} of the driver's version in the worker's image, give the guest all switches of its machine, and "
    "let the worker's user open /dev/nvidia-nvswitch*."
)


class _Report(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint32), ("content", ctypes.c_uint8 * _REPORT_BYTES))


class _Chain(ctypes.Structure):
    _fields_ = (("content", ctypes.c_uint8 * _CHAIN_BYTES), ("size", ctypes.c_uint32))


class _NscqSession(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int8), ("handle", ctypes.c_void_p))


class SwitchCollector:
    """The evidence of every NVSwitch that the guest has.

    Args:
        library: name or path of NSCQ's library.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = library

    def collect(self, nonce: bytes) -> tuple[bytes, ...]:
        """Return one encoded `SwitchEvidence` per switch over ``nonce`` (32 bytes), in the order of their UUIDs.

        Raises:
            EvidenceError: ``switch_missing`` if there is no library or no switch, or one gives no evidence.
        """
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a switch reports over {NONCE_BYTES} bytes, not {len(nonce)}")
        try:
            nscq = ctypes.CDLL(self._library)
        except OSError as error:
            raise _missing(f"the switches' library cannot be loaded: {error}") from None
        with _session(nscq) as session:
            given = (ctypes.c_uint8 * NONCE_BYTES)(*nonce)
            _set_input(nscq, session, given)
            reports = _observe(nscq, session, _REPORT_PATH, _Report)
            chains = _observe(nscq, session, _CHAIN_PATH, _Chain)
        if not reports or reports.keys() != chains.keys():
            raise _missing(f"{len(reports)} switches give a report, and {len(chains)} a certificate chain")
        return tuple(_evidence(uuid, reports[uuid], chains[uuid]) for uuid in sorted(reports))


@contextmanager
def _session(nscq: Any) -> Iterator[ctypes.c_void_p]:
    nscq.nscq_session_create.restype = _NscqSession
    created = nscq.nscq_session_create(ctypes.c_uint32(_MOUNT_DEVICES))
    # Positive codes are warnings.
    if created.code < 0 or not created.handle:
        raise _missing(f"the switches' library gives no session: code {created.code}")
    session = ctypes.c_void_p(created.handle)
    try:
        yield session
    finally:
        nscq.nscq_session_destroy.restype = None
        nscq.nscq_session_destroy(session)


def _set_input(nscq: Any, session: ctypes.c_void_p, given: "ctypes.Array[ctypes.c_uint8]") -> None:
    nscq.nscq_session_set_input.restype = ctypes.c_int8
    size = ctypes.c_uint32(len(given))
    code = nscq.nscq_session_set_input(session, ctypes.c_uint32(0), ctypes.byref(given), size)
    if code < 0:
        raise _missing(f"the switches' library takes no nonce: code {code}")


def _observe(
    nscq: Any, session: ctypes.c_void_p, path: bytes, structure: type[_Report] | type[_Chain]
) -> dict[bytes, bytes]:
    """Return, by the UUID of each switch, what it has at a path."""
    found: dict[bytes, bytes] = {}
    failed: list[int] = []

    # An exception cannot leave a callback: ctypes would print it and go on.
    def receive(uuid: Any, code: int, value: Any, _: Any) -> None:
        if code < 0 or value.size > len(value.content):
            failed.append(code)
        else:
            found[bytes(uuid.contents)] = bytes(value.content[: value.size])

    uuid_pointer = ctypes.POINTER(ctypes.c_uint8 * _UUID_BYTES)
    callback = ctypes.CFUNCTYPE(None, uuid_pointer, ctypes.c_int8, structure, ctypes.c_void_p)(receive)
    nscq.nscq_session_path_observe.restype = ctypes.c_int8
    code = nscq.nscq_session_path_observe(session, ctypes.c_char_p(path), callback, None, ctypes.c_uint32(0))
    if code < 0 or failed:
        raise _missing(f"a switch gives no {path.rsplit(b'/')[-1].decode()}: code {min([code, *failed])}")
    return found


def _evidence(uuid: bytes, report: bytes, pem: bytes) -> bytes:
    if not (chain := chain_in(pem)):
        raise _missing(f"the switch {uuid.hex()} has no chain of {CHAIN_LENGTH} certificates")
    return SwitchEvidence(report=report, chain=chain).encode()


def _missing(what: str) -> EvidenceError:
    return EvidenceError("switch_missing", f"{what}.", _REMEDY)
