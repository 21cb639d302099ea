"""The orchestrator: admission, keys, rosters, and a record of each before it takes effect."""

import json
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from raycloak.attestation.appraisal.appraisal import open_presentation
from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import CollateralBundle, Presentation
from raycloak.attestation.core.hpke import hpke_seal
from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.core.keys import IdentityKey, Purpose, Secret, derive
from raycloak.attestation.core.messages import Envelope, open_envelope, seal
from raycloak.attestation.core.roster import Roster, RosterMembers
from raycloak.attestation.keys.release import ExpectedRelease, key_commitment, open_keys
from raycloak.attestation.keys.run_secret import run_id_of
from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.attestation.orchestrator.data_commitments import DataCommitments
from raycloak.attestation.orchestrator.documents import read_documents
from raycloak.attestation.orchestrator.orchestrator import open_run
from raycloak.attestation.orchestrator.run_terms import RunTerms, SparseMasks
from raycloak.attestation.policy.policy import KeyQuotas, Policy, simulated_policy
from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
from raycloak.metrics.errors import EvidenceError, ProtocolError, RefusedError
from tests.attestation.attester.test_attester import Source
from tests.attestation.conftest import MANIFEST, MEASUREMENT, NOW, Session, StandIn

SECRET = Secret(b"\xab" * 32)
ANSWER = b"k" * 32
COMPUTATION = digest(b"computation")
COUNT, EPOCHS = 4, 3


