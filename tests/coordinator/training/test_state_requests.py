"""States that a run's user saves and loads between two steps: the same bytes, nothing taken back, nothing forged."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from raycloak.attestation.orchestrator.loads import StateLoad
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.checkpoints.storage import PackageStorage
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.ledger.entries import StepCharged
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.record.folder import SavedState
from raycloak.coordinator.training import state_requests
from raycloak.coordinator.training.assignment import NewRun, ReplayedRun, ResumedRun
from raycloak.coordinator.training.pace import Pace
from raycloak.coordinator.training.steps import Training
from raycloak.metrics.errors import EvidenceError, ProtocolError, RefusedError
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.model_digest import model_digest, tensor_digests
from tests.protocol import RENYI, WholeRun, on, whole_run

STEPS = 6
RUN_ID = "the one of SECRET"
Act = Callable[[Training], object]


class Killed(BaseException):
    """An error that stands for a driver that ends without any of its handlers."""


class Script(Pace):
    """A pace that never waits, and does what a test wants after so many steps, once."""

    def __init__(self, acts: Mapping[int, Act]) -> None:
        self.acts = dict(acts)

    def admit(self, training: Training) -> bool:
        act = self.acts.pop(training.finished_steps, None)
        if act is not None:
            act(training)
        return True


def archive(home: Path, run_id: str = RUN_ID, keep: int = 1, every: int = 0) -> Archive:
    config = CheckpointConfig(checkpoint_frequency=every, num_to_keep=keep, storage="packages")
    return Archive(config, run_id, home, lambda line: None)


def scripted(home: Path, acts: Mapping[int, Act], **fields) -> WholeRun:
    """Return a run of STEPS steps that does ``acts`` after so many of them."""
    fields.setdefault("assignment", NewRun(archive(home)))
    run = whole_run(home, **{"steps": STEPS, "dp_config": RENYI, **fields})
    run.coordinator.order = replace(run.coordinator.order, pace=Script(acts))
    return run


def manifest_of(run: WholeRun) -> Manifest:
    return Manifest.model_validate_json((run.folder / "manifest.json").read_bytes())


def resumed(home: Path, first: WholeRun, acts: Mapping[int, Act], **fields) -> WholeRun:
    run = scripted(home, acts, assignment=ResumedRun(manifest_of(first), archive(home)), **fields)
    # As on disk: all executions of a run share its directory.
    run.coordinator.order = replace(run.coordinator.order, folder=first.coordinator.order.folder)
    run.folder = first.folder
    return run


def save(after: int, request: str = "s") -> Act:
    return lambda training: state_requests.save(training, f"{request}{after}", after)


def load(home: Path, after: int, step: int) -> Act:
    return go_to(after, at(home, step))


def go_to(after: int, package: str) -> Act:
    return lambda training: state_requests.load(training, after, package)


def unnamed(saved: SavedState) -> SavedState:
    """Return a saved state without the name of its request."""
    return saved.model_copy(update={"request": ""})


def at(home: Path, step: int, suffix: str = "") -> str:
    """Return the location of a package of the run."""
    return f"{home / 'packages' / RUN_ID}/step-{step:06}{suffix}.tssp"


def packages(home: Path) -> list[str]:
    return list(PackageStorage.open(str(home / "packages" / RUN_ID)).names())


def charges(home: Path) -> list[tuple[int, str]]:
    """Return each charged step, with the parameters that it was charged for."""
    ledger = PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}", create=False)
    ledger.verify()
    events = [entry.event for entry in ledger.history() if isinstance(entry.event, StepCharged)]
    ledger.close()
    return [(event.step, event.input_digest.hex()) for event in events]


def back(home: Path) -> dict[int, Act]:
    """Return the script of the run of these tests: after four steps, it goes on from the state after two."""
    return {2: save(2), 4: load(home, 4, 2)}


def die(training: Training) -> None:
    raise Killed


def both(*acts: Act) -> Act:
    return lambda training: [act(training) for act in acts]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> list[str]:
    """Return the digests of the run without a load."""
    run = scripted(tmp_path_factory.mktemp("straight"), {})
    run.train()
    assert "loaded" not in {kind for kind, _ in run.evidence}
    return run.digests


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory) -> WholeRun:
    home = tmp_path_factory.mktemp("back")
    run = scripted(home, back(home))
    run.train()
    return run


def test_guarantee_a_loaded_state_is_logged_before_its_first_charge_and_takes_nothing_back(gone_back, straight):
    digests = gone_back.digests
    assert digests[:4] == straight[:4]
    assert not set(digests[4:]) & set(straight)
    charged = charges(gone_back.home)
    assert [step for step, _ in charged] == list(range(STEPS))
    assert [parameters for _, parameters in charged][1:] == [*digests[:3], digests[1], digests[4]]
    epsilons = [report.epsilon for report in gone_back.reports]
    assert epsilons == sorted(set(epsilons)), "the account went on"
    kinds = [kind for kind, _ in gone_back.evidence]
    assert kinds.count("loaded") == 1
    body = dict(gone_back.evidence)["loaded"]
    assert (body["after_step"], body["step"], body["model_digest"]) == (4, 2, digests[1])
    # The commit of step 3 comes before, that of step 4 later.
    place = kinds.index("loaded")
    committed = [body["step"] for kind, body in gone_back.evidence[:place] if kind == "committed"]
    assert committed == [0, 1, 2, 3]
    (told,) = [line for line in gone_back.told if line["event"] == "load"]
    assert (told["steps"], told["step"], told["model_digest"]) == (4, 2, digests[1])


@pytest.mark.parametrize(
    ("method", "index", "repeats"),
    [("load_state", 0, True), ("charge", 4, False), ("charge", 5, False), ("reduce", 4, False)],
    ids=["before the log has it", "before it is charged", "a step later", "before the step is reduced"],
)
def test_a_run_that_was_killed_about_a_load_gives_the_same_bytes(tmp_path, gone_back, method, index, repeats):
    first = scripted(tmp_path, back(tmp_path))

    def kill(call) -> None:
        if (call.method, call.index) == (method, index):
            raise Killed

    first.stage.disturb = kill
    with pytest.raises(Killed):
        first.train()
    second = resumed(tmp_path, first, {4: load(tmp_path, 4, 2)} if repeats else {}, num_workers=2)
    second.train()
    start = STEPS - len(second.digests)
    assert start == (2 if repeats else 4)
    assert second.digests == gone_back.digests[start:]
    assert charges(tmp_path) == charges(gone_back.home)
    assert [kind for kind, _ in second.evidence].count("loaded") == 1


@pytest.mark.parametrize("fate", ["dies", "dies after"])
def test_a_load_survives_the_orchestrator(tmp_path, gone_back, fate):
    """Its next incarnation is asked again, and logs the load once."""
    run = scripted(tmp_path, back(tmp_path), disturb=on("load_state", "orchestrator", fate))
    run.train()
    assert run.digests == gone_back.digests
    assert [kind for kind, _ in run.evidence].count("loaded") == 1
    assert len(run.restarts) == 1


def test_a_package_that_ledger_and_log_do_not_know_yet_is_refused(tmp_path):
    """The state of an hour ago was put back, all but the packages; the run would have to charge those steps again."""
    home, old = tmp_path / "home", tmp_path / "old"
    first = scripted(home, {2: save(2), 3: die})
    with pytest.raises(Killed):
        first.train()
    shutil.copytree(home, old)
    resumed(home, first, {5: save(5)}).train()
    codes = []

    def bring(training: Training) -> None:
        shutil.copytree(at(home, 5), at(old, 5))
        codes.append(refused(lambda: load(old, 3, 5)(training)).code)

    copy = replace(first, home=old, folder=old / first.folder.name)
    second = scripted(old, {3: bring}, assignment=ResumedRun(manifest_of(copy), archive(old)))
    second.train()
    assert codes == ["ledger_rolled_back"]
    assert len(second.digests) == 4


def test_a_load_whose_answer_was_lost_is_made_once(tmp_path, gone_back):
    """The run has resumed from the load, and then it has gone on from it."""
    first = scripted(tmp_path, back(tmp_path) | {5: die})
    with pytest.raises(Killed):
        first.train()
    second = resumed(tmp_path, first, {4: load(tmp_path, 4, 2), 5: load(tmp_path, 4, 2)})
    second.train()
    assert second.digests == gone_back.digests[4:]
    assert [kind for kind, _ in second.evidence].count("loaded") == 1


@pytest.mark.parametrize(("begin", "end"), [(1, 6), (4, 6), (5, 6)])
def test_a_replay_follows_the_loads_of_the_run(tmp_path, gone_back, begin, end):
    shutil.copytree(gone_back.home, tmp_path, dirs_exist_ok=True)
    assignment = ReplayedRun(manifest_of(gone_back), archive(tmp_path), begin, end)
    again = scripted(tmp_path, {}, assignment=assignment, num_workers=2)
    again.train()
    start = end - len(again.digests)
    assert start == {1: 0, 4: 4, 5: 4}[begin]
    assert again.digests == gone_back.digests[start:]
    assert charges(tmp_path) == charges(gone_back.home)


def test_a_run_may_go_back_again_and_again_and_each_later_package_is_its_own(tmp_path, gone_back):
    acts = back(tmp_path)
    acts[5] = both(save(5), load(tmp_path, 5, 2), load(tmp_path, 5, 5), load(tmp_path, 5, 2), load(tmp_path, 5, 5))
    run = scripted(tmp_path, acts)
    run.train()
    assert run.digests == gone_back.digests
    loads = [(body["after_step"], body["step"]) for kind, body in run.evidence if kind == "loaded"]
    assert loads == [(4, 2), (5, 2), (5, 5), (5, 2), (5, 5)]


def test_a_saved_state_stays_whatever_the_configuration_keeps_and_is_one_package(tmp_path):
    saved = []

    def keep(request: str, after: int) -> Act:
        return lambda training: saved.append(unnamed(state_requests.save(training, request, after)))

    def go_back(training: Training) -> None:
        state_requests.load(training, 4, saved[0].package)

    acts = {
        1: both(keep("a", 1), keep("b", 1), keep("a", 1)),
        3: both(keep("c", 3), keep("a", 1)),
        4: both(go_back, keep("d", 4)),
        6: keep("e", 6),
    }
    run = scripted(tmp_path, acts, assignment=NewRun(archive(tmp_path, every=1)))
    run.train()
    first, third, last = saved[0], saved[3], saved[-1]
    assert saved == [first, first, first, third, first, first, last]
    assert [each.step for each in (first, third, last)] == [1, 3, 6]
    assert [each.model_digest.hex() for each in (first, third, last)] == [run.digests[i] for i in (0, 2, 5)]
    assert [each.package for each in (first, third, last)] == [at(tmp_path, i) for i in (1, 3, 6)]
    assert set(packages(tmp_path)) == {f"step-00000{i}.tssp" for i in (1, 3, 6)}


def test_a_save_that_is_asked_for_again_after_a_crash_names_the_same_package(tmp_path):
    saved = []
    keep = lambda request, after: lambda training: saved.append(unnamed(state_requests.save(training, request, after)))  # noqa: E731
    first = scripted(tmp_path, {2: keep("a", 2), 3: die})
    with pytest.raises(Killed):
        first.train()
    acts = {2: both(keep("a", 2), keep("b", 2)), 3: both(keep("a", 2), keep("c", 3)), 5: keep("d", 5)}
    second = resumed(tmp_path, first, acts)
    second.train()
    assert saved[0] == saved[1] == saved[2] == saved[3]
    assert packages(tmp_path) == [f"step-00000{i}.tssp" for i in (2, 3, 5, 6)]


def test_a_loaded_optimizer_state_is_the_same_for_any_workers_and_ranges(tmp_path):
    """Adam's moments and its count of steps are the package's; the schedule is at the run's step."""
    adam = {"name": "adam", "learning_rate": 0.01, "schedule": "cosine"}
    digests = []
    for workers, aggregators in ((3, 1), (2, 3)):
        home = tmp_path / str(workers)
        run = scripted(home, back(home), optimizer=adam, num_workers=workers, aggregators=aggregators)
        run.train()
        digests.append(run.digests)
    assert digests[0] == digests[1]


