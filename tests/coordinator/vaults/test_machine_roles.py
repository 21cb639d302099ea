"""What the vaults of a machine serve of their roles, by their own settings, whatever a relay sends."""

import inspect
import signal
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import parse
from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.attestation.orchestrator.documents import DOCUMENTS_FILE
from raycloak.attestation.orchestrator.revocations import revoke
from raycloak.attestation.orchestrator.state import state_file
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.ledger.cap_authority import CapAuthorisation, authorise
from raycloak.coordinator.ledger.ledger import PrivacyLedger, RunStart
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.vaults.calls import ActorRefusal
from raycloak.coordinator.vaults.ledger_vault import LedgerVault
from raycloak.coordinator.vaults.machine_ledger import MachineLedger
from raycloak.coordinator.vaults.machine_vault import MachineVault
from raycloak.coordinator.vaults.openings import LedgerOpening, OrchestratorOpening, PlatformOpening, WorkerOpening
from raycloak.coordinator.vaults.orchestrator_vault import OrchestratorVault
from raycloak.coordinator.vaults.platforms import MachinePlatform
from raycloak.coordinator.vaults.settings import DataPlace, OrchestratorSettings, WorkerSettings
from raycloak.coordinator.vaults.worker_vault import WorkerVault
from raycloak.metrics.errors import BudgetError, ConfigError, DatasetError, RefusedError
from raycloak.workers import workload
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.models import models
from tests import protocol
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, MANIFEST, PARAMETERS, mechanism
from tests.coordinator.vaults.listeners import STRANGER, called, connected_as, listening, needs_root, platform, said
from tests.coordinator.vaults.test_listener import START
from tests.coordinator.vaults.test_roles import Inside

AUTHORITY = IdentityKey.generate()
SOCKET = {"socket": "/run/vault.sock", "peer": "root"}
LATER = 4_000_000_000