@dataclass
class Desk:
    """An orchestrator that has begun a run, and members that can present themselves to it."""

    session: Session
    home: Path
    generated: bool = False
    now: float = NOW
    lifetime_s: int = 24 * 3600
    quotas: KeyQuotas = field(default_factory=KeyQuotas)
    members: dict[str, Attester] = field(default_factory=dict)
    masks: SparseMasks | None = None
    executions: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin another execution of the run, by a new instance on the same state."""
        self.orchestrator = EvidenceOrchestrator(str(self.home), lambda: self.now)
        if self.generated:
            self.run_id, self.key = self.orchestrator.open_run(None)
        else:
            (self.home / "secret").write_text(SECRET.reveal().hex())
            self.run_id, self.key = self.orchestrator.open_run(str(self.home / "secret"))
        self.executions += 1
        self.begin()

    def restart(self, begin: bool = True) -> None:
        """Replace the instance in the same execution, as after a crash."""
        self.orchestrator.close()
        self.orchestrator = EvidenceOrchestrator(str(self.home), lambda: self.now)
        secret = None if self.generated else str(self.home / "secret")
        assert self.orchestrator.open_run(secret, self.run_id) == (self.run_id, self.key)
        if begin:
            self.begin()

    def policy(self) -> Policy:
        policy = simulated_policy(self.session.vendor, MEASUREMENT)
        return policy.model_copy(update={"evidence_lifetime_s": self.lifetime_s, "key_quotas": self.quotas})

    def begin(self) -> None:
        policy = self.policy()
        contract = StandIn.under(policy, COUNT, EPOCHS)
        terms = RunTerms(contract, policy, self.session.collateral, masks=self.masks)
        self.orchestrator.begin(terms, f"execution-{self.executions}")

    def present(self, name: str, answer: bytes = ANSWER) -> Envelope:
        """Answer a fresh challenge honestly."""
        role = "aggregator" if name.startswith("aggregator") else "worker"
        attester = self.members.setdefault(name, Attester(name, Source(self.session.platform)))
        challenge = self.orchestrator.challenge(name, role)
        return attester.present(challenge, MANIFEST, answer if role == "worker" else b"")

    def admit(self, *names: str) -> None:
        for name in names:
            self.orchestrator.admit(self.present(name))

    def commitments(self, name: str, v: int, value: bytes, **changes) -> Envelope:
        body = {"run_id": self.run_id, "member_id": name, "virtual_workers": (v,), "commitments": (value,)}
        return seal(DataCommitments(**body | changes), self.members[name].identity)

    def open_slices(self, name: str, hosted: tuple[int, ...]) -> None:
        """Commit to slices, as a worker that has its keys does; nothing of one that is not admitted."""
        if name in self.orchestrator.view().admitted:
            changed = {"virtual_workers": hosted, "commitments": (b"c" * 32,) * len(hosted)}
            self.orchestrator.record_data(self.commitments(name, 0, b"", **changed))

    def roster(self, step: int = 0, done: StepCommit | None = None, hosting=None, aggregators=()) -> Roster:
        hosting = {"worker-0": (0, 2), "worker-1": (1, 3)} if hosting is None else hosting
        for name, hosted in hosting.items():
            self.open_slices(name, hosted)
        envelope = self.orchestrator.open_step(step, hosting, aggregators, (done,) if done else ())
        return open_envelope(Roster, envelope, self.key.ed25519)

    def log(self) -> list[tuple[str, dict]]:
        return [(entry.kind, entry.content) for entry in self.orchestrator._run.books.log.entries()]


@pytest.fixture
def desk(session, tmp_path) -> Desk:
    tmp_path.joinpath("orchestrator").mkdir()
    return Desk(session, tmp_path / "orchestrator")


def commit(step: int, parameters: bytes, attempts: int) -> StepCommit:
    return StepCommit(
        step=step, released_digest=parameters, attempts=attempts, ledger_sequence=10 + step, ledger_hash=b"h" * 32
    )


def refusal(function, *arguments) -> str:
    with pytest.raises(RefusedError) as error:
        function(*arguments)
    return error.value.code


# --- the run


KEYS = ("identity", "ml-dsa")


def test_the_keys_of_a_manifest_are_released_under_its_own_policy_alone(desk):
    """A driver that names a laxer one gets no session: the keys derive from a manifest that names another."""
    lax = desk.policy().model_copy(update={"evidence_lifetime_s": 10**6})
    terms = RunTerms(StandIn.under(desk.policy()), lax, desk.session.collateral)
    assert refusal(desk.orchestrator.begin, terms, "another") == "policy_mismatch"
    desk.orchestrator.begin(replace(terms, contract=StandIn.under(lax)), "another")


def test_run_id_and_key_follow_from_the_secret_so_a_restart_is_the_same_orchestrator(desk):
    run_id, key = desk.run_id, desk.key
    assert run_id == run_id_of(SECRET)
    assert key.ed25519 == IdentityKey.from_seed(derive(SECRET, Purpose.ORCHESTRATOR_IDENTITY)).public
    assert key == HybridSigner(*(derive(SECRET, Purpose(f"raycloak/orchestrator-{each}/v1")) for each in KEYS)).public
    desk.start()
    assert (desk.run_id, desk.key) == (run_id, key)


def test_a_run_and_its_session_are_whole_after_their_constructors(desk, tmp_path):
    run = open_run(str(desk.home), lambda: NOW, str(desk.home / "secret"))
    terms = RunTerms(StandIn.under(desk.policy()), desk.policy(), desk.session.collateral)
    opened = set(vars(run))
    begun = run.begin(terms, "execution")
    parts = [begun, begun.admission, begun.keys]
    made = [set(vars(part)) for part in parts]
    attester = Attester("worker-0", Source(desk.session.platform))
    begun.admission.admit(attester.present(begun.admission.challenge("worker-0", "worker"), MANIFEST, ANSWER))
    begun.keys.release("worker-0", 0, (0,))
    begun.commit((commit(0, b"p" * 32, 1),))
    run.finish(str(tmp_path / "evidence.jsonl"), destroy=False)
    assert [set(vars(part)) for part in parts] == made
    assert set(vars(run)) == opened
    run.close()


def test_its_state_is_private(session, tmp_path):
    desk = Desk(session, tmp_path / "state" / "orchestrator", generated=True)
    assert stat.S_IMODE(desk.home.stat().st_mode) == 0o700
    for path in desk.home.glob(f"{desk.run_id}.s*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_nothing_it_holds_shows_the_secret(desk):
    desk.admit("worker-0")
    shown = f"{desk.orchestrator!r} {desk.orchestrator.view()!r} {desk.log()!r}"
    stored = b"".join(path.read_bytes() for path in desk.home.glob(f"{desk.run_id}.sqlite*"))
    assert SECRET.reveal().hex() not in shown
    assert SECRET.reveal() not in stored
    assert SECRET.reveal().hex().encode() not in stored


def test_each_epoch_has_commitments_of_its_own(desk):
    first = desk.orchestrator.key_commitments(COMPUTATION, COUNT, EPOCHS)
    assert len(set(first)) == EPOCHS
    assert desk.orchestrator.key_commitments(COMPUTATION, COUNT, 1) == first[:1]
    assert desk.orchestrator.key_commitments(bytes(32), COUNT, EPOCHS) != first


# --- admission


def test_an_admitted_member_is_shown_with_role_class_and_expiry(desk):
    desk.admit("worker-0", "aggregator-0")
    view = desk.orchestrator.view()
    assert view.admitted == {"worker-0": "worker", "aggregator-0": "aggregator"}
    assert view.evidence_class == "simulated"
    assert view.earliest_expiry["worker"] == NOW + 24 * 3600
    admitted = [content for kind, content in desk.log() if kind == "admitted"]
    assert [content["member_id"] for content in admitted] == ["worker-0", "aggregator-0"]
    assert admitted[0]["identity_key"] == desk.members["worker-0"].identity.public.hex()
    assert admitted[0]["claims"]["dbgstat"] == "disabled-since-boot"


def test_a_replayed_nonce_is_refused_and_logged(desk):
    envelope = desk.present("worker-0")
    desk.orchestrator.admit(envelope)
    desk.orchestrator.expel("worker-0", "died")
    assert refusal(desk.orchestrator.admit, envelope) == "nonce_replayed"
    assert desk.log()[-1] == ("refused", {"member_id": "worker-0", "code": "nonce_replayed"})


def test_a_nonce_is_used_up_by_evidence_that_was_refused(desk):
    honest = open_envelope(Presentation, desk.present("worker-0"), desk.members["worker-0"].identity.public)
    stranger = IdentityKey.generate()
    stolen = seal(honest.model_copy(update={"identity_key": stranger.public}), stranger)
    assert refusal(desk.orchestrator.admit, stolen) == "key_not_bound"
    assert refusal(desk.orchestrator.admit, seal(honest, desk.members["worker-0"].identity)) == "nonce_replayed"
    assert desk.orchestrator.view().admitted == {}


def test_evidence_of_another_session_is_refused(desk, session, tmp_path):
    """Another run of the same code and manifest: its challenge was never this orchestrator's."""
    other = Desk(session, tmp_path / "other", generated=True)
    assert refusal(desk.orchestrator.admit, other.present("worker-0")) == "nonce_foreign"


