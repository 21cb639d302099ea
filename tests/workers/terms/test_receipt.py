"""A worker accepts a receipt for exactly the step that it is asked for."""

from typing import Any

import pytest

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.core.lineage import Lineage
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.receipt import Receipt, check_receipt

LEDGER = IdentityKey.from_seed(Secret(bytes(32)))
LINEAGE = Lineage(orchestrator_key=b"o" * 32, initial_parameters=b"i" * 32)
RECEIPT = Receipt(
    query="gradient",
    data_root=b"r" * 32,
    run_id="ab12",
    step=7,
    input_digest=b"p" * 32,
    manifest_digest=b"m" * 32,
    account="patients",
    mechanism_digest=b"d" * 32,
    fencing=3,
    sequence=9,
    head=b"h" * 32,
    charged_epsilon=1.5,
)


def check(envelope: Envelope, **changes: Any) -> Receipt:
    """Return the check a worker makes that expects RECEIPT's step and has seen fencing number 3."""
    expected = {"run_id": "ab12", "step": 7, "input_digest": b"p" * 32, "manifest_digest": b"m" * 32}
    expected |= {"account": "patients", "mechanism_digest": b"d" * 32}
    return check_receipt(envelope, **{"ledger_key": LEDGER.public, "lowest_fencing": 3, **expected, **changes})


def test_the_receipt_of_this_step_is_accepted():
    assert check(seal(RECEIPT, LEDGER)) == RECEIPT


@pytest.mark.parametrize(
    "expected",
    [
        {"step": 8},
        {"query": "evaluation"},
        {"run_id": "ab13"},
        {"input_digest": b"q" * 32},
        {"manifest_digest": b"n" * 32},
        {"account": "others"},
        {"mechanism_digest": b"e" * 32},
        {"dataset_fingerprint": b"f" * 32},
        {"lineage": LINEAGE},
    ],
)
def test_a_receipt_of_anything_else_is_refused(expected: dict[str, Any]):
    with pytest.raises(ProtocolError, match="receipt_mismatch"):
        check(seal(RECEIPT, LEDGER), **expected)


def test_a_receipt_with_an_older_fencing_number_is_refused():
    with pytest.raises(ProtocolError, match="receipt_fenced"):
        check(seal(RECEIPT, LEDGER), lowest_fencing=4)
    assert check(seal(RECEIPT, LEDGER), lowest_fencing=2) == RECEIPT


def test_a_receipt_of_another_key_is_refused():
    with pytest.raises(ProtocolError, match="signature"):
        check(seal(RECEIPT, IdentityKey.generate()))


@pytest.mark.parametrize("field", sorted(Receipt.model_fields))
def test_no_field_of_a_signed_receipt_can_be_changed(field: str):
    value = getattr(RECEIPT, field)
    if field == "lineage":
        changed = LINEAGE
    else:
        last = b"x" if isinstance(value, bytes) else "x"
        changed = value + 1 if isinstance(value, int | float) else value[:-1] + last
    forged = RECEIPT.model_copy(update={field: changed})
    envelope = seal(RECEIPT, LEDGER)
    with pytest.raises(ProtocolError, match="signature"):
        check(envelope.model_copy(update={"body": forged.encode()}))


def test_a_malformed_receipt_is_refused_even_if_signed():
    other = RECEIPT.encode().replace(b'"step":7', b'"step": 7')
    assert other != RECEIPT.encode()
    signed = Envelope(body=other, signature=LEDGER.sign(length_prefixed(Receipt.DOMAIN, other)))
    with pytest.raises(ProtocolError, match="malformed"):
        check(signed)
