"""Sealed packages: what opens, and what is refused before anything is decrypted."""

import shutil
import tracemalloc

import numpy as np
import pytest

from raycloak.attestation.core.hpke import HpkeKey
from raycloak.attestation.core.hybrid_signature import HybridSignature
from raycloak.attestation.orchestrator.package_desk import PublishedPackage
from raycloak.attestation.sealed.package_keys import PackageSigner, TrustStore
from raycloak.coordinator.checkpoints import reader
from raycloak.coordinator.checkpoints.arrays import load_arrays
from raycloak.coordinator.checkpoints.reader import Expected, open_to_file
from raycloak.coordinator.checkpoints.storage import MANIFEST, RUN_MANIFEST, SIGNATURE
from raycloak.coordinator.checkpoints.writer import OPTIMIZER, PARAMETERS
from raycloak.metrics.errors import ConfigError, EvidenceError
from raycloak.workers.terms.manifest import TensorSpec
from tests.coordinator.checkpoints.tssp_cases import TENSORS, Site, run_manifest, snapshot


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.fixture
def sealed(site):
    return site.publish()


def code_of(action):
    with pytest.raises(EvidenceError) as refusal:
        action()
    return refusal.value.code


def test_a_package_opens_to_exactly_what_was_sealed(site, sealed):
    package = site.verify(sealed)
    key = site.data_key(package)
    original = snapshot(site.manifest)
    tensors = load_arrays(package.chunks(PARAMETERS, key))
    assert {name: array.shape for name, array in tensors.items()} == {"layer.weight": (3, 4), "layer.bias": (3,)}
    flat = np.concatenate([tensors[t.name].reshape(-1) for t in site.manifest.computation.tensors])
    assert flat.tobytes() == original.parameters.tobytes()
    state = load_arrays(package.chunks(OPTIMIZER, key))
    assert state["0/layer.weight/step"].shape == ()
    assert package.signer == "site"
    assert package.run_manifest == site.manifest


def test_the_manifest_states_what_the_snapshot_held(site):
    name = site.publish(step=5, evaluation_accuracy=0.75)
    stated = site.verify(name).manifest
    assert (stated.step, stated.epsilon, stated.delta, stated.evidence_class) == (5, 1.5, 1e-5, "simulated")
    assert (stated.ledger_sequence, stated.ledger_hash, stated.log_length) == (7, b"l" * 32, 9)
    assert (stated.evaluation_accuracy, stated.evaluation_loss) == (0.75, None)
    assert stated.ranges == 1


def test_sealing_verifying_and_reading_take_constant_memory(tmp_path):
    site = Site(tmp_path, manifest=run_manifest((TensorSpec(name="w", shape=(4_000_000,)), TENSORS[0])))
    made = snapshot(site.manifest, state={})
    tracemalloc.start()
    try:
        name = site.publish_snapshot(made, chunk_bytes=2**16)
        package = site.verify(name)
        total = sum(map(len, package.chunks(PARAMETERS, site.data_key(package))))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total > 16_000_000
    assert peak < 4_000_000


def test_nothing_clear_is_in_an_encrypted_file(site, sealed):
    for name in (PARAMETERS, OPTIMIZER):
        data = (site.folder(sealed) / name).read_bytes()
        assert b"layer" not in data
        assert snapshot(site.manifest).parameters.tobytes()[:16] not in data


def test_a_flipped_byte_of_any_file_is_refused(site, sealed, monkeypatch):
    """Before any decryption: every byte of the signed statement, and every 17th of files whose digest it states."""
    monkeypatch.setattr(reader, "read_payload", lambda *_: pytest.fail("decrypted before it was verified"))
    assert site.refusal(sealed) == ""
    accepted = []
    for path in sorted(site.folder(sealed).iterdir()):
        data = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            # A prime, so that all offsets within words and blocks occur.
            for i in range(0, len(data), 1 if path.name in (MANIFEST, SIGNATURE) else 17):
                byte = data[i]
                file.seek(i)
                file.write(bytes([byte ^ 1]))
                if not site.refusal(sealed):
                    accepted.append((path.name, i))
                file.seek(i)
                file.write(bytes([byte]))
    assert accepted == []
    assert site.refusal(sealed) == ""


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (MANIFEST, "package_signature"),
        (SIGNATURE, "package_malformed"),
        (RUN_MANIFEST, "package_file_changed"),
        (PARAMETERS, "package_file_changed"),
        (OPTIMIZER, "package_file_changed"),
    ],
)
def test_a_flipped_byte_is_named(site, sealed, file, code):
    path = site.folder(sealed) / file
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert site.refusal(sealed) == code


