"""The platform that a PCK certificate states: sixteen component versions, each on its own."""

import pytest

from raycloak.attestation.simulators import tdx_platform
from raycloak.attestation.simulators.der import sgx_extension
from raycloak.attestation.simulators.tdx_platform import COMPONENT_SVNS
from raycloak.attestation.tdx.platform import TdxPlatform, read_platform
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import Session


def read(session: Session, monkeypatch: pytest.MonkeyPatch, old: bytes = b"", new: bytes = b"", **tcb) -> TdxPlatform:
    """Read a platform whose extension has ``new`` in the place of its last ``old``."""

    def changed(**stated) -> bytes:
        head, found, tail = sgx_extension(**stated | tcb).rpartition(old or b"never")
        assert found == old or not old
        return head + new + tail

    monkeypatch.setattr(tdx_platform, "sgx_extension", changed)
    platform = session.vendor.platform()
    return read_platform(platform.chain_pem.encode())


def test_components_are_read_one_by_one_and_cpusvn_is_none_of_them(session, monkeypatch):
    """Intel calls CPUSVN opaque: a platform whose CPUSVN looks newer is no newer."""
    assert read(session, monkeypatch).component_svns == COMPONENT_SVNS
    newer = bytes(255 for _ in COMPONENT_SVNS)
    platform = read(session, monkeypatch, bytes((0x04, 16)) + COMPONENT_SVNS, bytes((0x04, 16)) + newer)
    assert platform.component_svns == COMPONENT_SVNS
    high = bytes((0, 127, 128, 255, *COMPONENT_SVNS[4:]))
    assert read(session, monkeypatch, component_svns=high).component_svns == high


@pytest.mark.parametrize("number", [1, 9, 16])
def test_a_certificate_that_leaves_out_a_component_names_no_platform(session, monkeypatch, number):
    """With fifteen versions a comparison would pass by itself."""
    stated = bytes((0x01, 0x02, number))  # the end of the component's OID; 99 is nobody's
    with pytest.raises(EvidenceError) as refusal:
        read(session, monkeypatch, stated, bytes((0x01, 0x02, 99)))
    assert refusal.value.code == "platform_mismatch"
