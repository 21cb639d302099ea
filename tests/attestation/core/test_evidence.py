import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from raycloak.attestation.core.evidence import Challenge, Collateral, Presentation, Refusal, refuse
from raycloak.attestation.core.messages import parse
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import Session


def test_there_are_30_refusals_and_each_is_an_evidence_error() -> None:
    assert len(Refusal) == 30
    for code in Refusal:
        with pytest.raises(EvidenceError) as refused:
            refuse(code, "no")
        assert refused.value.code == code.value
        assert refused.value.exit_code == 3


def test_presentation_and_challenge_survive_the_wire(session: Session) -> None:
    presentation = session.member().presentation(gpu_evidence=(b"a", b""))
    assert parse(Presentation, presentation.encode()) == presentation
    challenge = Challenge(
        nonce=bytes(32), run_id="r", member_id="w", role="worker", manifest_digest=bytes(32), expires_at=5
    )
    assert parse(Challenge, challenge.encode()) == challenge


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": bytes(8)},
        {"run_id": ""},
        {"member_id": "x" * 201},
        {"role": "observer"},
        {"hpke_key": bytes(32)},
        {"mask_key": bytes(31)},
        {"identity_key": bytes(33)},
        {"manifest_digest": b""},
        {"known_answer": b""},
        {"role": "aggregator"},
    ],
)
def test_fields_of_the_wrong_size_or_kind_are_refused(session: Session, change: dict) -> None:
    fields = session.member().fields()
    with pytest.raises(ValidationError):
        Presentation(**(fields | change), quote=b"")


def test_a_pck_chain_inside_collateral_is_dropped(session: Session) -> None:
    text = json.dumps(json.loads(session.collateral.tdx[0].encode()) | {"pck_certificate_chain": "-----BEGIN"})
    assert Collateral.from_json(text) == session.collateral.tdx[0]


def test_collateral_that_names_a_field_twice_is_refused(session: Session) -> None:
    text = session.collateral.tdx[0].encode().decode()
    assert Collateral.from_json(text) == session.collateral.tdx[0]
    twice = text.removesuffix("}") + ',"root_ca_crl":"00"}'
    assert len(json.loads(twice)) == len(json.loads(text))
    with pytest.raises(EvidenceError) as refused:
        Collateral.from_json(twice)
    assert refused.value.code == "collateral_stale"


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"tcb_info": 1}', "[" * 100_000])
def test_what_is_not_collateral_is_refused_as_missing(text: str) -> None:
    with pytest.raises(EvidenceError) as refused:
        Collateral.from_json(text)
    assert refused.value.code == "collateral_stale"


def test_recorded_collateral_is_read(vectors: Path) -> None:
    for path in sorted((vectors / "tdx" / "collateral").glob("*.json")):
        assert json.loads(Collateral.from_json(path.read_text()).tcb_info)["id"] == "TDX"
