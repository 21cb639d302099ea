"""The checks that a roster must pass before anybody acts on it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope, seal
from raycloak.attestation.core.roster import Member, Roster, open_roster
from raycloak.metrics.errors import ProtocolError

ORCHESTRATOR = IdentityKey.generate()
MANIFEST = digest(b"manifest")


def member(name: str, hosted: tuple[int, ...] = (), **changes) -> Member:
    fields = {
        "member_id": name,
        "role": "worker" if name.startswith("worker") else "aggregator",
        "mask_key": digest(b"mask" + name.encode()),
        "identity_key": digest(b"identity" + name.encode()),
        "evidence_digest": digest(b"evidence" + name.encode()),
        "virtual_workers": hosted,
        "joined": 0,
    }
    return Member(**fields | changes)


def roster(*members: Member, **changes) -> Roster:
    fields = {
        "run_id": "run",
        "manifest_digest": MANIFEST,
        "step": 3,
        "attempt": 1,
        "ratchet": 3,
        "nonce": bytes(32),
        "members": members or (member("worker-0", (0, 2)), member("worker-1", (1, 3)), member("aggregator-0")),
    }
    return Roster(**fields | changes)


def opened(view: Roster | Envelope, **changes) -> Roster:
    envelope = view if isinstance(view, Envelope) else seal(view, ORCHESTRATOR)
    expected = {
        "orchestrator_key": ORCHESTRATOR.public,
        "run_id": "run",
        "manifest_digest": MANIFEST,
        "virtual_workers": 4,
        "minimum_workers": 2,
    }
    return open_roster(envelope, **expected | changes)


def refusal(view: Roster | Envelope, **changes) -> str:
    with pytest.raises(ProtocolError) as error:
        opened(view, **changes)
    return error.value.code


def test_an_honest_roster_opens_and_tells_workers_from_aggregators():
    view = opened(roster())
    assert [each.member_id for each in view.workers] == ["worker-0", "worker-1"]
    assert [each.member_id for each in view.aggregators] == ["aggregator-0"]
    assert view.member("worker-1").virtual_workers == (1, 3)


def test_who_is_not_in_a_roster_has_no_entry():
    with pytest.raises(ProtocolError) as error:
        roster().member("worker-9")
    assert error.value.code == "roster_member"


def test_a_roster_of_another_signer_run_or_manifest_is_refused():
    assert refusal(seal(roster(), IdentityKey.generate())) == "signature"
    assert refusal(roster(run_id="another run")) == "roster_mismatch"
    assert refusal(roster(manifest_digest=digest(b"another manifest"))) == "roster_mismatch"


@pytest.mark.parametrize(
    "hosted",
    [((0, 2), (1,)), ((0, 2), (1, 2, 3)), ((0, 2, 2), (1, 3)), ((0, 2), (1, 3, 4)), ((0, 2), (1, -3)), ((), ())],
    ids=["one left out", "one twice", "twice with one host", "one too many", "another number", "none"],
)
def test_a_roster_that_does_not_cover_every_virtual_worker_once_is_refused(hosted):
    members = [member(f"worker-{i}", virtual_workers) for i, virtual_workers in enumerate(hosted)]
    assert refusal(roster(*members)) == "roster_cover"


@given(st.lists(st.lists(st.integers(-1, 4), max_size=4), min_size=2, max_size=3))
def test_cover_is_exact_for_any_hosting(hosting):
    view = roster(*(member(f"worker-{i}", tuple(hosted)) for i, hosted in enumerate(hosting)))
    if sorted(v for hosted in hosting for v in hosted) == [0, 1, 2, 3]:
        assert opened(view) == view
    else:
        assert refusal(view) == "roster_cover"


def test_an_aggregator_covers_nothing():
    members = member("worker-0", (0,)), member("worker-1", (1, 2)), member("aggregator-0", (3,))
    assert refusal(roster(*members)) == "roster_cover"


def test_fewer_workers_than_the_run_needs_are_refused():
    lone = roster(member("worker-0", (0, 1, 2, 3)), member("aggregator-0"))
    assert refusal(lone) == "roster_too_small"
    assert opened(lone, minimum_workers=1) == lone
    assert refusal(roster(), minimum_workers=3) == "roster_too_small"


@pytest.mark.parametrize("shared", ["member_id", "mask_key", "identity_key"])
@pytest.mark.parametrize("other", ["worker-1", "aggregator-0"])
def test_no_two_members_share_an_id_or_a_key(shared, other):
    first = member("worker-0", (0, 2))
    copied = {shared: getattr(first, shared)}
    members = {
        "worker-1": member("worker-1", (1, 3)),
        "aggregator-0": member("aggregator-0"),
    }
    members[other] = members[other].model_copy(update=copied)
    assert refusal(roster(first, *members.values())) == "roster_duplicate"


def test_every_changed_byte_of_a_signed_roster_is_refused():
    envelope = seal(roster(), ORCHESTRATOR)
    for position in range(0, len(envelope.body), 7):
        body = bytearray(envelope.body)
        body[position] ^= 1
        assert refusal(Envelope(body=bytes(body), signature=envelope.signature)) == "signature"


def test_the_digest_covers_every_field_the_hosting_map_included():
    base = roster()
    others = [
        roster(run_id="another"),
        roster(manifest_digest=bytes(32)),
        roster(step=4),
        roster(attempt=2),
        roster(ratchet=4),
        roster(nonce=b"\1" * 32),
        roster(member("worker-0", (0, 1)), member("worker-1", (2, 3)), member("aggregator-0")),
        roster(member("worker-0", (0, 2), joined=1), member("worker-1", (1, 3)), member("aggregator-0")),
    ]
    assert len({view.digest() for view in (base, *others)}) == 1 + len(others)
    assert roster().digest() == base.digest()
