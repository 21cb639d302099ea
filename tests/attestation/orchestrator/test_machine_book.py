"""The keys of a run by machine: counted for good, whatever process, session or incarnation they were given to."""

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import pytest

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.orchestrator.machine_book import machines_of
from raycloak.attestation.orchestrator.orchestrator import open_run
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.metrics.errors import EvidenceError
from raycloak.workers.terms.manifest import Manifest
from tests.attestation.attester.test_attester import Source
from tests.attestation.conftest import StandIn
from tests.attestation.orchestrator.test_orchestrator import EPOCHS, Desk, refusal

COUNT, MOST = 8, 3


@dataclass
class BoundedDesk(Desk):
    """A desk of a run of eight virtual workers, of which one machine may have three."""

    def begin(self) -> None:
        policy, collateral = self.policy(), self.session.collateral
        terms = RunTerms(StandIn.under(policy, COUNT, EPOCHS, MOST), policy, collateral)
        self.orchestrator.begin(terms, f"execution-{self.executions}")

    def admit_on(self, machine: str, *names: str) -> None:
        """Admit members whose evidence is of one machine."""
        for name in names:
            self.members[name] = Attester(name, Source(self.session.vendor.platform(machine)))
            self.admit(name)

    def take(self, member_id: str, *virtual_workers: int, epoch: int = 0) -> None:
        self.orchestrator.release(member_id, epoch, virtual_workers)


@pytest.fixture
def desk(session, tmp_path) -> BoundedDesk:
    tmp_path.joinpath("orchestrator").mkdir()
    return BoundedDesk(session, tmp_path / "orchestrator")


def test_no_machine_gets_keys_of_more_virtual_workers_of_an_epoch_than_the_bound(desk):
    desk.admit_on("a", "worker-0", "worker-1")
    desk.admit_on("b", "worker-2")
    desk.take("worker-0", 0, 3)
    desk.take("worker-1", 6)
    assert refusal(desk.take, "worker-0", 1) == "release_denied"
    assert refusal(desk.take, "worker-1", 1) == "release_denied"
    desk.take("worker-1", 0, 3)  # the machine has got these keys already
    desk.take("worker-2", 1, 4, 7)
    assert desk.orchestrator.most_hosted() == MOST


def test_an_expelled_workers_successor_on_its_machine_gets_no_key_beyond_the_bound(desk):
    """Before, it began with a quota of its own: machine a would have got seven keys of eight."""
    desk.admit_on("a", "worker-0")
    desk.take("worker-0", 0, 3, 6)
    desk.orchestrator.expel("worker-0", "died")
    desk.admit_on("a", "worker-3")
    with pytest.raises(EvidenceError, match="would have got the keys of 7 virtual workers of epoch 0") as error:
        desk.take("worker-3", 1, 2, 4, 5)
    assert error.value.code == "release_denied"
    desk.take("worker-3", 0, 3, 6)
    assert desk.orchestrator.most_hosted() == MOST
    (denied,) = (body for kind, body in desk.log() if kind == "release_refused")
    assert (denied["member_id"], denied["code"]) == ("worker-3", "release_denied")


@pytest.mark.parametrize("again", ["restart", "start"], ids=["a restart", "a resumed session"])
def test_the_bound_holds_across(desk, again):
    desk.admit_on("a", "worker-0")
    desk.take("worker-0", 0, 3)
    getattr(desk, again)()
    desk.admit_on("a", "worker-9")
    desk.take("worker-9", 6)
    assert refusal(desk.take, "worker-9", 1) == "release_denied"
    assert desk.orchestrator.most_hosted() == MOST


def test_a_refused_release_is_not_counted(desk):
    desk.admit_on("a", "worker-0")
    assert refusal(desk.take, "worker-0", 0, 1, 2, 3) == "release_denied"
    desk.take("worker-0", 4, 5, 6)


def test_each_epoch_is_counted_by_itself(desk):
    """The noise of a step needs keys of its own epoch only; see docs/privacy.md."""
    desk.admit_on("a", "worker-0")
    desk.take("worker-0", 0, 3, 6)
    desk.admit("worker-0")
    desk.take("worker-0", 1, 4, 7, epoch=1)
    assert desk.orchestrator.most_hosted() == MOST
    desk.admit("worker-0")
    with pytest.raises(EvidenceError, match="4 virtual workers of epoch 1"):
        desk.take("worker-0", 0, epoch=1)


