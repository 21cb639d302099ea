import pytest

from raycloak.attestation.core.messages import seal
from raycloak.attestation.simulators.tdx_pki import new_key, public_bytes, read_public
from raycloak.attestation.simulators.tdx_platform import SimulatedPlatform
from raycloak.metrics.errors import ProtocolError
from tests.attestation.conftest import MEASUREMENT, Member, Session
from tests.simulators.tdx import VariantPlatform


def test_a_platform_that_made_its_own_key_quotes_once_it_is_certified(session: Session) -> None:
    key = new_key()
    certificate = session.vendor.certify(read_public(public_bytes(key)), "node")
    member = Member(VariantPlatform.certified(key, certificate))
    appraisal = session.appraise(seal(member.presentation(), member.identity))
    assert appraisal.platform_id == certificate.instance_id == session.vendor.platform("node").instance_id


def test_platforms_are_distinct(session: Session) -> None:
    other = session.vendor.platform()
    assert other.instance_id != session.platform.instance_id
    assert other.chain_pem != session.platform.chain_pem


@pytest.mark.parametrize("der", [b"", b"00", None])
def test_a_certificate_that_is_none_or_anothers_is_malformed(session: Session, der: bytes | None) -> None:
    other = session.vendor.certify(new_key().public_key())
    damaged = other if der is None else other.model_copy(update={"certificate_der": der})
    with pytest.raises(ProtocolError, match="malformed"):
        SimulatedPlatform.certified(new_key(), damaged)


@pytest.mark.parametrize(("report_data", "measurement"), [(bytes(63), MEASUREMENT), (bytes(64), bytes(32))])
def test_report_data_and_measurement_have_fixed_sizes(session: Session, report_data: bytes, measurement: bytes) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        session.platform.quote(report_data, measurement)