def test_an_answer_to_a_challenge_of_an_earlier_session_is_refused(desk):
    """Also one that nobody has presented yet: the run and its manifest are the same in the next session."""
    presented, kept_back = desk.present("worker-0"), desk.present("worker-1")
    desk.orchestrator.admit(presented)
    desk.start()
    assert refusal(desk.orchestrator.admit, presented) == "nonce_replayed"
    assert refusal(desk.orchestrator.admit, kept_back) == "nonce_foreign"
    unanswered = desk.present("worker-1")
    desk.restart()
    desk.orchestrator.admit(unanswered)


def test_a_challenge_is_for_one_member_and_role(desk):
    attester = Attester("worker-1", Source(desk.session.platform))
    challenge = desk.orchestrator.challenge("worker-0", "worker")
    moved = challenge.model_copy(update={"member_id": "worker-1"})
    assert refusal(desk.orchestrator.admit, attester.present(moved, MANIFEST, ANSWER)) == "nonce_foreign"
    promoted = desk.orchestrator.challenge("worker-1", "worker").model_copy(update={"role": "aggregator"})
    assert refusal(desk.orchestrator.admit, attester.present(promoted, MANIFEST, b"")) == "nonce_foreign"


def test_a_worker_that_computes_other_bytes_is_refused(desk):
    assert refusal(desk.orchestrator.admit, desk.present("worker-0", b"x" * 32)) == "numerics_mismatch"
    assert desk.log()[-1] == ("refused", {"member_id": "worker-0", "code": "numerics_mismatch"})
    assert desk.orchestrator.view().admitted == {}


def test_a_stale_challenge_is_refused(desk):
    envelope = desk.present("worker-0")
    desk.now += 301
    assert refusal(desk.orchestrator.admit, envelope) == "nonce_foreign"