def test_the_bound_holds_for_each_gpu_whatever_machine_it_is_put_into(desk):
    desk.admit_on("a", "worker-0")
    desk.admit_on("b", "worker-1")
    book, admissions = desk.orchestrator._run.books.machines, desk.orchestrator._session.admission
    gpu = SimpleNamespace(platform_id=b"g" * 8)
    first, second = (replace(admissions.find(f"worker-{i}").appraisal, gpus=(gpu,)) for i in range(2))
    book.give(first, 0, (0, 3, 6), MOST)
    with pytest.raises(EvidenceError, match=f"GPU {gpu.platform_id.hex()} would have got the keys of 4"):
        book.give(second, 0, (1,), MOST)
    assert len(machines_of(first)) == 2


def test_a_machine_whose_provider_masks_its_chip_gets_no_bounded_key(desk):
    """Its identity is the guest's: another guest on the same machine would count as another machine."""
    desk.admit_on("a", "worker-0")
    masked = replace(desk.orchestrator._session.admission.find("worker-0").appraisal, names_machine=False)
    book = desk.orchestrator._run.books.machines
    with pytest.raises(EvidenceError, match="names no machine"):
        book.give(masked, 0, (0,), MOST)
    book.give(masked, 0, (0,), None)


def test_without_a_bound_a_machine_gets_all_keys_and_the_count_tells(session, tmp_path):
    tmp_path.joinpath("orchestrator").mkdir()
    desk = Desk(session, tmp_path / "orchestrator")
    desk.admit("worker-0", "worker-1")
    desk.orchestrator.release("worker-0", 0, (0, 1))
    desk.orchestrator.release("worker-1", 0, (2, 3))
    assert desk.orchestrator.most_hosted() == 4
    run = open_run(str(desk.home), lambda: desk.now, str(desk.home / "secret"))
    assert run.most_hosted() == 4, "without a session, too"
    run.close()


def test_a_charged_run_releases_no_bounded_key_beside_an_empty_book(desk, session, tmp_path):
    """The same secret in a second state folder: machine a would have got six keys of eight."""
    desk.admit_on("a", "worker-0")
    desk.take("worker-0", 0, 3, 6)
    second = tmp_path / "second" / "orchestrator"
    second.mkdir(parents=True)
    secret = (desk.home / "secret").read_text()
    (second / "secret").write_text(secret)
    run = open_run(str(second), lambda: desk.now, str(second / "secret"))
    policy, collateral = desk.policy(), session.collateral
    terms = RunTerms(StandIn.under(policy, COUNT, EPOCHS, MOST), policy, collateral, charged=True)
    with pytest.raises(EvidenceError) as error:
        run.begin(terms, "elsewhere")
    assert error.value.code == "machine_book_missing"
    run.begin(replace(terms, charged=False), "a run that was never charged")
    assert run.most_hosted() == 0
    run.begin(replace(terms, contract=StandIn.under(policy, COUNT, EPOCHS)), "without a bound")
    assert run.most_hosted() == COUNT, "nobody knows which machines got them"
    run.close()


def test_a_driver_has_no_say_in_the_bound_that_the_contract_states(desk, session):
    """Before, it could bring the genuine manifest with another number beside it."""
    contract = StandIn.under(desk.policy(), COUNT, EPOCHS, MOST)
    terms = RunTerms(contract, desk.policy(), session.collateral)
    stated = {*type(contract).model_fields, *Manifest.model_fields, "epochs", "key_owners"}
    assert not {field.name for field in fields(RunTerms)} & stated
    with pytest.raises(TypeError):
        replace(terms, keys_per_machine=None)


def test_a_charged_run_goes_on_beside_its_own_book(desk):
    desk.admit_on("a", "worker-0")
    desk.take("worker-0", 0, 3)
    desk.start()
    desk.orchestrator._run.books.machines.require_known(True, COUNT, MOST)
    assert desk.orchestrator.most_hosted() == 2
