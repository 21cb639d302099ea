"""What an execution hands to its coordinator, without Ray."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.payer import data_name
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.runs import execution
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.execution import Execution
from raycloak.coordinator.runs.ray_session import launch
from raycloak.coordinator.training.assignment import NewRun, Order, ResumedRun
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import ConfigError, EvidenceError, RunFailedError
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.models.models import ModelSource
from tests.coordinator.config.test_run import GOOD
from tests.models import small_model


class Handed(Exception):
    """The end of an execution that has handed over its order."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order


def refuse(order: Order) -> None:
    raise Handed(order)


def launched_under(code: tuple[bytes, ...] | None) -> Any:
    """Return a session of no processes, whose policy has this list of code."""
    return SimpleNamespace(
        began=0.0,
        control=SimpleNamespace(control=lambda *_: None),
        session=lambda *_: None,
        samplers=None,
        policy=SimpleNamespace(code=code, require_boundary=None),
    )


@pytest.mark.parametrize(("gpus", "device", "share"), [(0.0, "cpu", 1.0), (0.5, "cuda", 0.5), (2.0, "cuda", 2.0)])
def test_workers_compute_on_what_their_places_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: float, device: str, share: float
):
    config = parse_config({**GOOD, "dataset": {"kind": "digits"}, "model": "m:f", "use_gpu": "if_there"})
    monkeypatch.setattr(execution, "start_ray", lambda *_: False)
    monkeypatch.setattr(execution, "require_no_secret_in_job", lambda: None)
    monkeypatch.setattr(execution, "job_folder", lambda: None)
    monkeypatch.setattr(execution, "Placement", lambda *_: SimpleNamespace(num_gpus=gpus))
    monkeypatch.setattr(execution, "launch", lambda *_: None)
    run = Execution(config, ModelSource.of("m:f"), str(tmp_path), notice=print)
    with ExitStack() as stack:
        run._launch(stack, None, None)
        folder = RunFolder.create(config, "ab12", str(tmp_path), None)
        setup = run._setup(stack, folder, NewRun(), SimpleNamespace(code=None))  # type: ignore[arg-type]
    assert (setup.device, setup.gpus) == (device, share)
    assert bool(run.warnings) is (device == "cpu"), "the verdict says that there was none"


@pytest.mark.parametrize("public", [False, True])
def test_guarantee_an_execution_names_the_account_of_its_data(
    public: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    raw: dict[str, Any] = {**GOOD, "dataset": {"kind": "npz", "path": "train.npz", "public": public}, "model": "m:f"}
    config = parse_config(raw)
    for method in ("_reporting", "_setup", "_void"):
        monkeypatch.setattr(Execution, method, lambda *_: None)
    monkeypatch.setattr(execution, "Coordinator", refuse)
    monkeypatch.setattr(execution, "public_evaluation", lambda *_: None)
    launched = launched_under(None)
    run = Execution(config, ModelSource.of("m:f"), str(tmp_path), notice=print)
    folder = RunFolder.create(config, "ab12", str(tmp_path), None)
    with ExitStack() as stack, pytest.raises(Handed) as handed:
        run._conduct(stack, launched, None, folder, NewRun())  # type: ignore[arg-type]
    assert handed.value.order.data == data_name(config.dataset, tmp_path)
    assert (handed.value.order.data == "") == public


def test_an_execution_hands_on_the_policys_list_of_code_or_refuses_what_is_not_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "m.py").write_text("raise SystemExit\n")
    listed = CodeBundle.read(tmp_path).digest
    config = parse_config({**GOOD, "dataset": {"kind": "digits"}, "model": "m:f"})
    for method in ("_reporting", "_void"):
        monkeypatch.setattr(Execution, method, lambda *_: None)
    monkeypatch.setattr(execution, "Coordinator", refuse)

    def handed(model: ModelSource, code: tuple[bytes, ...] | None, **given: Any) -> Order:
        folder = RunFolder.create(config, "ab12", str(tmp_path), None)
        run = Execution(config, model, str(tmp_path), notice=print, **given)
        with ExitStack() as stack, pytest.raises(Handed) as caught:
            run._conduct(stack, launched_under(code), None, folder, NewRun())  # type: ignore[arg-type]
        return caught.value.order

    named = ModelSource.of("m:f")
    for code, stated in ((None, b""), ((listed,), listed)):
        order = handed(named, code)
        assert (order.setup.code, order.code) == (code, stated)
    for why, model, code, given in (
        ("m:f", named, (b"x" * 32,), {}),
        ("small_model", ModelSource.of(small_model), (listed,), {}),
        ("small_model", named, (listed,), {"metrics": [small_model]}),
    ):
        with pytest.raises(EvidenceError, match=f"code_unlisted: {why}"):
            handed(model, code, **given)