# --- keys


def test_released_keys_open_for_their_member_alone_and_are_the_committed_ones(desk):
    desk.admit("worker-0", "worker-1")
    package = desk.orchestrator.release("worker-0", 1, (0, 2))
    expected = {
        "terms": ExpectedRelease(desk.key, desk.run_id, "worker-0", MANIFEST, desk.policy()),
        "key_commitments": desk.orchestrator.key_commitments(COMPUTATION, COUNT, EPOCHS),
    }
    epoch, keys = open_keys(package, hpke_key=desk.members["worker-0"].hpke, **expected)
    assert (epoch, sorted(keys)) == (1, [0, 2])
    with pytest.raises(EvidenceError, match="key_not_for_us"):
        open_keys(package, hpke_key=desk.members["worker-1"].hpke, **expected)


def test_a_release_is_logged_before_the_package_exists(desk, monkeypatch):
    desk.admit("worker-0")
    sealed_after = []
    monkeypatch.setattr(
        "raycloak.attestation.orchestrator.key_desk.seal_package",
        lambda *_: sealed_after.append(desk.log()[-1]) or Envelope(body=b"", signature=b""),
    )
    desk.orchestrator.release("worker-0", 0, (0,))
    ((kind, content),) = sealed_after
    assert kind == "released"
    assert (content["member_id"], content["epoch"], content["virtual_workers"]) == ("worker-0", 0, [0])


def test_keys_go_to_admitted_workers_only(desk):
    desk.present("worker-0")
    assert refusal(desk.orchestrator.release, "worker-0", 0, (0,)) == "release_denied"
    desk.admit("aggregator-0")
    assert refusal(desk.orchestrator.release, "aggregator-0", 0, (0,)) == "release_denied"
    desk.admit("worker-0")
    desk.orchestrator.expel("worker-0", "died")
    assert refusal(desk.orchestrator.release, "worker-0", 0, (0,)) == "release_denied"
    assert "released" not in [kind for kind, _ in desk.log()]


def test_a_refused_release_is_in_the_log_though_nothing_else_is_left_of_it(desk):
    """Try a stranger, an aggregator and a worker without fresh evidence; each entry is durable when the refusal is
    told."""
    desk.admit("worker-0", "aggregator-0")
    desk.orchestrator.release("worker-0", 0, (0,))
    for name in ("stranger", "aggregator-0", "worker-0"):
        before = desk.log()
        assert refusal(desk.orchestrator.release, name, 1, (0,)) == "release_denied"
        desk.restart()
        entry = {"member_id": name, "kind": "virtual_worker", "code": "release_denied"}
        assert desk.log() == [*before, ("release_refused", entry)]
    refusal(desk.orchestrator.release, "n" * 10_000, 0, (0,))
    assert desk.log()[-1][1]["member_id"] == "n" * 200


def test_a_checkpoint_key_that_is_refused_is_in_the_log(desk):
    desk.quotas = KeyQuotas(per_member=1, per_run=1)
    desk.start()
    recipient = desk.orchestrator.package_recipient()
    wrapped = hpke_seal(b"d" * 32, recipient.key, b"info")
    assert desk.orchestrator.open_package(b"info", wrapped) == b"d" * 32
    assert refusal(desk.orchestrator.open_package, b"info", wrapped) == "release_denied"
    entry = {"member_id": "", "kind": "checkpoint", "code": "release_denied"}
    assert desk.log()[-1] == ("release_refused", entry)


def test_keys_are_not_released_on_expired_evidence(session, tmp_path):
    desk = Desk(session, tmp_path / "short", generated=True, lifetime_s=60)
    desk.admit("worker-0")
    desk.now += 59
    desk.orchestrator.release("worker-0", 0, (0,))
    desk.now += 1
    assert refusal(desk.orchestrator.release, "worker-0", 0, (1,)) == "release_denied"
    desk.admit("worker-0")
    desk.orchestrator.release("worker-0", 0, (1,))


def test_each_epoch_needs_fresh_evidence(desk):
    desk.admit("worker-0")
    desk.orchestrator.release("worker-0", 0, (0,))
    desk.orchestrator.release("worker-0", 0, (1,))
    assert refusal(desk.orchestrator.release, "worker-0", 1, (0,)) == "release_denied"
    desk.admit("worker-0")
    desk.orchestrator.release("worker-0", 1, (0,))