def refused(act: Callable[[], object]) -> RefusedError:
    with pytest.raises(RefusedError) as refusal:
        act()
    return refusal.value


def test_a_refused_request_changes_nothing_and_the_run_goes_on(tmp_path, straight):
    """Another run's package, an altered one, one that is not there, requests for other steps; a state before any."""
    other = scripted(tmp_path, {2: save(2)}, secret="cd" * 32, assignment=NewRun(archive(tmp_path, "other")))
    other.train()
    # On a ledger of its own: the account that it opened would pay for the run on the same data below.
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    codes = []

    def ask(*requests: Act) -> Act:
        def act(training: Training) -> None:
            before = training.model, training.finished_steps
            for request in requests:
                with pytest.raises(RefusedError) as refusal:
                    request(training)
                assert type(refusal.value) is RefusedError
                codes.append(refusal.value.code)
            assert (training.model, training.finished_steps) == before

        return act

    elsewhere, foreign = tmp_path / "elsewhere" / "step-000002.tssp", str(tmp_path / "packages/other/step-000002.tssp")

    def alter(training: Training) -> None:
        shutil.copytree(at(tmp_path, 2), elsewhere)
        shutil.copytree(foreign, at(tmp_path, 2, "-3"))
        shutil.copytree(at(tmp_path, 2), at(tmp_path, 2, "-2"))
        payload = Path(at(tmp_path, 2, "-2"), "parameters.safetensors.enc")
        sealed = payload.read_bytes()
        payload.write_bytes(sealed[:-1] + bytes([sealed[-1] ^ 1]))

    acts = {
        0: ask(save(0, "z")),
        2: save(2),
        3: both(
            alter,
            ask(
                go_to(3, foreign),
                go_to(3, at(tmp_path, 2, "-3")),
                go_to(3, at(tmp_path, 2, "-2")),
                go_to(3, at(tmp_path, 1)),
                go_to(3, str(elsewhere)),
                go_to(2, at(tmp_path, 2)),
                go_to(4, at(tmp_path, 2)),
                save(2, "x"),
            ),
        ),
    }
    run = scripted(tmp_path, acts)
    run.train()
    assert codes == [
        "no_state",
        "package_other_run",
        "package_other_run",
        "package_file_changed",
        "package_file_missing",
        "package_elsewhere",
        *["other_step"] * 3,
    ]
    assert run.digests == straight
    assert "loaded" not in {kind for kind, _ in run.evidence}


