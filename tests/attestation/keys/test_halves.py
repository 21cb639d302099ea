"""A combined key depends on both halves and on its purpose."""

import pytest

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.keys.halves import ServiceContract, check_contract, combine_halves, sent_key
from raycloak.attestation.keys.release import VirtualWorkerKeys
from raycloak.metrics.errors import EvidenceError

FIRST = VirtualWorkerKeys(Secret(b"a" * 32), Secret(b"b" * 32))
SECOND = VirtualWorkerKeys(Secret(b"c" * 32), Secret(b"d" * 32))
PLACE = {"run_id": "run-1", "key_context": b"k" * 32, "v": 3, "epoch": 1}
CONTRACT = ServiceContract(
    run_id="owner",
    orchestrator_key=b"o" * 32,
    orchestrator_ml_dsa=b"",
    policy_digest=b"p" * 32,
    virtual_workers=4,
    known_answer=bytes(32),
    key_commitments=(b"0" * 32, b"1" * 32),
)
RUN = {
    "run_id": "run-1",
    "orchestrator_key": b"q" * 32,
    "policy_digest": b"p" * 32,
    "virtual_workers": 4,
    "epochs": 2,
}


def combined(first=FIRST, second=SECOND, **place) -> tuple[bytes, bytes]:
    keys = combine_halves(first, second, **PLACE | place)
    return keys.stream.reveal(), keys.data.reveal()


def test_neither_half_alone_tells_the_key():
    """Another half on either side, or the two exchanged, gives other keys, and no key is a half."""
    other = VirtualWorkerKeys(Secret(b"x" * 32), Secret(b"y" * 32))
    found = [combined(), combined(first=other), combined(second=other), combined(SECOND, FIRST)]
    keys = [key for pair in found for key in pair]
    halves = [secret.reveal() for each in (FIRST, SECOND, other) for secret in (each.stream, each.data)]
    assert len({*keys, *halves}) == len(keys) + len(halves)
    assert combined() == combined()


def test_a_stream_key_is_of_one_run_computation_virtual_worker_and_epoch():
    changes = [{}, {"run_id": "run-2"}, {"key_context": b"l" * 32}, {"v": 2}, {"epoch": 2}]
    assert len({combined(**change)[0] for change in changes}) == len(changes)


def test_a_data_key_is_the_same_in_every_epoch():
    """So that a slice that was swapped between two epochs shows."""
    assert combined(epoch=2)[1] == combined()[1] != combined(v=2)[1]


def test_a_contract_must_be_for_the_run():
    check_contract(CONTRACT, **RUN)
    check_contract(CONTRACT, **RUN | {"epochs": 1})
    others = {
        "run_id": "owner",
        "orchestrator_key": b"o" * 32,
        "policy_digest": b"x" * 32,
        "virtual_workers": 5,
        "epochs": 3,
    }
    for field, value in others.items():
        with pytest.raises(EvidenceError) as error:
            check_contract(CONTRACT, **RUN | {field: value})
        assert error.value.code == "key_service_mismatch"


def test_a_key_of_sent_examples_is_the_owners_alone_and_for_one_run_and_epoch():
    """Guarantee of `sent_key`: any other term of the run changes its key context, and so the key."""
    own = sent_key(SECOND, **PLACE).reveal()
    others = [{"run_id": "other"}, {"key_context": b"x" * 32}, {"v": 4}, {"epoch": 2}]
    keys = [sent_key(SECOND, **PLACE | each).reveal() for each in others]
    keys.append(sent_key(FIRST, **PLACE).reveal())
    assert len({own, *keys}) == 6
    whole = combine_halves(FIRST, SECOND, **PLACE)
    assert whole.sent is not None
    assert whole.sent.reveal() == own
    assert own not in (whole.stream.reveal(), whole.data.reveal(), SECOND.stream.reveal())