def test_a_key_is_drawn_no_more_often_than_its_quota_also_after_a_restart(desk):
    """Counted for a member within a session, and for the run over all members and sessions."""
    desk.quotas = KeyQuotas(per_member=2, per_run=5)
    desk.start()
    desk.admit("worker-0", "worker-1")
    desk.orchestrator.release("worker-0", 0, (0,))
    desk.restart()
    desk.orchestrator.release("worker-0", 0, (0, 1))
    before = desk.log()
    assert refusal(desk.orchestrator.release, "worker-0", 0, (1, 0)) == "release_denied"
    refused = {"member_id": "worker-0", "kind": "virtual_worker", "code": "release_denied"}
    assert desk.log() == [*before, ("release_refused", refused)]
    desk.orchestrator.release("worker-0", 0, (1,))
    desk.orchestrator.release("worker-1", 0, (0,))
    desk.start()
    desk.admit("worker-0", "worker-1")
    for name in ("worker-0", "worker-1"):
        desk.orchestrator.release(name, 0, (0,))
    assert refusal(desk.orchestrator.release, "worker-1", 0, (0,)) == "release_denied"


def test_draws_that_an_older_version_counted_count_too(desk):
    desk.quotas = KeyQuotas(per_run=2)
    desk.admit("worker-0", "worker-1")
    desk.orchestrator.release("worker-0", 0, (0,))
    desk.orchestrator.release("worker-0", 0, (0,))
    desk.orchestrator._run.books.state.db.execute("DROP TABLE draw_totals")
    desk.restart()
    assert refusal(desk.orchestrator.release, "worker-1", 0, (0,)) == "release_denied"


def test_a_policy_changed_after_appraisal_releases_nothing(desk):
    desk.admit("worker-0")
    desk.orchestrator.release("worker-0", 0, (0,))
    desk.lifetime_s += 1
    desk.restart()
    assert "worker-0" in desk.orchestrator.view().admitted
    assert refusal(desk.orchestrator.release, "worker-0", 0, (1,)) == "release_denied"
    desk.admit("worker-0")
    assert refusal(desk.orchestrator.release, "worker-0", 0, (1,)) == "release_denied"


# --- data


def test_the_first_commitment_to_a_slice_binds_the_run_across_restarts(desk):
    desk.admit("worker-0", "worker-1")
    desk.orchestrator.record_data(desk.commitments("worker-0", 1, b"c" * 32))
    desk.orchestrator.record_data(desk.commitments("worker-1", 1, b"c" * 32))
    desk.start()
    desk.admit("worker-0")
    assert refusal(desk.orchestrator.record_data, desk.commitments("worker-0", 1, b"d" * 32)) == "data_changed"
    desk.orchestrator.record_data(desk.commitments("worker-0", 1, b"c" * 32))
    changed = {"virtual_workers": (0, 1), "commitments": (b"c" * 32, b"d" * 32)}
    assert refusal(desk.orchestrator.record_data, desk.commitments("worker-0", 1, b"", **changed)) == "data_changed"
    assert [content["virtual_worker"] for kind, content in desk.log() if kind == "data"] == [1], "all or nothing"


def test_no_roster_lets_a_member_compute_on_examples_it_has_not_committed_to(desk):
    desk.admit("worker-0", "worker-1")
    hosting = {"worker-0": (0, 2), "worker-1": (1, 3)}
    desk.open_slices("worker-0", (0, 1, 2, 3))
    desk.open_slices("worker-1", (1,))
    assert refusal(desk.orchestrator.open_step, 0, hosting, (), ()) == "data_unknown"
    desk.open_slices("worker-1", (3,))
    desk.restart()
    desk.orchestrator.open_step(0, hosting, (), ())
    desk.orchestrator.expel("worker-1", "died")
    desk.admit("worker-1")
    assert refusal(desk.orchestrator.open_step, 0, hosting, (), ()) == "data_unknown"
    desk.start()
    desk.admit("worker-0", "worker-1")
    assert refusal(desk.orchestrator.open_step, 0, hosting, (), ()) == "data_unknown"


