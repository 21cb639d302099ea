"""Key packages: whose they are, who made them, and that the manifest fixed what is inside."""

import copy
import pickle

import pytest

from attestation.canonical import digest
from attestation.key_release import (
    HpkeKey,
    KeyPackage,
    VirtualWorkerKeys,
    commitments_digest,
    key_commitment,
    open_keys,
    seal_keys,
    virtual_worker_keys,
)
from attestation.keys import IdentityKey, Secret
from attestation.messages import Envelope, seal
from metrics.errors import EvidenceError, ProtocolError, RefusedError

ORCHESTRATOR, RECIPIENT = IdentityKey.generate(), HpkeKey.generate()
SECRET, COMPUTATION, MANIFEST = Secret(b"s" * 32), digest(b"computation"), digest(b"manifest")
COUNT, EPOCHS = 4, 2


def keys_of(v: int, epoch: int = 1) -> VirtualWorkerKeys:
    return virtual_worker_keys(SECRET, "run", COMPUTATION, v, epoch)


def commitments(epoch: int = 1) -> tuple[bytes, ...]:
    return tuple(key_commitment(keys_of(v, epoch).stream) for v in range(COUNT))


IN_MANIFEST = tuple(commitments_digest(commitments(epoch)) for epoch in range(EPOCHS))


def package(**changes) -> KeyPackage:
    fields = {
        "run_id": "run",
        "member_id": "worker-0",
        "manifest_digest": MANIFEST,
        "policy_digest": digest(b"policy"),
        "evidence_digest": digest(b"evidence"),
        "epoch": 1,
        "virtual_workers": (0, 2),
        "commitments": commitments(),
        "ciphertext": b"",
    }
    return KeyPackage(**fields | changes)


def sealed(keys=None, signer=ORCHESTRATOR, recipient=RECIPIENT.public, **changes) -> Envelope:
    contents = [keys_of(0), keys_of(2)] if keys is None else keys
    return seal_keys(package(**changes), contents, recipient, signer)


def opened(envelope: Envelope, **changes):
    expected = {
        "orchestrator_key": ORCHESTRATOR.public,
        "hpke_key": RECIPIENT,
        "run_id": "run",
        "member_id": "worker-0",
        "manifest_digest": MANIFEST,
        "key_commitments": IN_MANIFEST,
    }
    return open_keys(envelope, **expected | changes)


def refusal(envelope: Envelope, **changes) -> RefusedError:
    with pytest.raises((EvidenceError, ProtocolError)) as error:
        opened(envelope, **changes)
    return error.value


def test_a_member_gets_exactly_the_keys_of_its_virtual_workers():
    epoch, keys = opened(sealed())
    assert epoch == 1
    assert sorted(keys) == [0, 2]
    for v, pair in keys.items():
        assert pair.stream.reveal() == keys_of(v).stream.reveal()
        assert pair.data.reveal() == keys_of(v).data.reveal()


def test_nobody_but_the_orchestrator_of_the_manifest_can_make_a_package():
    assert refusal(sealed(signer=IdentityKey.generate())).code == "signature"


@pytest.mark.parametrize("field", ["run_id", "member_id", "manifest_digest"])
def test_a_package_for_another_run_member_or_manifest_is_refused(field):
    other = bytes(32) if field == "manifest_digest" else "another"
    assert refusal(sealed(**{field: other})).code == "key_package_mismatch"


def test_another_members_hpke_key_opens_nothing():
    assert refusal(sealed(), hpke_key=HpkeKey.generate()).code == "key_not_for_us"
    assert refusal(sealed(recipient=HpkeKey.generate().public)).code == "key_not_for_us"


@pytest.mark.parametrize("field", ["policy_digest", "evidence_digest", "virtual_workers"])
def test_a_ciphertext_belongs_to_all_fields_of_its_package(field):
    """Moved under other fields and signed again, it does not open: HPKE's info covers each of them."""
    honest = KeyPackage.model_validate_json(sealed().body)
    other = (0, 1) if field == "virtual_workers" else bytes(32)
    assert refusal(seal(honest.model_copy(update={field: other}), ORCHESTRATOR)).code == "key_not_for_us"


