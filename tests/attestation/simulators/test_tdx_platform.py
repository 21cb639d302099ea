import pytest

from raycloak.attestation.core.messages import seal
from raycloak.attestation.simulators.tdx_platform import PlatformKeys, SimulatedPlatform
from raycloak.metrics.errors import ProtocolError
from tests.attestation.conftest import MEASUREMENT, Member, Session


def test_a_platform_handed_over_as_bytes_quotes_as_before(session: Session) -> None:
    moved = SimulatedPlatform.from_bytes(session.platform.to_bytes())
    member = Member(moved)
    appraisal = session.appraise(seal(member.presentation(), member.identity))
    assert appraisal.platform_id == session.platform.instance_id


def test_platforms_are_distinct(session: Session) -> None:
    other = session.vendor.platform()
    assert other.instance_id != session.platform.instance_id
    assert other.chain_pem != session.platform.chain_pem


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff"])
def test_bytes_that_are_no_platform_are_malformed(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        SimulatedPlatform.from_bytes(data)


def test_damaged_keys_are_malformed(session: Session) -> None:
    keys = PlatformKeys.model_validate_json(session.platform.to_bytes())
    damaged = keys.model_copy(update={"attestation_key_pkcs8": b"00"})
    with pytest.raises(ProtocolError):
        SimulatedPlatform.from_bytes(damaged.encode())


def test_serialized_keys_are_not_printed(session: Session) -> None:
    keys = PlatformKeys.model_validate_json(session.platform.to_bytes())
    assert "pkcs8" not in repr(keys)


@pytest.mark.parametrize(("report_data", "measurement"), [(bytes(63), MEASUREMENT), (bytes(64), bytes(32))])
def test_report_data_and_measurement_have_fixed_sizes(session: Session, report_data: bytes, measurement: bytes) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        session.platform.quote(report_data, measurement)