def test_a_payload_that_the_manifest_does_not_name_is_refused(site, sealed):
    key = site.data_key(site.verify(sealed))
    site.resign(sealed, payloads=tuple(each for each in site.stated(sealed).payloads if each.name != OPTIMIZER))
    (site.folder(sealed) / OPTIMIZER).unlink()
    package = site.verify(sealed)
    assert code_of(lambda: list(package.chunks(OPTIMIZER, key))) == "package_malformed"


@pytest.mark.parametrize("file", [MANIFEST, SIGNATURE, RUN_MANIFEST, PARAMETERS, OPTIMIZER])
def test_a_removed_file_is_refused(site, sealed, file):
    (site.folder(sealed) / file).unlink()
    assert site.refusal(sealed) == "package_file_missing"


def test_a_payload_that_became_a_folder_is_refused(site, sealed):
    path = site.folder(sealed) / PARAMETERS
    path.unlink()
    path.mkdir()
    assert site.refusal(sealed) == "package_file_missing"


@pytest.mark.parametrize("stray", ["extra.safetensors.enc", ".hidden", "folder/", "parameters.pkl"])
def test_a_stray_file_is_refused(site, sealed, stray):
    path = site.folder(sealed) / stray
    path.mkdir() if stray.endswith("/") else path.write_bytes(b"x")
    assert site.refusal(sealed) == "package_stray_file"


def test_truncated_and_reordered_chunks_are_refused(site, sealed):
    path = site.folder(sealed) / PARAMETERS
    data, size = path.read_bytes(), 64 + 16
    for changed in (
        data[:-1],
        data[:size],
        data[size : 2 * size] + data[:size] + data[2 * size :],
        data + data[-size:],
    ):
        path.write_bytes(changed)
        assert site.refusal(sealed) == "package_file_changed"


def test_a_payload_of_another_package_is_refused(site, sealed):
    other = site.publish(step=4)
    shutil.copy(site.folder(other) / PARAMETERS, site.folder(sealed) / PARAMETERS)
    assert site.refusal(sealed) == "package_file_changed"


def test_an_unknown_signer_is_refused(site, tmp_path):
    stranger = PackageSigner.load_or_create(tmp_path / "stranger")
    assert site.refusal(site.publish(signer=stranger)) == "package_unknown_signer"


@pytest.mark.parametrize("scheme", ["ed25519", "ml_dsa_65"])
def test_one_valid_signature_of_two_is_refused(site, sealed, tmp_path, scheme):
    path = site.folder(sealed) / SIGNATURE
    good = HybridSignature.model_validate_json(path.read_bytes())
    body = (site.folder(sealed) / MANIFEST).read_bytes()
    stranger = PackageSigner.load_or_create(tmp_path / "stranger").sign(body)
    path.write_bytes(good.model_copy(update={scheme: getattr(stranger, scheme)}).encode())
    assert site.refusal(sealed) == "package_half_signed"


def test_signatures_of_two_trusted_signers_do_not_add_up(site, sealed, tmp_path):
    other = PackageSigner.load_or_create(tmp_path / "other")
    site.trust = site.trust.with_signer("other", other.public)
    path, body = site.folder(sealed) / SIGNATURE, (site.folder(sealed) / MANIFEST).read_bytes()
    mixed = site.signer.sign(body).model_copy(update={"ml_dsa_65": other.sign(body).ml_dsa_65})
    path.write_bytes(mixed.encode())
    assert site.refusal(sealed) == "package_half_signed"


def test_an_empty_trust_store_trusts_nobody(site, sealed):
    site.trust = TrustStore()
    assert site.refusal(sealed) == "package_unknown_signer"


