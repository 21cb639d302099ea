"""Key packages: whose they are, who made them, and that the manifest fixed what is inside."""

import copy
import pickle
import sqlite3
from contextlib import closing

import pytest

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.hpke import HpkeKey
from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.core.messages import Envelope, parse, seal
from raycloak.attestation.keys.release import (
    ExpectedRelease,
    KeyPackage,
    KeyRelease,
    RunKeys,
    VirtualWorkerKeys,
    commitments_digest,
    key_commitment,
    open_keys,
    released_body,
    seal_package,
)
from raycloak.attestation.log.entries import EntryProof
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.attestation.policy.key_policy import KeyKind, KeyPolicy
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.metrics.errors import EvidenceError, ProtocolError, RefusedError

SEED, RECIPIENT = Secret(b"o" * 32), HpkeKey.generate()
ORCHESTRATOR, LOG_OWNER = IdentityKey.from_seed(SEED), HybridSigner(SEED, Secret(b"m" * 32))
SECRET, COMPUTATION, MANIFEST = Secret(b"s" * 32), digest(b"computation"), digest(b"manifest")
COUNT, EPOCHS = 4, 2
POLICY = simulated_policy(SimulatedVendor.create(), bytes(48))


def keys_of(v: int, epoch: int = 1) -> VirtualWorkerKeys:
    return RunKeys(SECRET, "run").of(COMPUTATION, v, epoch)


def commitments(epoch: int = 1) -> tuple[bytes, ...]:
    return tuple(key_commitment(keys_of(v, epoch).stream) for v in range(COUNT))


IN_MANIFEST = tuple(commitments_digest(commitments(epoch)) for epoch in range(EPOCHS))


def package(**changes) -> KeyPackage:
    fields = {
        "kind": KeyKind.VIRTUAL_WORKER,
        "run_id": "run",
        "session": "first",
        "member_id": "worker-0",
        "manifest_digest": MANIFEST,
        "policy_digest": KeyPolicy.of(KeyKind.VIRTUAL_WORKER, POLICY).digest(),
        "nonce": bytes(32),
        "evidence_digest": digest(b"evidence"),
        "epoch": 1,
        "virtual_workers": (0, 2),
        "commitments": commitments(),
        "ciphertext": b"",
    }
    return KeyPackage(**fields | changes)


def logged(run_id="run", signer=LOG_OWNER, entry_kind="released", **body) -> bytes:
    """Return the proof of an entry that says what ``body`` says, between others."""
    with closing(sqlite3.connect(":memory:")) as connection:
        log = EvidenceLog(connection, run_id, signer)
        log.append("admitted", {})
        entry = log.append(entry_kind, body)
        log.append("admitted", {})
        return log.prove(entry).encode()


def sealed(keys=None, signer=ORCHESTRATOR, recipient=RECIPIENT.public, **changes) -> KeyRelease:
    contents = [keys_of(0), keys_of(2)] if keys is None else keys
    body = package(**changes)
    plaintext = b"".join(key.stream.reveal() + key.data.reveal() for key in contents)
    return KeyRelease(package=seal_package(body, plaintext, recipient, signer), proof=logged(**released_body(body)))


def resealed(body: KeyPackage) -> KeyRelease:
    return KeyRelease(package=seal(body, ORCHESTRATOR), proof=logged(**released_body(body)))


def opened(release: KeyRelease, **changes):
    policy, hpke_key, most = changes.get("policy", POLICY), changes.get("hpke_key", RECIPIENT), changes.get("most")
    terms = ExpectedRelease(LOG_OWNER.public, "run", "worker-0", MANIFEST, policy, keys_per_machine=most)
    return open_keys(release, terms, hpke_key=hpke_key, key_commitments=IN_MANIFEST)


def refusal(envelope: KeyRelease, **changes) -> RefusedError:
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


def test_a_package_of_another_kind_or_under_another_policy_is_refused():
    stricter = POLICY.model_copy(update={"evidence_lifetime_s": 60})
    assert refusal(sealed(), policy=stricter).code == "key_package_mismatch"
    assert refusal(sealed(kind=KeyKind.CHECKPOINT)).code == "key_package_mismatch"
    other = KeyPolicy.of(KeyKind.CHECKPOINT, POLICY).digest()
    assert refusal(sealed(policy_digest=other)).code == "key_package_mismatch"