def test_no_key_of_an_epoch_that_nobody_committed_to_is_released(desk, monkeypatch):
    """Nor does the question cost anything; before, each made the commitments of that epoch, and kept them for ever."""
    desk.admit("worker-0", "worker-1")
    made = []
    monkeypatch.setattr(
        "raycloak.attestation.keys.release.key_commitment", lambda key: made.append(key) or key_commitment(key)
    )
    for epoch in (EPOCHS, 2**40, 2**64 - 1):
        assert refusal(desk.orchestrator.release, "worker-0", epoch, (0,)) == "release_denied"
    desk.orchestrator.release("worker-0", EPOCHS - 1, (0,))
    assert refusal(desk.orchestrator.release, "worker-0", 0, (0,)) == "release_denied", "its evidence served another"
    assert refusal(desk.orchestrator.release, "nobody", 0, (0,)) == "release_denied"
    assert len(made) == COUNT


def test_most_hosted_counts_what_any_machine_ever_got_of_an_epoch_in_any_session(desk):
    assert desk.orchestrator.most_hosted() == 0
    desk.members["worker-1"] = Attester("worker-1", Source(desk.session.vendor.platform()))
    desk.admit("worker-0", "worker-1")
    desk.orchestrator.release("worker-0", 0, (0, 1))
    desk.orchestrator.release("worker-0", 0, (1, 2))
    desk.orchestrator.release("worker-1", 0, (3,))
    assert desk.orchestrator.most_hosted() == 3
    desk.start()
    desk.admit("worker-0", "worker-2")
    desk.orchestrator.release("worker-2", 1, (3,))
    assert desk.orchestrator.most_hosted() == 3, "of another epoch"
    desk.orchestrator.release("worker-0", 0, (3,))
    assert desk.orchestrator.most_hosted() == 4, "whoever asks, the machine is the same"


def test_commitments_count_only_from_the_admitted_worker_that_signed_them(desk):
    desk.admit("worker-0", "worker-1")
    forged = desk.commitments("worker-0", 0, b"c" * 32, member_id="worker-1")
    assert refusal(desk.orchestrator.record_data, forged) == "signature"
    elsewhere = desk.commitments("worker-0", 0, b"c" * 32, run_id="another")
    assert refusal(desk.orchestrator.record_data, elsewhere) == "release_denied"
    desk.orchestrator.expel("worker-0", "died")
    assert refusal(desk.orchestrator.record_data, desk.commitments("worker-0", 0, b"c" * 32)) == "release_denied"
    for unfit in ({"commitments": ()}, {"virtual_workers": (COUNT,)}, {"virtual_workers": (-1,)}):
        changed = desk.commitments("worker-1", 0, b"c" * 32, **unfit)
        assert refusal(desk.orchestrator.record_data, changed) == "malformed"
    desk.admit("aggregator-0")
    assert refusal(desk.orchestrator.record_data, desk.commitments("aggregator-0", 0, b"c" * 32)) == "release_denied"
    assert "data" not in [kind for kind, _ in desk.log()]


# --- rosters


def test_a_roster_lists_workers_by_id_then_aggregators_by_range_with_their_attested_keys(desk):
    desk.admit("worker-1", "worker-0", "aggregator-1", "aggregator-0")
    view = desk.roster(hosting={"worker-1": (3, 1), "worker-0": (0, 2)}, aggregators=("aggregator-1", "aggregator-0"))
    assert [each.member_id for each in view.members] == ["worker-0", "worker-1", "aggregator-1", "aggregator-0"]
    for each in view.members:
        attester = desk.members[each.member_id]
        assert each.mask_key == attester.agreement.public
        assert each.identity_key == attester.identity.public
        assert each.evidence_digest == attester.evidence_digest
    assert view.member("worker-1").virtual_workers == (1, 3)
    assert len(view.nonce) == 32


def test_no_attempt_is_ever_issued_twice_also_across_restarts(desk):
    desk.admit("worker-0", "worker-1")
    seen = [(view.step, view.attempt) for view in (desk.roster(0), desk.roster(0), desk.roster(1))]
    desk.start()
    desk.admit("worker-0", "worker-1")
    seen += [(view.step, view.attempt) for view in (desk.roster(0), desk.roster(1))]
    assert seen == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]