@pytest.mark.parametrize("cut", [1, 16, 64, 1200])
def test_a_truncated_or_extended_ciphertext_does_not_open(cut):
    honest = KeyPackage.model_validate_json(sealed().body)
    for ciphertext in (honest.ciphertext[:-cut], honest.ciphertext[cut:], honest.ciphertext + bytes(cut), b""):
        changed = honest.model_copy(update={"ciphertext": ciphertext})
        assert refusal(seal(changed, ORCHESTRATOR)).code == "key_not_for_us"


def test_any_changed_byte_of_a_signed_package_is_refused():
    envelope = sealed()
    for position in range(0, len(envelope.body), 97):
        body = bytearray(envelope.body)
        body[position] ^= 1
        assert refusal(Envelope(bytes(body), envelope.signature)).code == "signature"


def test_a_key_that_the_manifest_does_not_commit_to_is_refused():
    """A second set of keys would be a second stream of noise for the same steps."""
    own = VirtualWorkerKeys(Secret(b"x" * 32), keys_of(0).data)
    assert refusal(sealed([own, keys_of(2)])).code == "key_not_committed"
    fitting = (key_commitment(own.stream), *commitments()[1:])
    assert refusal(sealed([own, keys_of(2)], commitments=fitting)).code == "key_not_committed"


def test_swapped_keys_epochs_or_numbers_beyond_v_are_not_committed():
    assert refusal(sealed([keys_of(2), keys_of(0)])).code == "key_not_committed"
    assert refusal(sealed([keys_of(0, 0), keys_of(2, 0)])).code == "key_not_committed"
    assert refusal(sealed(epoch=0)).code == "key_not_committed"
    assert refusal(sealed(epoch=EPOCHS)).code == "key_not_committed"
    beyond = [keys_of(0), keys_of(COUNT)]
    assert refusal(sealed(beyond, virtual_workers=(0, COUNT))).code == "key_not_committed"


def test_a_package_with_another_number_of_keys_than_it_names_is_refused():
    assert refusal(sealed([keys_of(0)])).code == "key_package_mismatch"
    assert refusal(sealed([keys_of(0), keys_of(2), keys_of(3)])).code == "key_package_mismatch"


def test_stream_keys_differ_by_secret_run_computation_virtual_worker_and_epoch():
    base = (SECRET, "run", COMPUTATION, 0, 0)
    others = [
        (Secret(b"t" * 32), "run", COMPUTATION, 0, 0),
        (SECRET, "another", COMPUTATION, 0, 0),
        (SECRET, "run", digest(b"another"), 0, 0),
        (SECRET, "run", COMPUTATION, 1, 0),
        (SECRET, "run", COMPUTATION, 0, 1),
    ]
    streams = {virtual_worker_keys(*each).stream.reveal() for each in (base, *others)}
    assert len(streams) == 1 + len(others)
    assert virtual_worker_keys(*base).stream.reveal() in streams


def test_the_data_key_outlives_the_epoch_so_that_a_swapped_slice_shows_at_any_of_them():
    assert keys_of(0, 0).data.reveal() == keys_of(0, 1).data.reveal() != keys_of(1, 0).data.reveal()


def test_a_commitment_fixes_its_key_and_is_not_the_key():
    assert key_commitment(Secret(b"a" * 32)) == key_commitment(Secret(b"a" * 32)) != key_commitment(Secret(b"b" * 32))
    assert key_commitment(Secret(b"a" * 32)) != b"a" * 32
    assert commitments_digest(commitments(0)) != commitments_digest(commitments(0)[::-1])


@pytest.mark.parametrize("holder", [keys_of(0), HpkeKey.generate()], ids=["VirtualWorkerKeys", "HpkeKey"])
def test_what_holds_keys_cannot_be_pickled_or_printed(holder):
    for leave in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError):
            leave(holder)
    assert keys_of(0).stream.reveal().hex() not in f"{holder!r} {holder}"
    assert " object at " in repr(holder)