def test_a_run_that_seals_nothing_refuses_to_save_and_to_load(tmp_path, straight):
    codes = []

    def act(training: Training) -> None:
        codes.append(refused(lambda: state_requests.save(training, "a", 2)).code)
        codes.append(refused(lambda: state_requests.load(training, 2, at(tmp_path, 1))).code)

    run = scripted(tmp_path, {2: act}, assignment=NewRun())
    run.train()
    assert (codes, run.digests) == (["no_storage"] * 2, straight)


def test_a_copy_has_the_released_parameters_and_the_run_forgets_it(tmp_path, straight):
    """Also in a run that seals nothing."""
    path, codes, digests = tmp_path / "copies" / "of step 2.safetensors", [], []
    (tmp_path / "file").touch()

    def ask(training: Training) -> None:
        digests.append(state_requests.copy(training, 2, path).hex())
        codes.append(refused(lambda: state_requests.copy(training, 1, path)).code)
        codes.append(refused(lambda: state_requests.copy(training, 2, tmp_path / "file" / "x")).code)

    early: Act = lambda training: codes.append(refused(lambda: state_requests.copy(training, 0, path)).code)  # noqa: E731
    run = scripted(tmp_path, {0: early, 2: ask}, assignment=NewRun())
    run.train()
    assert run.digests == straight
    assert digests == [straight[1]]
    assert codes == ["no_state", "other_step", "copy"]
    copied, tensors = load_file(path), manifest_of(run).computation.tensors
    flat = np.concatenate([copied[tensor.name].ravel() for tensor in tensors])
    assert model_digest(tensors, tensor_digests(flat, tensors)).hex() == straight[1]
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert not list(tmp_path.rglob("*.tssp"))