def test_no_two_rosters_share_a_nonce_or_digest(desk):
    desk.admit("worker-0", "worker-1")
    views = [desk.roster(step) for step in (0, 0, 1, 1)]
    assert len({view.nonce for view in views}) == len({view.digest() for view in views}) == 4


def test_the_attempt_is_on_disk_before_the_roster_is_signed(desk, monkeypatch):
    """A crash at the signature must not bring the attempt back: its masks may already be in use."""
    desk.admit("worker-0", "worker-1")

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("raycloak.attestation.orchestrator.orchestrator.seal", crash)
        with pytest.raises(KeyboardInterrupt):
            desk.roster(0)
    desk.start()
    desk.admit("worker-0", "worker-1")
    assert desk.roster(0).attempt == 1


def test_attempts_are_bounded(desk, monkeypatch):
    monkeypatch.setattr("raycloak.attestation.orchestrator.orchestrator.MAX_ATTEMPTS_PER_STEP", 2)
    desk.admit("worker-0", "worker-1")
    desk.roster(0)
    desk.roster(0)
    assert refusal(desk.roster, 0) == "attempts_exhausted"
    assert desk.roster(1).attempt == 0


def test_the_ratchet_counts_commits_and_newcomers_join_where_it_stands(desk):
    desk.admit("worker-0", "worker-1")
    assert desk.roster(0).ratchet == 0
    view = desk.roster(1, commit(0, b"p" * 32, 2))
    assert view.ratchet == 1
    desk.admit("worker-2", "worker-1")
    hosting = {"worker-0": (0,), "worker-1": (1,), "worker-2": (2, 3)}
    view = desk.roster(2, commit(1, b"q" * 32, 1), hosting)
    assert view.ratchet == 2
    assert [worker.joined for worker in view.workers] == [0, 0, 1]
    committed = [content for kind, content in desk.log() if kind == "committed"]
    assert [(each["step"], each["released_digest"], each["attempts"]) for each in committed] == [
        (0, (b"p" * 32).hex(), 2),
        (1, (b"q" * 32).hex(), 1),
    ]


def test_only_members_with_valid_evidence_are_put_in_a_roster(session, tmp_path):
    desk = Desk(session, tmp_path / "short", generated=True, lifetime_s=60)
    desk.admit("worker-0")
    desk.now += 30
    desk.admit("worker-1")
    desk.now += 30
    assert refusal(desk.roster) == "evidence_expired"
    desk.admit("worker-0")
    assert desk.roster().attempt == 0
    desk.orchestrator.expel("worker-1", "died")
    assert refusal(desk.roster) == "evidence_expired"
    assert desk.log()[-1] == ("expelled", {"member_id": "worker-1", "cause": "died"})


def test_a_refused_roster_commits_nothing(desk):
    desk.admit("worker-0")
    desk.open_slices("worker-0", (0, 2))
    before = desk.log()
    assert refusal(desk.roster, 1, commit(0, b"p" * 32, 1)) == "evidence_expired"
    assert desk.log() == before


# --- the end


def test_the_exported_log_verifies_and_holds_every_decision(desk, tmp_path):
    desk.admit("worker-0", "worker-1")
    desk.orchestrator.release("worker-0", 0, (0, 2))
    view = desk.roster()
    desk.orchestrator.commit((commit(0, b"p" * 32, 1),))
    desk.orchestrator.finish(str(tmp_path / "evidence.jsonl"), destroy=True)
    path = tmp_path / "evidence.jsonl"
    kinds = ["session", "admitted", "admitted", "released", *["data"] * 4, "roster", "committed", "finished"]
    assert len(read_exported_log(path, desk.key).entries) == len(kinds)
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    assert [line["kind"] for line in lines] == kinds
    members = RosterMembers(members=view.members)
    assert lines[8]["body"] == {
        "query": "gradient",
        "step": 0,
        "attempt": 0,
        "digest": view.digest().hex(),
        "ratchet": view.ratchet,
        "nonce": view.nonce.hex(),
        "members": members.digest().hex(),
        "circle": None,
    }
    with pytest.raises(EvidenceError):
        read_exported_log(path, HybridSigner.generate().public)