def test_a_manifest_that_is_not_canonical_is_refused_though_it_is_signed(site, sealed):
    body = (site.folder(sealed) / MANIFEST).read_bytes() + b"\n"
    (site.folder(sealed) / MANIFEST).write_bytes(body)
    (site.folder(sealed) / SIGNATURE).write_bytes(site.signer.sign(body).encode())
    assert site.refusal(sealed) == "package_malformed"


def test_a_package_of_a_former_format_is_refused_by_name(site, sealed):
    body = (site.folder(sealed) / MANIFEST).read_bytes().replace(b'"format":2', b'"format":1')
    (site.folder(sealed) / MANIFEST).write_bytes(body)
    (site.folder(sealed) / SIGNATURE).write_bytes(site.signer.sign(body).encode())
    with pytest.raises(ConfigError, match=r"former_format: the package is a PackageManifest of format 1; .* format 2"):
        site.verify(sealed)


def test_an_older_package_presented_as_the_newest_is_refused(site, sealed):
    newer = site.publish(step=4)
    newest = PublishedPackage(step=4, digest=site.stated(newer).digest())
    assert site.refusal(sealed, Expected(newest=newest)) == "package_rolled_back"
    assert site.refusal(newer, Expected(newest=newest)) == ""


def test_another_package_of_the_newest_step_is_refused_and_a_later_one_is_not(site, sealed):
    again = site.publish(step=3)
    newest = PublishedPackage(step=3, digest=site.stated(sealed).digest())
    assert again != sealed
    assert site.refusal(again, Expected(newest=newest)) == "package_rolled_back"
    assert site.refusal(site.publish(step=4), Expected(newest=newest)) == ""


def test_a_ledger_head_that_the_ledger_does_not_have_is_refused(site, sealed):
    hashes = {7: b"l" * 32}
    assert site.refusal(sealed, Expected(ledger_hash=hashes.get)) == ""
    assert site.refusal(sealed, Expected(ledger_hash={6: b"l" * 32}.get)) == "ledger_rolled_back"
    assert site.refusal(sealed, Expected(ledger_hash={7: b"x" * 32}.get)) == "ledger_rolled_back"


def test_a_log_head_that_the_log_does_not_have_is_refused(site, sealed):
    assert site.refusal(sealed, Expected(log_root={9: b"e" * 32}.get)) == ""
    assert site.refusal(sealed, Expected(log_root={}.get)) == "log_rolled_back"


def test_a_package_of_another_run_is_refused(site, sealed):
    other = run_manifest(run_id="f" * 16)
    assert site.refusal(sealed, Expected(run=site.manifest.digest())) == ""
    assert site.refusal(sealed, Expected(run=other.digest())) == "package_other_run"


def test_who_is_no_recipient_is_told_who_is(site, sealed):
    package = site.verify(sealed)
    with pytest.raises(EvidenceError, match="auditor") as refusal:
        package.unwrap(HpkeKey.generate())
    assert refusal.value.code == "not_a_recipient"


def test_the_wrapped_key_opens_only_for_what_the_manifest_states(site, sealed):
    site.resign(sealed, epsilon=0.5)
    package = site.verify(sealed)
    assert code_of(lambda: site.data_key(package)) == "key_not_for_us"


def test_a_file_changed_after_it_was_verified_is_refused(site, sealed):
    package = site.verify(sealed)
    path = site.folder(sealed) / PARAMETERS
    content = path.read_bytes()
    # Flipped, not set: one tag in 256 ends in any given byte.
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert code_of(lambda: list(package.chunks(PARAMETERS, site.data_key(package)))) == "package_file_changed"


def test_parameters_with_another_digest_are_refused_and_leave_no_file(site, tmp_path):
    name = site.publish(model_digest=b"x" * 32)
    package = site.verify(name)
    out = tmp_path / "out" / "model.safetensors"
    out.parent.mkdir()
    assert code_of(lambda: open_to_file(package, site.data_key(package), out)) == "package_parameters_differ"
    assert list(out.parent.iterdir()) == []


def test_an_opened_file_is_private_and_whole(site, sealed, tmp_path):
    package, out = site.verify(sealed), tmp_path / "model.safetensors"
    open_to_file(package, site.data_key(package), out)
    assert out.stat().st_mode & 0o777 == 0o600
    assert load_arrays(iter([out.read_bytes()]))["layer.bias"].shape == (3,)
