"""Refusals over a budget are counted instead of logged, and the log says how many they were."""

import sqlite3

import pytest

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.files.sqlite import Transactions
from raycloak.attestation.log.evidence_log import EvidenceLog, read_exported_log
from raycloak.attestation.orchestrator import refusal_log
from raycloak.attestation.orchestrator.peer_desk import Peer
from raycloak.attestation.orchestrator.refusal_log import RefusalLog
from raycloak.attestation.trust.channel import ChannelBinding, certificate_digest, client_end
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import MANIFEST
from tests.attestation.serving import ANSWER, Site

BURST = 4


class Book:
    """A log with its refusals, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        db = sqlite3.connect(":memory:", isolation_level=None)
        transactions = Transactions(db)
        signer = HybridSigner(Secret(bytes(32)), Secret(bytes(32)))
        self.log = EvidenceLog(db, "run", signer, transactions)
        self.refusals = RefusalLog(self.log, transactions.transaction, lambda: self.now)

    def refuse(self, times: int, asker: str | None = "stranger", code: str = "peer_not_bound") -> None:
        for _ in range(times):
            if asker is None:
                self.refusals.append("refused", "worker-0", code)
                continue
            with self.refusals.asked_by(asker):
                self.refusals.append("refused", "worker-0", code)

    @property
    def entries(self):
        return [(entry.kind, entry.content) for entry in self.log.entries()]

    @property
    def omitted(self):
        return [body for kind, body in self.entries if kind == "refusals_omitted"]


@pytest.fixture
def book(monkeypatch):
    monkeypatch.setattr(refusal_log, "BURST", BURST)
    return Book()


def test_strangers_cause_a_burst_of_entries_and_then_one_per_second_with_the_count_of_the_others(book):
    book.refuse(BURST + 5)
    assert book.entries == [("refused", {"member_id": "worker-0", "code": "peer_not_bound"})] * BURST
    book.refuse(2, code="nonce_foreign")
    book.now += 1.0
    book.refuse(3)
    kinds = [kind for kind, _ in book.entries]
    assert kinds == ["refused"] * BURST + ["refusals_omitted", "refused"]
    assert book.omitted == [{"count": 7, "codes": {"peer_not_bound": 5, "nonce_foreign": 2}}]
    for _ in range(100):
        book.now += 1.0
        book.refuse(50)
    assert len(book.log) == BURST + 2 + 2 * 100
    book.refusals.settle()
    assert sum(body["count"] for body in book.omitted) + kinds_of(book, "refused") == BURST + 5 + 2 + 3 + 5000


def kinds_of(book, kind):
    return sum(each == kind for each, _ in book.entries)


def test_strangers_do_not_use_up_what_members_and_the_run_itself_may_cause(book):
    book.refuse(10 * BURST)
    book.refuse(BURST + 1, "member")
    assert kinds_of(book, "refused") == 2 * BURST
    book.refuse(3 * BURST, None)
    assert kinds_of(book, "refused") == 5 * BURST


def test_a_question_inside_another_is_charged_to_its_own_asker_alone(book):
    with book.refusals.asked_by("stranger"):
        book.refuse(BURST, "member")
        book.refusals.append("refused", "", "busy")
    book.refuse(1, "member")
    assert kinds_of(book, "refused") == BURST + 1


def test_what_was_omitted_is_said_once_when_the_owner_closes(book):
    book.refuse(BURST + 3)
    book.refusals.close()
    book.refusals.close()
    assert book.omitted == [{"count": 3, "codes": {"peer_not_bound": 3}}]


def test_a_name_of_any_length_takes_no_more_than_200_letters(book):
    book.refusals.append("refused", "x" * 100_000, "busy")
    assert book.entries[0][1]["member_id"] == "x" * 200


# --- a service


@pytest.fixture
def site(session, tmp_path, monkeypatch):
    monkeypatch.setattr(refusal_log, "BURST", BURST)
    # A service has a real clock: on a busy machine these calls take more than a second.
    monkeypatch.setattr(refusal_log, "PER_SECOND", 1e-9)
    site = Site(session, tmp_path / "orchestrator")
    yield site
    site.run.close()


def peer_of(key: IdentityKey) -> Peer:
    return Peer.of("ipv4:127.0.0.1", client_end(key, MANIFEST).chain_pem)


def code_of(call, *arguments) -> str:
    with pytest.raises(EvidenceError) as error:
        call(*arguments)
    return error.value.code


def test_a_stranger_cannot_grow_the_log_for_ever_by_any_call(site, tmp_path):
    """Before refusals had a budget, each of these 36 calls was an entry."""
    stranger = peer_of(IdentityKey.generate())
    attester = site.attester("worker-9")
    relayed = attester.present(site.begun.admission.challenge("worker-9", "worker"), MANIFEST, ANSWER)
    own = peer_of(attester.identity)
    site.begun.admission.admit(relayed)
    site.begun.admission.expel("worker-9", "so that its nonce is used up")
    ends = {"server_certificate": site.desk.end.certificate, "client_certificate": certificate_digest(own.certificate)}
    binding = ChannelBinding(presentation=digest(relayed.body), **ends)
    signature = attester.identity.sign(binding.signed_bytes())
    before = len(site.run.books.log)
    for _ in range(3 * BURST):
        assert code_of(site.desk.grant_keys, stranger, "worker-0", 0, ()) == "release_denied"
        assert code_of(site.desk.attest, stranger, relayed, bytes(64)) == "peer_not_bound"
        assert code_of(site.desk.attest, own, relayed, signature) == "nonce_replayed"
    assert len(site.run.books.log) == before + BURST

    file = tmp_path / "log.jsonl"
    site.run.export_log(str(file))
    assert len(read_exported_log(file, site.log_owner).entries) == before + BURST + 1
    *_, newest = site.run.books.log.entries()
    assert newest.kind == "refusals_omitted"
    assert newest.content == {"count": 32, "codes": {"release_denied": 10, "peer_not_bound": 11, "nonce_replayed": 11}}


def test_evidence_that_cannot_be_opened_is_refused_in_the_log_too(site):
    """Over the service as well; before, only what the run itself was shown."""
    stranger, attester = peer_of(IdentityKey.generate()), site.attester()
    genuine = attester.present(site.begun.admission.challenge("worker-0", "worker"), MANIFEST, ANSWER)
    for envelope in (Envelope(body=b"{}", signature=bytes(64)), Envelope(body=genuine.body, signature=bytes(64))):
        code = code_of(site.desk.attest, stranger, envelope, bytes(64))
        *_, newest = site.run.books.log.entries()
        assert (newest.kind, newest.content) == ("refused", {"member_id": "", "code": code})


def test_after_a_flood_members_are_admitted_served_and_their_refusals_logged(site):
    stranger = peer_of(IdentityKey.generate())
    for _ in range(3 * BURST):
        code_of(site.desk.grant_keys, stranger, "worker-0", 0, ())
    attester = site.attester()
    site.begun.admission.admit(attester.present(site.begun.admission.challenge("worker-0", "worker"), MANIFEST, ANSWER))
    member = peer_of(attester.identity)
    site.desk.grant_keys(member, "worker-0", 0, ())
    assert code_of(site.desk.grant_keys, member, "worker-0", 0, (1,)) == "release_denied"
    assert code_of(site.desk.grant_keys, member, "worker-0", 1, ()) == "release_denied"
    kinds = [entry.kind for entry in site.run.books.log.entries()][1 + BURST :]
    assert kinds == ["admitted", "released", "refusals_omitted", "release_refused", "release_refused"]
