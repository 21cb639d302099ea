import copy
import pickle

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.keys import AgreementKey, IdentityKey, Purpose, Secret, derive, signature_is_valid

SEED = bytes(range(32))


@pytest.mark.parametrize("key", [Secret(SEED), IdentityKey.from_seed(Secret(SEED)), AgreementKey.generate()])
def test_secret_types_cannot_be_printed_pickled_or_copied(key: object) -> None:
    assert repr(key) == str(key) == f"<{type(key).__name__}>"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="must not leave its process"):
            attempt(key)


def test_derive_is_hkdf_sha256_over_purpose_and_fields() -> None:
    info = length_prefixed("raycloak/mask/v1", 7, b"x")
    expected = HKDF(hashes.SHA256(), 48, salt=None, info=info).derive(SEED)
    assert derive(Secret(SEED), Purpose.MASK, 7, b"x", length=48).reveal() == expected


def test_no_two_purposes_or_fields_share_a_key() -> None:
    keys = [derive(Secret(SEED), purpose, *fields).reveal() for purpose in Purpose for fields in [(), (0,), (b"",)]]
    assert len(set(keys)) == len(keys)


def test_identity_key_follows_rfc_8032() -> None:
    """Test 1 of RFC 8032, section 7.1."""
    seed = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
    key = IdentityKey.from_seed(Secret(bytes.fromhex(seed)))
    assert key.public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a")


def test_only_the_signer_s_signature_is_valid() -> None:
    key, other = IdentityKey.generate(), IdentityKey.generate()
    signature = key.sign(b"message")
    assert signature_is_valid(key.public, b"message", signature)
    assert not signature_is_valid(other.public, b"message", signature)
    assert not signature_is_valid(key.public, b"messagf", signature)
    assert not signature_is_valid(key.public, b"message", signature[:-1])
    assert not signature_is_valid(b"short", b"message", signature)


def test_agreement_is_symmetric_and_refuses_low_order_points() -> None:
    left, right = AgreementKey.generate(), AgreementKey.generate()
    assert left.agree(right.public).reveal() == right.agree(left.public).reveal()
    for low in (bytes(32), b"\1" + bytes(31)):
        with pytest.raises(ValueError, match="shared key"):
            left.agree(low)