def test_no_circle_is_drawn_for_a_step_beyond_the_runs_releases(session, tmp_path):
    """Their number is in the bound that the reach of a circle follows from."""
    desk = Desk(session, tmp_path, masks=SparseMasks(colluding_workers=1, releases=2))
    desk.admit("worker-0", "worker-1")
    assert desk.roster(1).circle is None, "two workers mask with each other"
    with pytest.raises(ProtocolError) as error:
        desk.roster(2)
    assert error.value.code == "step_unplanned"


def test_what_the_log_names_by_a_digest_is_exported_beside_it(desk, tmp_path):
    """The policy, the evidence of each member, the collateral it was judged by, and the members of rosters."""
    desk.admit("worker-0", "worker-1")
    desk.orchestrator.release("worker-0", 0, (0, 2))
    view = desk.roster()
    desk.roster(1)
    desk.orchestrator.commit((commit(0, b"p" * 32, 1),))
    desk.orchestrator.finish(str(tmp_path / "evidence.jsonl"), destroy=True)
    found = read_documents((tmp_path / "documents.jsonl").read_bytes().splitlines())
    assert [each.kind for each in found.values()] == ["policy", "presentation", "collateral", "presentation", "members"]
    for kind, content in desk.log():
        if kind == "session":
            assert (
                found[bytes.fromhex(content["policy_digest"])].open(Policy).digest().hex() == content["policy_digest"]
            )
        if kind == "admitted":
            shown = open_presentation(found[bytes.fromhex(content["evidence_digest"])].envelope)
            assert shown.member_id == content["member_id"]
            assert found[bytes.fromhex(content["collateral"])].open(CollateralBundle).tdx
        if kind == "roster":
            assert found[bytes.fromhex(content["members"])].open(RosterMembers).members == view.members


def test_a_generated_secret_is_destroyed_when_asked_and_a_users_own_never(session, desk, tmp_path):
    desk.orchestrator.finish(str(tmp_path / "1.jsonl"), destroy=True)
    assert (desk.home / "secret").read_text() == SECRET.reveal().hex()
    assert desk.log()[-1] == ("finished", {"secret_destroyed": False})
    for destroy in (True, False):
        own = Desk(session, tmp_path / f"generated-{destroy}", generated=True)
        own.orchestrator.finish(str(tmp_path / "2.jsonl"), destroy=destroy)
        assert (own.home / f"{own.run_id}.secret").exists() is not destroy
        assert own.log()[-1] == ("finished", {"secret_destroyed": destroy})


def test_finishing_again_adds_nothing_to_the_log_and_writes_it_again(desk, tmp_path):
    """A run that failed is finished on the way out, whatever had been finished before."""
    desk.orchestrator.commit((commit(0, b"p" * 32, 1),))
    desk.orchestrator.finish(str(tmp_path / "1.jsonl"), False)
    before = desk.log()
    desk.orchestrator.finish(str(tmp_path / "2.jsonl"), True)
    desk.restart()
    desk.orchestrator.finish(str(tmp_path / "3.jsonl"), True)
    assert desk.log() == before
    # The entries and the head are the same; ML-DSA signs with fresh randomness.
    logs = [read_exported_log(tmp_path / f"{number}.jsonl", desk.key) for number in (1, 2, 3)]
    assert all((log.entries, log.head) == (logs[0].entries, logs[0].head) for log in logs)


def test_a_run_that_never_began_is_finished_too(session, tmp_path):
    desk = Desk(session, tmp_path / "early", generated=True)
    desk.orchestrator.finish(str(tmp_path / "1.jsonl"), destroy=False)
    desk.restart(begin=False)
    for _ in range(2):
        desk.orchestrator.finish(str(tmp_path / "2.jsonl"), destroy=True)
    assert [kind for kind, _ in desk.log()] == ["session", "finished", "finished"]
    assert not list(desk.home.glob("*.secret"))


def test_a_malformed_presentation_is_refused_and_logged(desk):
    assert refusal(desk.orchestrator.admit, Envelope(body=b"{}", signature=bytes(64))) == "evidence_malformed"
    assert desk.log()[-1] == ("refused", {"member_id": "", "code": "evidence_malformed"})