def test_a_state_is_not_replaced_once_the_next_step_is_charged_for_it(tmp_path, straight):
    """The driver died over a charged step; the ledger would refuse it for other parameters, for good."""
    first = scripted(tmp_path, {1: save(1), 3: save(3)})

    def kill(call) -> None:
        if (call.method, call.index) == ("reduce", 3):
            raise Killed

    first.stage.disturb = kill
    with pytest.raises(Killed):
        first.train()
    codes = []
    second = resumed(tmp_path, first, {3: lambda t: codes.append(refused(lambda: load(tmp_path, 3, 1)(t)).code)})
    second.train()
    assert (codes, second.digests) == (["step_charged"], straight[3:])


def test_with_correlated_noise_a_state_is_loaded_where_a_mix_begins_and_nowhere_else(tmp_path):
    """Neither the place nor the package may be within a mix: its sums are of the models that were."""
    noise = RENYI | {"noise": {"correlated": "auto", "bands": 3}}
    fields = {"steps": 10, "epoch_steps": 4, "dp_config": noise, "expected_batch_size": 12}
    codes = []

    def tried(after: int, step: int) -> Act:
        return lambda training: codes.append(refused(lambda: load(tmp_path, after, step)(training)).code)

    acts = {2: save(2), 4: both(save(4), tried(4, 2)), 6: tried(6, 4), 8: load(tmp_path, 8, 4)}
    run = scripted(tmp_path, acts, **fields)
    run.train()
    assert codes == ["within_mix"] * 2
    (loaded,) = [content for kind, content in run.evidence if kind == "loaded"]
    assert (loaded["after_step"], loaded["step"], loaded["model_digest"]) == (8, 4, run.digests[3])
    assert len(run.digests) == 10
    # A resume makes the load again, and goes on with the same bytes.
    again = resumed(tmp_path, run, {}, **fields)
    again.train()
    assert again.finished.model_digest == run.finished.model_digest


