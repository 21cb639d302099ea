"""An orchestrator that serves during its run: real sockets, and calls of the run beside them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.messages import parse, seal
from raycloak.attestation.core.roster import open_roster
from raycloak.attestation.log.entries import ExportedLogEntry, SignedHead
from raycloak.attestation.orchestrator.admissions import MAX_OBSERVERS
from raycloak.attestation.orchestrator.data_commitments import DataCommitments
from raycloak.attestation.orchestrator.run_terms import OBSERVER, RunTerms
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.service.client import EvidenceClient
from raycloak.attestation.service.limits import ServiceLimits
from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
from raycloak.metrics.errors import ConfigError, EvidenceError, RefusedError, RunFailedError
from tests.attestation.attester.test_attester import Source
from tests.attestation.conftest import MANIFEST, MEASUREMENT, NOW, StandIn
from tests.attestation.serving import ANSWER, eventually

HOSTING = {"worker-0": (0, 2), "worker-1": (1, 3)}


class Run:
    """The driver of a run, and those who look at it from outside."""

    def __init__(self, session, home, bind="127.0.0.1:0"):
        self.session, self.home, self.now = session, home, NOW
        (home / "run.secret").write_text("5e" * 32)
        policy = simulated_policy(session.vendor, MEASUREMENT)
        self.terms = RunTerms(StandIn.under(policy), policy, session.collateral)
        self.members = {}
        self.start(bind)

    def start(self, bind="127.0.0.1:0", session="execution-1"):
        self.orchestrator = EvidenceOrchestrator(str(self.home), lambda: self.now, bind)
        run_id = None if not (self.home / "5e.id").exists() else (self.home / "5e.id").read_text()
        self.run_id, self.owner = self.orchestrator.open_run(str(self.home / "run.secret"), run_id)
        (self.home / "5e.id").write_text(self.run_id)
        self.orchestrator.begin(self.terms, session)
        self.address = self.orchestrator.service_address()

    def admit(self, name):
        """Admit a member of the run as the driver does."""
        attester = self.members.setdefault(name, Attester(name, Source(self.session.platform)))
        challenge = self.orchestrator.challenge(name, "worker")
        self.orchestrator.admit(attester.present(challenge, MANIFEST, ANSWER))
        return attester

    def place(self, hosting):
        for name, hosted in hosting.items():
            self.orchestrator.release(name, 0, hosted)
            body = DataCommitments(
                run_id=self.run_id, member_id=name, virtual_workers=hosted, commitments=(b"c" * 32,) * len(hosted)
            )
            self.orchestrator.record_data(seal(body, self.members[name].identity))

    def begun(self):
        for name in HOSTING:
            self.admit(name)
        self.place(HOSTING)
        self.orchestrator.open_step(0, HOSTING, (), ())
        return self

    def client(self, attester):
        return EvidenceClient(
            self.address, manifest_digest=MANIFEST, orchestrator_key=self.owner.ed25519, attester=attester
        )

    @contextmanager
    def observing(self, name="observer-0"):
        attester = Attester(name, Source(self.session.platform))
        with self.client(attester) as client:
            client.attest(attester.present(client.challenge(OBSERVER), MANIFEST, b""))
            yield client

    @property
    def kinds(self):
        return [entry.kind for entry in self.orchestrator._run.books.log.entries()]


@pytest.fixture
def run(session, tmp_path):
    run = Run(session, tmp_path)
    yield run
    run.orchestrator.close()


def refusal(function, *arguments, **keywords):
    with pytest.raises(RefusedError) as error:
        function(*arguments, **keywords)
    return error.value.code


def test_an_observer_sees_roster_and_log_and_gets_no_keys(run):
    run.begun()
    with run.observing() as client:
        roster, presentations = client.roster()
        entries, head = client.log()
        assert refusal(client.release_keys, 0) == "release_denied"
        assert refusal(client.release_keys, 0, (0,)) == "release_denied"
    terms = {"run_id": run.run_id, "manifest_digest": MANIFEST, "virtual_workers": 4, "minimum_workers": 2}
    opened = open_roster(roster, orchestrator_key=run.owner.ed25519, **terms)
    assert {m.member_id: m.virtual_workers for m in opened.workers} == HOSTING
    assert {digest(each.body) for each in presentations} == {m.evidence_digest for m in opened.members}
    kinds = [parse(ExportedLogEntry, line).kind for line in entries]
    assert (kinds[-1], kinds.count("admitted")) == ("admitted", 3)
    assert parse(SignedHead, head).open(run.owner).length == len(entries)
    assert run.kinds[-2:] == ["release_refused", "release_refused"]


def test_an_observer_cannot_bind_the_run_to_data(run):
    """Before, it could say first what the slices are, and each host of one was refused as ``data_changed``."""
    for name in HOSTING:
        run.admit(name)
    attester = Attester("observer-0", Source(run.session.platform))
    fields = {"run_id": run.run_id, "member_id": "observer-0"}
    body = DataCommitments(virtual_workers=(0, 1), commitments=(b"!" * 32,) * 2, **fields)
    with run.client(attester) as client:
        client.attest(attester.present(client.challenge(OBSERVER), MANIFEST, b""))
        assert refusal(client.roster, seal(body, attester.identity)) == "release_denied"
    with pytest.raises(EvidenceError, match="not an admitted worker"):
        run.orchestrator.record_data(seal(body, attester.identity))
    run.place(HOSTING)
    run.orchestrator.open_step(0, HOSTING, (), ())


def test_a_member_gets_over_the_service_no_keys_that_the_run_has_not_given_it(run):
    """It gets keys again of the epoch that the run gave it. With fresh evidence it gets none until the run gives
    them."""
    run.begun()
    member = run.members["worker-0"]
    with run.client(member) as client:
        client.release_keys(0)
        assert refusal(client.release_keys, 1) == "release_denied"
        run.admit("worker-0")
        for epoch in (0, 1, 7):
            assert refusal(client.release_keys, epoch) == "release_denied"
        run.orchestrator.release("worker-0", 1, HOSTING["worker-0"])
        client.release_keys(1)


def test_before_the_first_step_there_is_no_roster(run):
    with run.observing() as client:
        assert refusal(client.roster) == "no_roster"


def test_without_accepted_evidence_nobody_sees_anything(run):
    run.begun()
    stranger = Attester("observer-0", Source(run.session.platform))
    with run.client(stranger) as client:
        assert refusal(client.log) == refusal(client.roster) == "release_denied"
        bad = stranger.present(client.challenge(OBSERVER), MANIFEST, b"")
        assert refusal(client.attest, bad.model_copy(update={"signature": bytes(64)})) == "peer_not_bound"
        assert refusal(client.log) == "release_denied"
    with run.observing("observer-1"), run.client(Attester("observer-1", Source(run.session.platform))) as another:
        assert refusal(another.log) == "peer_not_bound", "the channel is not that observer's"


def test_an_observers_evidence_expires(run):
    run.begun()
    with run.observing() as client:
        client.log()
        run.now += run.terms.policy.evidence_lifetime_s
        assert refusal(client.log) == refusal(client.roster) == "release_denied"


@pytest.mark.parametrize("role", ["worker", "aggregator"])
def test_nobody_becomes_a_member_of_the_run_over_the_service(run, role):
    """Not under a new name, not under a member's, and not with a nonce of an observer."""
    run.begun()
    for name in ("worker-0", "worker-7", "aggregator-0"):
        attester = Attester(name, Source(run.session.platform))
        with run.client(attester) as client:
            assert refusal(client.challenge, role) == "release_denied"
    for name, claimed in (("observer-1", role), ("worker-0", OBSERVER), ("worker-7", OBSERVER)):
        with run.client(Attester(name, Source(run.session.platform))) as client:
            assert refusal(client.challenge, claimed) == "malformed"
    attester = Attester("observer-1", Source(run.session.platform))
    with run.client(attester) as client:
        challenge = client.challenge(OBSERVER).model_copy(update={"role": role})
        forged = attester.present(challenge, MANIFEST, ANSWER if role == "worker" else b"")
        assert refusal(client.attest, forged) == "nonce_foreign"
    assert set(run.orchestrator.view().admitted) == set(HOSTING)


