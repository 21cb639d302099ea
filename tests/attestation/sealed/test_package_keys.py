"""Keys of packages: both signatures count, private files stay private, and trust is the reader's own."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from raycloak.attestation.core.hpke import hpke_seal
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.sealed.package_keys import (
    PackageSigner,
    TrustStore,
    create_recipient,
    load_recipient_key,
    load_recipients,
    load_signer,
    run_recipient_key,
)
from raycloak.metrics.errors import ConfigError, EvidenceError


@pytest.fixture
def signer(tmp_path):
    return PackageSigner.load_or_create(tmp_path / "signer")


def code_of(action):
    with pytest.raises((ConfigError, EvidenceError)) as refusal:
        action()
    return refusal.value.code


def test_a_signer_is_the_same_at_every_load_and_only_its_owner_can_read_it(signer, tmp_path):
    folder = tmp_path / "signer"
    assert PackageSigner.load_or_create(folder).public == signer.public
    assert load_signer(folder / "signer.pub.json") == signer.public
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "signer.json").stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["signer.json", "signer.pub.json"]


def test_concurrent_first_callers_get_one_signer(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        signers = pool.map(PackageSigner.load_or_create, [tmp_path / "signer"] * 8)
    assert len({signer.public.key_id for signer in signers}) == 1


def test_a_signer_that_others_can_read_or_that_is_damaged_is_refused(signer, tmp_path):
    path = tmp_path / "signer" / "signer.json"
    path.chmod(0o640)
    assert code_of(lambda: PackageSigner.load_or_create(tmp_path / "signer")) == "signer"
    path.chmod(0o600)
    path.write_text(path.read_text()[:-9] + '"}')
    assert code_of(lambda: PackageSigner.load_or_create(tmp_path / "signer")) == "signer"


def test_verify_needs_both_signatures_of_one_entry(signer, tmp_path):
    other = PackageSigner.load_or_create(tmp_path / "other")
    store = TrustStore.of("site", signer.public).with_signer("other", other.public)
    good, foreign = signer.sign(b"data"), other.sign(b"data")
    assert store.verify(b"data", good) == "site"
    assert store.verify(b"data", foreign) == "other"
    assert code_of(lambda: store.verify(b"Data", good)) == "package_signature"
    for scheme in ("ed25519", "ml_dsa_65"):
        mixed = good.model_copy(update={scheme: getattr(foreign, scheme)})
        assert code_of(lambda mixed=mixed: store.verify(b"data", mixed)) == "package_half_signed"
        cut = good.model_copy(update={scheme: b""})
        assert code_of(lambda cut=cut: store.verify(b"data", cut)) == "package_half_signed"
    renamed = good.model_copy(update={"key_id": other.public.key_id})
    assert code_of(lambda: store.verify(b"data", renamed)) == "package_signature"
    assert code_of(lambda: TrustStore.of("other", other.public).verify(b"data", good)) == "package_unknown_signer"


def test_a_trust_store_keeps_names_and_keys_apart(signer, tmp_path):
    other = PackageSigner.load_or_create(tmp_path / "other").public
    store = TrustStore.of("site", signer.public)
    assert store.with_signer("site", signer.public) == store
    assert code_of(lambda: store.with_signer("site", other)) == "trust_store"
    assert code_of(lambda: store.with_signer("again", signer.public)) == "trust_store"
    path = tmp_path / "trust.json"
    store.with_signer("other", other).save(path)
    assert [known.name for known in TrustStore.load(path).signers] == ["site", "other"]


@pytest.mark.parametrize("content", ["", "[]", '{"signers": [{}]}', '{"version": 2}', '{"signers": [], "extra": 1}'])
def test_what_is_no_trust_store_is_refused(tmp_path, content):
    path = tmp_path / "trust.json"
    path.write_text(content)
    assert code_of(lambda: TrustStore.load(path)) == "trust_store"


def test_a_missing_trust_store_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json"):
        TrustStore.load(tmp_path / "none.json")


def test_a_recipient_opens_what_is_sealed_to_its_public_file(tmp_path):
    public, path = create_recipient(tmp_path / "auditor.key")
    assert (public.name, path.name) == ("auditor", "auditor.key.pub")
    assert load_recipients([path]) == (public,)
    assert stat.S_IMODE((tmp_path / "auditor.key").stat().st_mode) == 0o600
    key = load_recipient_key(tmp_path / "auditor.key")
    assert key.open(hpke_seal(b"data key", public.key, b"info"), b"info") == b"data key"


def test_a_recipients_key_is_never_overwritten(tmp_path):
    create_recipient(tmp_path / "auditor.key")
    before = (tmp_path / "auditor.key").read_bytes()
    assert code_of(lambda: create_recipient(tmp_path / "auditor.key")) == "recipient_exists"
    (tmp_path / "auditor.key").unlink()
    assert code_of(lambda: create_recipient(tmp_path / "auditor.key")) == "recipient_exists"
    assert before
    assert not (tmp_path / "auditor.key").exists()


def test_what_is_no_recipient_is_refused(tmp_path):
    public, path = create_recipient(tmp_path / "auditor.key")
    (tmp_path / "auditor.key").chmod(0o644)
    assert code_of(lambda: load_recipient_key(tmp_path / "auditor.key")) == "recipient"
    assert code_of(lambda: load_recipient_key(tmp_path / "none")) == "recipient"
    assert code_of(lambda: load_recipients([tmp_path / "auditor.key"])) == "recipient"
    short = json.loads(path.read_text()) | {"key": public.key[:-1].hex()}
    path.write_text(json.dumps(short))
    assert code_of(lambda: load_recipients([path])) == "recipient"


def test_a_runs_own_key_follows_from_its_secret_alone():
    first, again, other = (run_recipient_key(Secret(raw * 32)) for raw in (b"a", b"a", b"b"))
    assert first.public == again.public != other.public
    assert again.open(hpke_seal(b"x", first.public, b""), b"") == b"x"
