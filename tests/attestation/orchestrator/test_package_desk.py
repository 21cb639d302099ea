"""The orchestrator's part in packages: it signs what it committed, remembers it, and opens its own."""

from types import SimpleNamespace

import pytest

from raycloak.attestation.core.hpke import hpke_seal
from raycloak.attestation.core.hybrid_signature import HybridSignature, HybridSigner
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.log.entries import LogHead
from raycloak.attestation.orchestrator.books import RunBooks
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.attestation.orchestrator.package_desk import PackageDesk, PublishedPackage
from raycloak.attestation.orchestrator.state import SessionId
from raycloak.attestation.sealed.package_keys import TrustStore, run_recipient_key
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.metrics.errors import EvidenceError, ProtocolError

RUN, SECRET, PARAMETERS = "0123456789abcdef", Secret(b"s" * 32), b"p" * 32


class Desk:
    """A desk whose log has committed step 2."""

    def __init__(self, home):
        books = RunBooks(home / "state" / "run.sqlite", RUN, HybridSigner.generate())
        self.state, self.log, self.commits = books.state, books.log, books.commits
        self.signer_folder = home / "signer"
        self.drawn = []
        run = SimpleNamespace(
            books=books, run_id=RUN, recipient_key=run_recipient_key(SECRET), signer_folder=self.signer_folder
        )
        self.desk = PackageDesk(run, b"m" * 32, self.drawn.append)
        self.commit(2)

    def commit(self, step, parameters=PARAMETERS):
        with self.state.transaction():
            self.commits.record(
                (
                    StepCommit(
                        step=step, released_digest=parameters, attempts=1, ledger_sequence=7, ledger_hash=b"l" * 32
                    ),
                ),
                SessionId("s", b"m"),
            )

    def manifest(self, **changes):
        head = self.log.position()
        fields = {
            "run_id": RUN, "manifest_digest": b"m" * 32, "step": 3, "ranges": 1, "model_digest": PARAMETERS,
            "epsilon": None, "delta": 1e-5, "evidence_class": "simulated", "roster_digest": b"", "ledger_sequence": 7,
            "ledger_hash": b"l" * 32, "log_length": head.length, "log_hash": head.root, "previous": b"",
            "evaluation_accuracy": None, "evaluation_loss": None, "created_at": 1, "payloads": (), "recipients": (),
        }  # fmt: skip
        return PackageManifest(**fields | changes)

    def logged(self):
        return [(entry.kind, entry.content["step"]) for entry in self.log.entries()]


@pytest.fixture
def desk(tmp_path):
    (tmp_path / "state").mkdir()
    made = Desk(tmp_path)
    yield made
    made.state.close()


def code_of(action):
    with pytest.raises((EvidenceError, ProtocolError)) as refusal:
        action()
    return refusal.value.code


def test_a_package_of_a_committed_step_is_logged_and_signed_with_both_keys(desk):
    body = desk.manifest().encode()
    signature = HybridSignature.model_validate_json(desk.desk.sign(body))
    assert TrustStore.of("site", desk.desk.signer()).verify(body, signature) == "site"
    assert desk.logged() == [("committed", 2), ("sealed", 3)]


def test_it_signs_only_what_its_log_committed(desk):
    wrong = {
        "not_committed": [desk.manifest(step=4), desk.manifest(step=2)],
        "seal_refused": [
            desk.manifest(model_digest=b"q" * 32),
            desk.manifest(run_id="f" * 16),
            desk.manifest(manifest_digest=b"n" * 32),
            desk.manifest(ledger_sequence=8),
            desk.manifest(ledger_hash=b"k" * 32),
            desk.manifest(log_hash=b"x" * 32),
            desk.manifest(log_length=0),
            desk.manifest(log_length=99),
        ],
    }
    found = {code: [code_of(lambda m=m: desk.desk.sign(m.encode())) for m in each] for code, each in wrong.items()}
    assert found == {code: [code] * len(each) for code, each in wrong.items()}
    assert code_of(lambda: desk.desk.sign(b"{}")) == "malformed"
    assert desk.logged() == [("committed", 2)]
    assert not desk.signer_folder.exists()


def test_asking_again_logs_nothing_twice(desk):
    manifest = desk.manifest()
    for _ in range(2):
        desk.desk.sign(manifest.encode())
    for _ in range(2):
        desk.desk.record_published(3, manifest.digest())
    assert desk.logged() == [("committed", 2), ("sealed", 3), ("published", 3)]


def test_only_a_sealed_package_can_be_published(desk):
    assert code_of(lambda: desk.desk.record_published(3, b"d" * 32)) == "seal_refused"
    assert desk.desk.newest_published() is None


def test_the_newest_published_package_is_that_of_the_highest_step(desk):
    desk.commit(5)
    later, earlier = desk.manifest(step=6), desk.manifest(step=3)
    for manifest in (later, earlier):
        desk.desk.sign(manifest.encode())
        desk.desk.record_published(manifest.step, manifest.digest())
    assert desk.desk.newest_published() == PublishedPackage(step=6, digest=later.digest())
    again = desk.manifest(step=6, created_at=2)
    desk.desk.sign(again.encode())
    desk.desk.record_published(6, again.digest())
    assert desk.desk.newest_published() == PublishedPackage(step=6, digest=again.digest())


def test_it_opens_what_was_sealed_to_the_run(desk):
    recipient = desk.desk.recipient()
    assert recipient.name == "run"
    assert desk.desk.open(b"info", hpke_seal(b"key", recipient.key, b"info")) == b"key"
    assert desk.drawn == [b"info"]
    assert code_of(lambda: desk.desk.open(b"other", hpke_seal(b"key", recipient.key, b"info"))) == "key_not_for_us"


def test_the_logs_position_and_hashes_agree(desk):
    head = desk.log.position()
    assert head == LogHead(run_id=RUN, length=1, root=desk.log.root_at(1))
    assert desk.log.root_at(0) is None
    assert desk.log.root_at(2) is None