def test_a_name_that_was_challenged_before_it_was_taken_is_not_taken_away(run):
    """A challenge is no claim to a name: the member that is admitted first keeps it while its evidence lasts."""
    thief = Attester("observer-0", Source(run.session.platform))
    with run.client(thief) as early:
        answer = thief.present(early.challenge(OBSERVER), MANIFEST, b"")
        with run.observing("observer-0") as client:
            assert refusal(early.attest, answer) == "peer_not_bound"
            client.log()


def test_a_member_gets_again_the_keys_that_the_run_gave_it_and_never_those_of_another(run):
    run.begun()
    with run.client(run.members["worker-0"]) as client:
        assert client.release_keys(0).package
        assert refusal(client.release_keys, 0, (1,)) == "release_denied"
        moved = {"worker-0": (0,), "worker-1": (1, 2, 3)}
        run.orchestrator.release("worker-1", 0, (2,))
        assert refusal(client.release_keys, 0, (2,)) == "release_denied", "its new host has them now"
        run.place({"worker-1": (2,)})
        run.orchestrator.open_step(1, moved, (), ())
        assert refusal(client.release_keys, 0, (0, 2)) == "release_denied"
        assert client.release_keys(0, (0,)).package
        run.orchestrator.expel("worker-0", "left")
        assert refusal(client.release_keys, 0) == "release_denied"


