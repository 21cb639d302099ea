"""A broken promise is named and ends in exit code 4; a missed expectation only with --strict."""

import dataclasses
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.coordinator.config.run import load_config
from raycloak_lab.bench.chaos import chaos
from raycloak_lab.bench.chaos.child_run import Left, LineTail, StepSeen
from raycloak_lab.bench.chaos.figures import Kill
from raycloak_lab.bench.chaos.report import Runs, report
from raycloak_lab.cli import app
from tests.coordinator.ledger.ledger_cases import MANIFEST, PARAMETERS, opened

CONFIG = Path(__file__).resolve().parents[4] / "benchmarks" / "chaos.yaml"
KEY = HybridSigner.generate()
KILLS = (Kill("worker", "SIGKILL", 1.5, 7), Kill("driver", "SIGSTOP", 3.5, 8), Kill("node", "SIGKILL", 5.5, 9))


def _step(step, time, digest=None):
    return StepSeen(time, step, digest or f"{step:02x}", 4, 1, 0.9, 0.2, 0.5, 0.2)


def _run(home, steps, *, charged=(), logged=None, ended=(), failed=()):
    """Return a run with these steps as it is left in ``home``."""
    home.mkdir()
    ledger = opened(home / "ledger.sqlite")
    for step in charged:
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    ledger.close()
    with closing(sqlite3.connect(home / "log.sqlite", isolation_level=None)) as connection:
        log = EvidenceLog(connection, "run-a", KEY)
        for step, digest in logged if logged is not None else {each.step: each.model_digest for each in steps}.items():
            log.append("committed", {"step": step, "released_digest": digest})
        log.export(home / "evidence.jsonl")
    tail = LineTail(home / "metrics.jsonl", steps=steps, departures=[Left(1.6, "died"), Left(5.6, "unreachable")])
    record, manifest = SimpleNamespace(run_id="run-a"), SimpleNamespace(log_owner=KEY.public)
    folder = SimpleNamespace(record=record, path=home, manifest=lambda: manifest)
    return SimpleNamespace(
        home=home, tail=tail, steps=steps, ended=list(ended), folder=folder, failed_claims=lambda: failed
    )


# The driver dies after step 2, and its successor repeats steps 1 and 2.
STEPS = [_step(0, 1.0), _step(1, 2.0), _step(2, 3.0), _step(1, 23.0), _step(2, 24.0), _step(3, 25.0), _step(4, 26.0)]


@pytest.fixture
def result_of(tmp_path):
    """The report of a disturbed run; the undisturbed one has one digest for each of five steps."""
    reference = _run(tmp_path / "reference", [_step(step, float(step)) for step in range(5)])

    def make(steps=STEPS, charged=range(5), **rest):
        disturbed = _run(tmp_path / "disturbed", list(steps), charged=charged, **rest)
        return report(load_config(CONFIG), Runs(disturbed, reference, KILLS), 30.0)

    return make


def test_a_run_that_kept_every_promise_has_no_breach(result_of):
    result = result_of()
    assert result.breaches == ()
    assert (result.kills, result.driver_restarts, result.nodes_lost) == (2, 1, 1)
    assert (result.steps, result.repeated_steps) == (5, 2)
    assert result.recovery.count == result.members.count == 1
    assert result.longest_step_s == 1.0
    assert all(each.met for each in result.expectations)


@pytest.mark.parametrize(
    ("changes", "breach"),
    [
        ({"steps": [*STEPS[:3], _step(1, 23.0, "ff"), *STEPS[4:]]}, "other bytes than undisturbed: steps 1"),
        ({"logged": [(0, "00"), (1, "01"), (2, "ee")]}, "other bytes than undisturbed: steps 2"),
        ({"steps": [STEPS[0], STEPS[1], *STEPS[5:]], "charged": (0, 1, 3, 4)}, "never finished: steps 2"),
        ({"charged": range(4)}, "finished without a charge: steps 4"),
        ({"charged": range(7)}, "charged and never finished: steps 5, 6"),
        (
            {"failed": ("steps: gradient step 3: it was committed",)},
            "raycloak verify: steps: gradient step 3: it was committed",
        ),
        ({"ended": [(30.0, "error: unreachable")]}, "the run ended by itself: error: unreachable"),
    ],
)
def test_a_broken_promise_is_named_with_its_place(result_of, changes, breach):
    assert result_of(**changes).breaches == (breach,)


def test_an_edited_log_is_a_breach(result_of, monkeypatch):
    monkeypatch.setattr("raycloak_lab.bench.chaos.report.logged_digests", lambda log, key: _edited(log))
    assert result_of().breaches[0].startswith("the evidence log: log_broken")


def _edited(log):
    from raycloak_lab.bench.chaos.checks import logged_digests

    log.write_bytes(log.read_bytes().replace(b'"01"', b'"0f"'))
    return logged_digests(log, KEY.public)


@pytest.mark.parametrize(
    ("breaches", "met", "strict", "code"),
    [((), True, True, 0), (("steps",), True, False, 4), ((), False, False, 0), ((), False, True, 4)],
)
def test_the_exit_code_tells_broken_promises_and_strictly_missed_expectations(
    result_of, monkeypatch, capfd, breaches, met, strict, code
):
    result = result_of()
    expectations = tuple(dataclasses.replace(each, met=met) for each in result.expectations)
    result = dataclasses.replace(result, breaches=breaches, expectations=expectations)
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    monkeypatch.setattr(chaos, "bench_chaos", lambda config, path, damage, **rest: result)
    options = ["--strict"] if strict else []
    with pytest.raises(SystemExit) as ended:
        app.main(["bench", "chaos", str(CONFIG), "--json", *options])
    assert ended.value.code == code
    assert json.loads(capfd.readouterr().out)["breaches"] == list(breaches)
    with pytest.raises(SystemExit):
        app.main(["bench", "chaos", str(CONFIG), *options])
    table = capfd.readouterr().out
    assert ("MISSED" in table) == (not met)
    assert all(breach in table for breach in breaches)