def test_a_resumed_run_says_where_it_begins_and_what_its_account_has_been_charged(tmp_path: Path):
    said: list[str] = []
    told: list[float | None] = []
    run = Execution(
        parse_config({**GOOD, "model": "m:f"}),
        ModelSource.of("m:f"),
        str(tmp_path),
        notice=said.append,
        progress=lambda report: told.append(report.epsilon),
    )
    plan: Any = SimpleNamespace(mechanism=SimpleNamespace(steps=79), epsilon=8.0, epsilon_cap=8.0, delta=1e-5)
    outset: Any = SimpleNamespace(plan=plan, finished_steps=10, charged_steps=29, charged_epsilon=5.2)
    folder: Any = SimpleNamespace(path=tmp_path)
    run._callbacks = SimpleNamespace(started=lambda *_: None, tell=lambda _: None)  # type: ignore[assignment]
    run._outset(folder, ResumedRun(None, None), outset)  # type: ignore[arg-type]
    # The receipts of steps 11 to 29 are of the time when they were charged.
    for step, epsilon in ((11, 3.9), (29, 5.2), (30, 5.3)):
        run._stepped(StepReport(step, 79, epsilon, 8.0, None, 2, "ab", 0.5))
    assert said == ["resumed after step 10 of 79: steps that are charged already are not charged again"]
    assert told == [5.2, 5.2, 5.3]


def test_an_interrupted_run_counts_as_killed_since_its_log_was_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Marked as failed, it would give an auditor the log of an earlier execution beside newer packages."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    config = parse_config({**GOOD, "model": "m:f"})
    for method in ("_reporting", "_setup"):
        monkeypatch.setattr(Execution, method, lambda *_: None)
    monkeypatch.setattr(execution, "Coordinator", lambda order: SimpleNamespace(run=interrupt))
    launched = launched_under(None)
    run = Execution(config, ModelSource.of("m:f"), str(tmp_path), notice=print)
    folder = RunFolder.create(config, "ab12", str(tmp_path), None)
    folder.mark("stopped")
    with ExitStack() as stack, pytest.raises(KeyboardInterrupt):
        run._conduct(stack, launched, None, folder, NewRun())  # type: ignore[arg-type]
    assert RunFolder.open(folder.path).record.status == "running"


@pytest.mark.parametrize(
    ("charges", "kind", "calls"),
    [
        pytest.param(True, None, ["await_reader", "close"], id="ended"),
        pytest.param(True, RunFailedError, ["await_reader", "close"], id="failed"),
        pytest.param(True, KeyboardInterrupt, ["close"], id="interrupted"),
        pytest.param(False, None, ["close"], id="replayed"),
    ],
)
def test_a_page_waits_for_its_reader_when_a_run_ends_and_not_at_an_interrupt(
    charges: bool, kind: type[BaseException] | None, calls: list[str]
):
    made: list[str] = []
    server: Any = SimpleNamespace(await_reader=lambda: made.append("await_reader"), close=lambda: made.append("close"))
    execution._close_page(server, charges, kind, None, None)
    assert made == calls


def test_data_in_memory_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execution, "alive_nodes", lambda: ["one"])
    config = parse_config({**GOOD, "dataset": None, "model": "m:f"})
    values = [(np.float32([number, 0]), number % 2) for number in range(9)]

    def fingerprint(examples: Any, name: str) -> bytes:
        run = Execution(config, ModelSource.of("m:f"), str(tmp_path), in_memory=examples, notice=print)
        with ExitStack() as stack:
            described = run._descriptor(stack, RunFolder.create(config, name, str(tmp_path), None))
            return data_marks(described, described.open_slices(tmp_path), tmp_path).fingerprint

    first, again, other = fingerprint(values, "a"), fingerprint(values, "b"), fingerprint(values[:8], "c")
    assert len(first) == 32
    assert first == again != other


def test_guarantee_a_page_that_cannot_be_written_fails_no_run_and_is_named(tmp_path: Path):
    folder = RunFolder.create(parse_config({**GOOD, "model": "m:f"}), "ab" * 8, str(tmp_path), None)
    said: list[str] = []
    run = Execution(folder.config(), ModelSource.of("m:f"), str(tmp_path), notice=said.append)
    run._show(folder)
    assert (said, (folder.path / "report.html").exists()) == ([], True)
    (folder.path / "metrics.jsonl").write_text("damaged\n")
    run._show(folder)
    assert len(said) == 1
    assert said[0].startswith("warning: report.html was not written (")
    assert f"raycloak report {folder.path}" in said[0]
    assert run.warnings == [said[0].removeprefix("warning: ")]


def test_a_run_without_the_boundary_that_its_policy_demands_starts_nothing(tmp_path: Path) -> None:
    policy = simulated_policy(SimulatedVendor.create(), bytes(48)).model_copy(update={"require_boundary": ()})
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy.model_dump(mode="json")))
    config = parse_config({**demo_config(), "policy": "policy.yaml"})
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"boundary_required: .*docs/boundary\.md"):
        launch(stack, config, tmp_path, None, None, None)