@pytest.fixture(autouse=True)
def own_handler():
    """A worker's vault takes SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


# --- ledger


@pytest.fixture
def url(tmp_path):
    """Return a ledger with an account, and a run on it that has its data."""
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    with closing(PrivacyLedger(url)) as ledger:
        ledger.open_account("patients", OpeningTerms(CAP, DELTA), authority=AUTHORITY.public)
    return url


@pytest.fixture
def ledger(tmp_path, url):
    """Yield a connection of a relay to the vault of that ledger."""
    with listening(tmp_path, "ledger", url=url) as listener, MachineVault(str(listener.path), opening(url)) as vault:
        yield vault


def opening(url: str, create: bool = True) -> LedgerOpening:
    return LedgerOpening(url=url, create=create, witness=None)


OWNERS = ("open_account", "add_data", "transfer", "close_account", "rotate_key", "export", "close")
SHARED = {
    "bind_data", "bind_vectors", "change_cap", "charge", "extract", "hash_at", "history", "load_accountant",
    "outlook", "price", "register_run", "status", "verify", "view",
}  # fmt: skip
"""What a relay may ask for: no more of them changes what may be spent, but for `change_cap` with a signature."""


def test_every_method_of_a_ledger_is_its_owners_or_harmless():
    methods = {name for name, _ in inspect.getmembers(PrivacyLedger, inspect.isfunction) if not name.startswith("_")}
    assert methods == SHARED | set(OWNERS), "say of a new method whether a relay may ask for it"


def test_guarantee_through_a_relay_no_account_is_opened_raised_or_closed(ledger, url):
    for name in OWNERS:
        # Whatever comes with it, and also beside another call.
        for beside in (False, True):
            with pytest.raises(ActorRefusal) as refused:
                ledger._vault.call(name, 1, (b"{}",), beside=beside)
            error = parse(Failed, refused.value.args[0]).raised()
            assert (type(error), error.code) == (RefusedError, "account_of_its_owner")
            assert name in str(error)
    for cap in (CAP + 1, CAP - 1, CAP):
        with pytest.raises(RefusedError, match="account_of_its_owner"):
            ledger.ask(LedgerVault.change_cap, "patients", cap)
    assert [(each.name, each.epsilon_cap) for each in ledger.ask(PrivacyLedger.view).accounts] == [("patients", CAP)]


def test_a_cap_is_raised_through_a_relay_by_the_signature_of_its_authority_alone(ledger):
    account = ledger.ask(PrivacyLedger.view).accounts[0]
    change = CapAuthorisation(
        account="patients",
        ledger_key=ledger.ask(LedgerVault.key),
        old_cap=CAP,
        new_cap=CAP + 1,
        follows=account.terms_hash,
        expires_at=LATER,
    )
    with pytest.raises(BudgetError, match="authorisation_forged"):
        ledger.ask(LedgerVault.change_cap, "patients", CAP + 1, authorise(change, IdentityKey.generate()))
    with pytest.raises(BudgetError, match="authorisation_mismatch"):
        ledger.ask(LedgerVault.change_cap, "patients", CAP + 2, authorise(change, AUTHORITY))
    ledger.ask(LedgerVault.change_cap, "patients", CAP + 1, authorise(change, AUTHORITY))
    assert ledger.ask(PrivacyLedger.view).accounts[0].epsilon_cap == CAP + 1


def test_guarantee_a_relay_lowers_no_cap_with_a_signature_that_nobody_checks(ledger):
    account = ledger.ask(PrivacyLedger.view).accounts[0]
    change = CapAuthorisation(
        account="patients", ledger_key=b"k" * 32, old_cap=CAP, new_cap=CAP, follows=account.terms_hash, expires_at=LATER
    )
    with pytest.raises(BudgetError, match="authorisation_mismatch"):
        ledger.ask(LedgerVault.change_cap, "patients", 1.0, authorise(change, IdentityKey.generate()))
    assert ledger.ask(PrivacyLedger.view).accounts[0].epsilon_cap == CAP


def test_a_run_is_registered_on_an_open_account_and_opens_none(ledger):
    def run(account: str) -> RegistrationTerms:
        terms = OpeningTerms(2 * CAP, DELTA)
        return RegistrationTerms(f"run-{account}", account, (mechanism(),), MANIFEST, opens=terms)

    with pytest.raises(BudgetError, match="account_unknown"):
        ledger.ask(LedgerVault.register_run, run("own"))
    start = RunStart(run("own"), DATA)
    with pytest.raises(BudgetError, match="account_unknown"):
        ledger.ask(LedgerVault.charge, "run-own", 0, PARAMETERS, MANIFEST, "gradient", start)
    ledger.ask(LedgerVault.charge, "run-patients", 0, PARAMETERS, MANIFEST, "gradient", RunStart(run("patients"), DATA))
    (account,) = ledger.ask(PrivacyLedger.view).accounts
    assert account.epsilon_cap == CAP
    assert account.spent_epsilon > 0


def test_the_storage_is_that_of_the_settings_whatever_the_opening_names(tmp_path, url):
    other = tmp_path / "other.sqlite"
    with listening(tmp_path, "ledger", url=url) as listener:
        with MachineVault(str(listener.path), opening(f"sqlite:///{other}")) as vault:
            assert [each.name for each in vault.ask(PrivacyLedger.view).accounts] == ["patients"]
        with MachineLedger(str(listener.path)) as read, closing(PrivacyLedger(url, create=False)) as own:
            assert read.public_key == own.public_key
            assert read.view() == own.view()
            assert read.extract("patients") == own.extract("patients")
    assert not other.exists()


def test_a_ledger_that_is_not_there_is_named_and_not_made(tmp_path):
    missing = tmp_path / "missing.sqlite"
    with listening(tmp_path, "ledger", url=f"sqlite:///{missing}") as listener:
        for create in (True, False):
            vault = MachineVault(str(listener.path), opening("", create))
            with vault, pytest.raises(ConfigError, match="ledger_missing"):
                vault.ask(PrivacyLedger.view)
        assert not missing.exists()


def test_a_socket_where_nobody_listens_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"vault_unreachable.*none\.sock"):
        MachineLedger(str(tmp_path / "none.sock"))


# --- platform


def test_guarantee_the_platform_quotes_for_vaults_alone_and_publishes_to_all(tmp_path):
    with platform(tmp_path) as listener:
        machine = MachinePlatform(str(listener.path))
        root = machine.root_der
        assert machine.published()
        with pytest.raises(RefusedError, match=r"vault_peer.*quotes for vaults alone"):
            machine.collect(b"r" * 64)
    with platform(tmp_path, vaults=["root"], peer="root") as listener:
        machine = MachinePlatform(str(listener.path))
        assert machine.root_der == root, "its keys last"
        assert b"r" * 64 in machine.collect(b"r" * 64).quote


@needs_root
def test_the_user_at_the_other_end_decides_whether_the_platform_quotes(tmp_path):
    argument = platform_call(b"r" * 64)
    with platform(tmp_path, vaults=[str(STRANGER)]) as listener:
        with pytest.raises(RefusedError, match="vault_peer"):
            MachinePlatform(str(listener.path)).collect(b"r" * 64)
        channel = said(connected_as(STRANGER, listener.path), START, PlatformOpening())
        assert called(channel, "quote", argument).refusal is None
        channel.close()
    with platform(tmp_path, vaults=["root"], peer=str(STRANGER)) as listener:
        channel = said(connected_as(STRANGER, listener.path), START, PlatformOpening())
        refusal = called(channel, "quote", argument).refusal
        assert refusal is not None
        assert parse(Failed, refusal).code == "vault_peer"
        channel.close()


def platform_call(report_data: bytes) -> bytes:
    """Return the frame of a call for a quote."""
    from raycloak.coordinator.vaults.calls import Wire
    from raycloak.coordinator.vaults.platform_vault import PlatformVault

    (frame,) = Wire.of(PlatformVault.quote).write_call((report_data,))
    return frame


# --- orchestrator and worker


class MachineRun(protocol.HandRun):
    """A run by hand, whose orchestrator and workers are vaults of a machine.

    Args:
        orchestrators, workers: changes of their settings.
    """

    def __init__(self, home: Path, orchestrators: dict | None = None, workers: dict | None = None) -> None:
        self.changes = {"orchestrator": orchestrators or {}, "worker": workers or {}}
        super().__init__(home)

    def start_orchestrator(self) -> OrchestratorVault:
        raw = {
            "state": str(self.home / "orchestrator"),
            "policies": (self.policy.digest().hex(),),
            "secrets": str(self.home),
        }
        settings = OrchestratorSettings(**SOCKET, **{**raw, **self.changes["orchestrator"]})
        vault = OrchestratorVault(
            OrchestratorOpening(state_directory="/nowhere", bind=None, simulated=False), Inside(settings)
        )
        vault._clock, vault._source = self.clock, self.source
        self.run_id, self.orchestrator_key = vault.open_run(str(protocol.secret_file(self.home)))
        return vault

    def new_worker(self, name: str) -> WorkerVault:
        raw = {
            "ledgers": (self.ledger_key.public.hex(),),
            "policies": (self.policy.digest().hex(),),
            "code": "any",
            "data": (DataPlace(path=str(self.home / "data"), account="by-hand", least_noise=2.0),),
        }
        worker = worker_vault(self.home, **{**raw, **self.changes["worker"]})
        protocol.TrainWorker.__init__(worker, name, self.source, self.clock)
        return worker


def worker_vault(home: Path, **settings) -> WorkerVault:
    raw = {
        "ledgers": (),
        "policies": (),
        "code": "any",
        "data": (DataPlace(path=str(home), account="by-hand", least_noise=2.0),),
    }
    inside = Inside(WorkerSettings(**SOCKET, **{**raw, **settings}))
    return WorkerVault(WorkerOpening(member_id="worker-0", simulated=False, gpus=0, cpus=1), inside)


def test_a_run_on_the_terms_of_both_is_served_and_leaves_its_log_with_the_orchestrator(tmp_path):
    run = MachineRun(tmp_path)
    vault, log = run.orchestrator, tmp_path / "driver" / "evidence.jsonl"
    vault.export_log(str(log))
    exports = tmp_path / "orchestrator" / "exports" / run.run_id
    exported = exports / "evidence.jsonl"
    assert vault.exported_log().tobytes() == exported.read_bytes()
    assert vault.exported_documents().tobytes() == (exports / DOCUMENTS_FILE).read_bytes()
    assert exports.stat().st_mode & 0o077 == 0
    before = len(read_exported_log(exported, run.orchestrator_key).entries)
    assert vault.revocations() == 0
    revoke(state_file(tmp_path / "orchestrator", run.run_id), "member", "worker-0", reason="lost", now=protocol.NOW)
    assert vault.revocations() == 1
    vault.finish(str(log), False)
    assert vault.exported_log().tobytes() == exported.read_bytes()
    assert len(read_exported_log(exported, run.orchestrator_key).entries) > before
    assert not log.parent.exists(), "it writes where the settings say"
    assert not Path("/nowhere").exists()
    vault.close()


@pytest.mark.parametrize(
    ("orchestrators", "workers", "code"),
    [
        ({"policies": ("ab" * 32,)}, {}, "policy_not_served"),
        ({}, {"policies": ("ab" * 32,)}, "policy_not_served"),
        ({}, {"ledgers": ("ab" * 32,)}, "ledger_not_served"),
        ({}, {"data": (DataPlace(path="/srv", account="by-hand", least_noise=1.0),)}, "data_not_served"),
    ],
)
def test_guarantee_a_run_on_other_terms_gets_no_evidence(tmp_path, orchestrators, workers, code):
    with pytest.raises(RefusedError, match=code):
        MachineRun(tmp_path, orchestrators, workers)


@pytest.mark.parametrize(
    ("terms", "code"),
    [
        ({"account": "other", "least_noise": 1.0}, "account_not_served"),
        ({"account": "by-hand", "least_noise": 2.1}, "noise_not_served"),
    ],
)
def test_guarantee_a_run_on_other_terms_of_its_data_gets_no_evidence(tmp_path, terms, code):
    with pytest.raises(RefusedError, match=code):
        MachineRun(tmp_path, workers={"data": (DataPlace(path=str(tmp_path / "data"), **terms),)})


def test_a_worker_opens_its_data_at_the_place_that_was_checked(tmp_path):
    setup = protocol.worker_setup(protocol.config(), tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    worker = worker_vault(tmp_path)
    worker.prepare(setup.model_copy(update={"base": str(tmp_path / "link")}))
    assert worker._stage.setup.dataset.path == str(tmp_path / "data" / "examples.npz")


def test_a_worker_opens_no_split_but_at_a_public_place_and_none_that_the_driver_measures_on(tmp_path, monkeypatch):
    def opened(split: DatasetDescriptor, *_: object) -> None:
        raise DatasetError("opened", str(split.path))

    monkeypatch.setattr(workload, "open_split", opened)
    (tmp_path / "public").mkdir()
    places = (
        DataPlace(path=str(tmp_path / "data"), account="by-hand", least_noise=2.0),
        DataPlace(path=str(tmp_path / "public"), public=True),
    )
    worker, setup = worker_vault(tmp_path, data=places), protocol.worker_setup(protocol.config(), tmp_path)

    def measured(path: str) -> WorkerSetup:
        split = DatasetDescriptor(kind="npz", path=path, features=("features",), public=True)
        return setup.model_copy(update={"evaluation": split})

    assert not worker.prepare(measured("examples.npz")).measures
    monkeypatch.setattr(models, "LARGEST_IN_DRIVER", 0)
    with pytest.raises(RefusedError, match="data_not_served"):
        worker.prepare(measured("examples.npz"))
    with pytest.raises(DatasetError, match=str(tmp_path / "public" / "split.npz")):
        worker.prepare(measured("../public/split.npz"))


def test_a_failed_second_prepare_leaves_nothing_served(tmp_path):
    setup = protocol.worker_setup(protocol.config(), tmp_path)
    enough = protocol.mechanism()
    little = protocol.mechanism(noise_multiplier=1.0)
    worker = worker_vault(tmp_path)
    with pytest.raises(RefusedError, match="data_not_served"):
        worker.compute_known_answer(enough)
    elsewhere = setup.model_copy(update={"base": "/srv"})
    (tmp_path / "data" / "broken.npz").write_bytes(b"no archive")
    broken = setup.model_copy(update={"dataset": setup.dataset.model_copy(update={"path": "broken.npz"})})
    for wrong, error in ((elsewhere, RefusedError), (broken, DatasetError)):
        worker.prepare(setup)
        with pytest.raises(error):
            worker.prepare(wrong)
        with pytest.raises(RefusedError, match="data_not_served"):
            worker.compute_known_answer(enough)
    worker.prepare(setup)
    with pytest.raises(RefusedError, match="noise_not_served"):
        worker.compute_known_answer(little)
    assert len(worker.compute_known_answer(enough)) == 32


def test_the_noise_of_measurements_counts_as_that_of_the_gradient(tmp_path):
    from raycloak.workers.terms.measurement import Measurement

    worker = worker_vault(tmp_path)
    worker.prepare(protocol.worker_setup(protocol.config(), tmp_path))
    little = Measurement.model_construct(mechanism=protocol.mechanism(noise_multiplier=1.0))
    with pytest.raises(RefusedError, match="noise_not_served"):
        worker.compute_known_answer(protocol.mechanism(), little)


@pytest.fixture
def secrets(tmp_path):
    """Return a folder of secrets, with one in it and one beside it, and other ways to both."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    for file, secret in ((folder / "own", "ab" * 32), (tmp_path / "other", "cd" * 32)):
        file.write_text(secret)
        file.chmod(0o600)
    (folder / "out").symlink_to(tmp_path / "other")
    (tmp_path / "in").symlink_to(folder / "own")
    (folder / "deep").mkdir()
    (folder / "deep" / "own").hardlink_to(folder / "own")
    return folder