def test_observers_do_not_make_the_run_renew_or_count_as_its_members(run):
    run.begun()
    run.now += 3600
    before = run.orchestrator.review().renew_in_s
    with run.observing():
        run.now += 1
        assert run.orchestrator.review().renew_in_s == before - 1
        view = run.orchestrator.view()
    assert set(view.admitted) == set(HOSTING)
    assert set(view.earliest_expiry) == {"worker"}


def test_observers_are_bounded_and_make_room_when_their_evidence_expires(run, monkeypatch):
    monkeypatch.setattr("raycloak.attestation.orchestrator.admissions.MAX_OBSERVERS", 2)
    assert MAX_OBSERVERS == 256
    observers = run.observing("observer-0"), run.observing("observer-1"), run.observing("observer-2")
    with observers[0], observers[1], pytest.raises(RefusedError, match="busy"), observers[2]:
        pass
    run.now += run.terms.policy.evidence_lifetime_s
    with run.observing("observer-2") as client:
        client.log()
    assert [row.member_id for row in run.orchestrator._run.books.state.members()] == ["observer-2"]


def test_calls_of_the_run_and_of_its_observers_never_meet_inside(run):
    """Both call at once over the same state; each decision is whole, and the log holds them all."""
    run.begun()
    done, seen = threading.Event(), []

    def observe(name):
        with run.observing(name) as client:
            while not done.is_set():
                entries, head = client.log(0, 1000)
                client.roster()
                seen.append((len(entries), parse(SignedHead, head).open(run.owner).length))
                done.wait(2 / ServiceLimits().identity_rate)  # two calls a round, within a peer's rate on any machine

    with ThreadPoolExecutor(3) as pool:
        observers = [pool.submit(observe, f"observer-{i}") for i in range(3)]
        for step in range(1, 40):
            run.orchestrator.open_step(step, HOSTING, (), ())
            run.orchestrator.review()
        eventually(lambda: len(seen) >= 3 or any(each.done() for each in observers))
        done.set()
        for each in observers:
            each.result(120)
    assert all(entries == length for entries, length in seen)
    assert run.kinds.count("roster") == 40


def test_every_public_method_takes_its_turn_but_those_that_are_asked_beside_others(run):
    public = {name: each for name, each in vars(EvidenceOrchestrator).items() if not name.startswith("_")}
    written_here = {name for name, each in public.items() if each.__module__ == EvidenceOrchestrator.__module__}
    aside = {"service_address", "service_figures", "view", "present"}
    assert written_here == {"open_run", "begin", "expel", "finish", "close"} | aside
    assert all(each.__name__ == name for name, each in public.items()), "each is sent under the name of its function"
    with ThreadPoolExecutor(1) as pool:
        with run.orchestrator._turn:
            asked = pool.submit(run.orchestrator.log_position)
            eventually(lambda: len(run.orchestrator._turn._waiting) == 1)
            run.orchestrator.view()
            run.orchestrator.service_figures()
        assert asked.result(120).length == 1
    assert run.orchestrator._server._queue._turn is run.orchestrator._turn


def test_a_new_incarnation_serves_at_the_same_port_and_knows_its_observers(run):
    run.begun()
    with run.observing() as client:
        attester, before = client._attester, run.address
    run.orchestrator.close()
    run.start()
    assert run.address == before
    with run.client(attester) as client:
        assert len(client.log()[0]) == len(run.kinds)
        assert refusal(client.roster) == "no_roster", "the run opens the next one"
        run.orchestrator.open_step(1, HOSTING, (), ())
        client.roster()


def test_an_address_that_is_taken_is_refused_by_name(session, tmp_path, run, monkeypatch):
    monkeypatch.setattr("raycloak.attestation.service.serving_orchestrator.PORT_DEADLINE_S", 0.0)
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError) as error:
        Run(session, tmp_path / "other", bind=run.address)
    assert error.value.code == "bind"


def test_what_is_finished_answers_nothing_more(run):
    run.begun()
    with run.observing() as client:
        run.orchestrator.finish(str(run.home / "log.jsonl"), False)
        assert refusal(client.log) == "release_denied"
    assert run.orchestrator.service_address() is None
    assert run.kinds[-1] == "finished"


def test_a_record_that_cannot_be_written_ends_the_run_instead_of_going_on_from_memory(run):
    run.begun()
    run.orchestrator._server._queue.failure = OSError("disk full")
    with pytest.raises(RunFailedError) as error:
        run.orchestrator.open_step(1, HOSTING, (), ())
    assert error.value.code == "record_unwritten"


def test_an_orchestrator_without_an_address_serves_nothing(session, tmp_path):
    silent = Run(session, tmp_path, bind=None)
    assert silent.address is None
    assert silent.orchestrator.service_figures() is None
    silent.orchestrator.close()