def test_a_storage_that_fails_refuses_a_save_and_the_next_one_succeeds(tmp_path, straight):
    folder = tmp_path / "packages" / RUN_ID
    codes = []

    def full(training: Training) -> None:
        folder.parent.mkdir(exist_ok=True)
        folder.write_text("not a folder")
        codes.append(refused(lambda: save(2)(training)).code)
        folder.unlink()
        save(2)(training)

    run = scripted(tmp_path, {2: full})
    run.train()
    assert (codes, run.digests) == (["storage"], straight)
    assert packages(tmp_path) == ["step-000002.tssp", "step-000006.tssp"]


def test_a_resume_whose_loaded_package_is_gone_says_so(tmp_path):
    first = scripted(tmp_path, back(tmp_path) | {5: die})
    # A newer package than the loaded one, so that the newest is there.
    first.coordinator.order.pace.acts[3] = save(3)
    with pytest.raises(Killed):
        first.train()
    shutil.rmtree(at(tmp_path, 2))
    second = resumed(tmp_path, first, {})
    with pytest.raises(EvidenceError, match="package_file_missing"):
        second.train()


def test_guarantee_the_orchestrator_logs_no_load_that_its_log_does_not_bear_out(tmp_path):
    """Whatever a driver asks: other parameters, a package that was not published, a step that is not the last."""
    codes = []

    def forge(training: Training) -> None:
        orchestrator = training.runner.context.control.orchestrator
        context = training.runner.context
        package = archive(tmp_path).restorer(context.control, context.manifest).newest().package.manifest
        honest = StateLoad(after_step=3, step=2, package_digest=package.digest(), model_digest=package.model_digest)
        training.runner.commit()
        for forged in (
            honest.model_copy(update={"model_digest": training.model.digest}),
            honest.model_copy(update={"package_digest": bytes(32)}),
            honest.model_copy(update={"step": 1}),
            honest.model_copy(update={"after_step": 2}),
            honest.model_copy(update={"after_step": 4}),
        ):
            with pytest.raises(ProtocolError) as refusal:
                orchestrator.load_state(forged)
            codes.append(refusal.value.code)
        assert orchestrator.loads() == ()

    run = scripted(tmp_path, {2: save(2), 3: forge})
    run.train()
    assert codes == ["load_refused"] * 5