def orchestrator(state: Path, secrets: Path | None) -> OrchestratorVault:
    settings = OrchestratorSettings(**SOCKET, state=str(state), policies=(), secrets=secrets and str(secrets))
    opening = OrchestratorOpening(state_directory="/nowhere", bind="127.0.0.1:0", simulated=False)
    return OrchestratorVault(opening, Inside(settings))


def test_guarantee_an_orchestrator_reads_a_secret_in_its_folder_alone(tmp_path, secrets):
    for file in ("other", "secrets/../other", "secrets/out", "secrets/deep/own", "secrets", "secrets/deep/../../other"):
        with closing(orchestrator(tmp_path / "state", secrets)) as vault:
            with pytest.raises(RefusedError, match="secret_not_served"):
                vault.open_run(str(tmp_path / file))
            vault.open_run(None)
    with closing(orchestrator(tmp_path / "state", None)) as vault:
        with pytest.raises(RefusedError, match="secret_not_served"):
            vault.open_run(str(secrets / "own"))
        vault.open_run(None)
    for number, file in enumerate(("secrets/own", "in", "secrets/../secrets/own")):
        with closing(orchestrator(tmp_path / f"state-{number}", secrets)) as vault:
            assert vault.open_run(str(tmp_path / file))[0]


def test_guarantee_a_link_to_a_secret_that_is_set_anew_leads_nowhere_else(tmp_path, secrets, monkeypatch):
    read = []
    monkeypatch.setattr(
        "raycloak.attestation.orchestrator.orchestrator.load_secret", lambda path: read.append(path) or 1 / 0
    )
    vault = orchestrator(tmp_path / "state", secrets)
    with pytest.raises(ZeroDivisionError):
        vault.open_run(str(tmp_path / "in"))
    assert read == [secrets / "own"]


def test_the_place_of_an_orchestrator_is_that_of_its_settings(tmp_path):
    vault = orchestrator(tmp_path / "state", None)
    run_id, _ = vault.open_run(None)
    assert state_file(tmp_path / "state", run_id).is_file()
    assert vault._bind is None, "the settings name no address to serve at"
    vault.close()


def test_an_export_travels_to_the_relay(tmp_path):
    with listening(tmp_path, "orchestrator", state=str(tmp_path / "state"), policies=[]) as listener:
        opening = OrchestratorOpening(state_directory="", bind=None, simulated=False)
        with MachineVault(str(listener.path), opening) as vault:
            run_id, _ = vault.ask(OrchestratorVault.open_run, None)
            vault.ask(OrchestratorVault.export_log, str(tmp_path / "log"))
            content = vault.ask(OrchestratorVault.exported_log)
        assert content.dtype == np.uint8
        exported = tmp_path / "state" / "exports" / run_id / "evidence.jsonl"
        assert content.tobytes() == exported.read_bytes()
        assert not (tmp_path / "log").exists()