def test_keys_that_were_released_under_another_bound_by_machine_than_the_manifests_are_refused():
    """The driver tells the orchestrator the bound, and each worker knows it from the manifest."""
    bounded = KeyPolicy.of(KeyKind.VIRTUAL_WORKER, POLICY, 3).digest()
    assert opened(sealed(policy_digest=bounded), most=3)[0] == 1
    for release, most in ((sealed(policy_digest=bounded), None), (sealed(), 3), (sealed(policy_digest=bounded), 2)):
        assert refusal(release, most=most).code == "key_package_mismatch"
    assert KeyPolicy.of(KeyKind.DATASET, POLICY, 3) == KeyPolicy.of(KeyKind.DATASET, POLICY)


def test_another_members_hpke_key_opens_nothing():
    assert refusal(sealed(), hpke_key=HpkeKey.generate()).code == "key_not_for_us"
    assert refusal(sealed(recipient=HpkeKey.generate().public)).code == "key_not_for_us"


@pytest.mark.parametrize("field", ["session", "nonce", "evidence_digest", "virtual_workers"])
def test_a_ciphertext_belongs_to_all_fields_of_its_package(field):
    """Moved under other fields and signed again, it does not open: HPKE's info covers each of them."""
    honest = KeyPackage.model_validate_json(sealed().package.body)
    other = {"virtual_workers": (0, 1), "session": "second"}.get(field, b"x" * 32)
    assert refusal(resealed(honest.model_copy(update={field: other}))).code == "key_not_for_us"


@pytest.mark.parametrize("cut", [1, 16, 64, 1200])
def test_a_truncated_or_extended_ciphertext_does_not_open(cut):
    honest = KeyPackage.model_validate_json(sealed().package.body)
    for ciphertext in (honest.ciphertext[:-cut], honest.ciphertext[cut:], honest.ciphertext + bytes(cut), b""):
        changed = honest.model_copy(update={"ciphertext": ciphertext})
        assert refusal(resealed(changed)).code == "key_not_for_us"


def test_any_changed_byte_of_a_signed_package_is_refused():
    release = sealed()
    envelope = release.package
    for position in range(0, len(envelope.body), 97):
        body = bytearray(envelope.body)
        body[position] ^= 1
        assert (
            refusal(
                KeyRelease(package=Envelope(body=bytes(body), signature=envelope.signature), proof=release.proof)
            ).code
            == "signature"
        )


def test_keys_whose_release_is_not_in_the_log_are_refused():
    """A release that was not logged, or was logged otherwise, leaves no key behind."""
    honest = sealed()
    body = released_body(package())
    for changed in (
        logged(**body | {"member_id": "worker-1"}),
        logged(**body | {"virtual_workers": [0]}),
        logged(**body | {"package": bytes(32).hex()}),
        logged(entry_kind="refused", **body),
    ):
        assert refusal(KeyRelease(package=honest.package, proof=changed)).code == "release_not_logged"
    for foreign in (
        logged(signer=HybridSigner.generate(), **body),
        logged(signer=HybridSigner(SEED, Secret(b"x" * 32)), **body),
        logged(run_id="another", **body),
    ):
        assert refusal(KeyRelease(package=honest.package, proof=foreign)).code == "log_broken"
    proof = parse(EntryProof, honest.proof)
    for wrong in (
        {"path": ()},
        {"path": (*proof.path[:-1], bytes(32))},
        {"entry": proof.entry.model_copy(update={"sequence": 0})},
    ):
        assert (
            refusal(KeyRelease(package=honest.package, proof=proof.model_copy(update=wrong).encode())).code
            == "log_broken"
        )
    assert refusal(KeyRelease(package=honest.package, proof=b"")).code == "malformed"


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
    streams = {RunKeys(*each[:2]).of(*each[2:]).stream.reveal() for each in (base, *others)}
    assert len(streams) == 1 + len(others)
    assert RunKeys(*base[:2]).of(*base[2:]).stream.reveal() in streams


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
