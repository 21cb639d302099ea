"""The course of the chaos bench, with a run and a cluster that only exist on paper."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.record.folder import RunFolder, RunRecord
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak_lab.bench.chaos import child_run
from raycloak_lab.bench.chaos.chaos import Chaos, Damage, bench_chaos
from raycloak_lab.bench.chaos.child_run import ChildRun, ChildTask, Left, LineTail, StepSeen
from raycloak_lab.bench.chaos.cluster import Process
from raycloak_lab.bench.chaos.schedule import Strike

CONFIG = Path(__file__).resolve().parents[4] / "benchmarks" / "chaos.yaml"


class PaperRun:
    """A run whose events are what the test writes: each wait takes the next batch of them."""

    pid = 1

    def __init__(self, batches):
        self.tail = LineTail(Path("nowhere"))
        self.ended = []
        self.done = []
        self._batches = list(batches)

    @property
    def steps(self):
        return self.tail.steps

    def start(self, *, resume=False):
        self.done.append("resume" if resume else "start")

    def wait_until(self, condition, what):
        while not condition():
            if not self._batches:
                raise RunFailedError("chaos_stuck", what)
            batch = self._batches.pop(0)
            if batch == "ends":
                raise RunFailedError("chaos_ended", what)
            self.tail.steps += [event for event in batch if isinstance(event, StepSeen)]
            self.tail.departures += [event for event in batch if isinstance(event, Left)]

    def signal(self, number):
        self.done.append(signal.Signals(number).name)

    def kill(self):
        self.done.append("kill")

    def last_words(self):
        return "error: unreachable"


class PaperCluster:
    """Processes of one run; ``pids`` of the workers may be real ones."""

    def __init__(self, pids=(11, 12, 13, 14)):
        self.pids = list(pids)

    def victims(self, aggregators):
        roles = {"worker": self.pids, "aggregator": [21], "ledger": [31], "orchestrator": [41]}
        # Each number stands for a relay and its vault.
        return {
            role: [Process(pid, 1, 1, "S", pid, "", 0.0) for pid in pids for _ in "rv"] for role, pids in roles.items()
        }


def _steps(first, count, *, at, workers=4):
    return [StepSeen(at + n * 1e-3, first + n, "ab", workers, 1, 5e-4, 1e-4, 2e-4, 1e-4) for n in range(count)]


def _chaos(batches, cluster=None):
    return Chaos(load_config(CONFIG), cluster or PaperCluster(), PaperRun(batches), lambda line: None)


LATER = 4e9  # of the events that follow a signal, whose time is the machine's


def test_the_next_signal_waits_until_the_loss_was_noticed_and_all_workers_are_back():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        unnoticed = _steps(5, 1, at=LATER)
        noticed = [Left(LATER + 1, "died"), *_steps(6, 2, at=LATER + 1.5, workers=3)]
        batches = [_steps(0, 5, at=1.0), unnoticed, noticed, _steps(8, 1, at=LATER + 3)]
        chaos = _chaos(batches, PaperCluster([victim.pid] * 4))
        chaos.strike_all((Strike("worker", "SIGKILL", 0.5, 0.99),))
        assert victim.wait() == -signal.SIGKILL
        assert not chaos.run._batches
    assert [(kill.role, kill.pid) for kill in chaos.kills] == [("worker", victim.pid)]


def test_a_loss_that_is_never_noticed_is_an_error():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        chaos = _chaos([_steps(0, 5, at=1.0), _steps(5, 9, at=LATER)], PaperCluster([victim.pid] * 4))
        with pytest.raises(RunFailedError, match="the last recovery"):
            chaos.strike_all((Strike("worker", "SIGKILL", 0.0, 0.0),))


@pytest.mark.parametrize(("name", "signals"), [("SIGKILL", ["SIGKILL", "kill"]), ("SIGSTOP", ["SIGSTOP", "kill"])])
def test_a_driver_is_followed_by_another_that_must_get_past_the_step_it_left(name, signals, monkeypatch):
    monkeypatch.setattr("raycloak_lab.bench.chaos.chaos.DRIVER_PAUSE_S", 0.0)
    repeated, new = _steps(2, 5, at=LATER), _steps(7, 1, at=LATER + 1)
    chaos = _chaos([_steps(0, 6, at=1.0), repeated, new])
    chaos.strike_all((Strike("driver", name, 0.0, 0.0),))
    assert chaos.run.done == ["start", *signals, "resume"]
    assert not chaos.run._batches


def test_a_driver_that_ends_by_itself_is_resumed_and_remembered():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        cluster = PaperCluster([victim.pid] * 4)
        chaos = _chaos([_steps(0, 5, at=1.0), "ends", _steps(4, 6, at=LATER)], cluster)
        chaos.strike_all((Strike("worker", "SIGKILL", 0.0, 0.0),))
    assert [reason for _, reason in chaos.run.ended] == ["error: unreachable"]
    assert chaos.run.done == ["start", "resume"]


def test_a_driver_that_ends_again_before_its_first_step_ends_the_bench():
    chaos = _chaos([_steps(0, 2, at=1.0), "ends", "ends"])
    with pytest.raises(RunFailedError, match="chaos_ended"):
        chaos.strike_all((Strike("driver", "SIGKILL", 0.0, 0.0),))
    assert chaos.run.done == ["start", "resume"]


def test_a_run_that_finishes_before_all_kills_asks_for_more_steps():
    chaos = _chaos([_steps(99_990, 10, at=1.0, workers=3), "ends"])
    with pytest.raises(ConfigError, match=r"chaos_steps: .* before kill 1 of 1\. Raise steps"):
        chaos.strike_all((Strike("driver", "SIGKILL", 0.0, 0.0),))


def test_a_process_that_is_gone_is_left_to_the_run_and_another_one_is_hit():
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        cluster = PaperCluster([gone.pid, victim.pid, victim.pid, victim.pid])
        chaos = _chaos([_steps(0, 5, at=1.0)], cluster)
        chaos.run.start()
        chaos._complete("the first kill")
        assert not chaos._hit_one(Strike("worker", "SIGKILL", 0.0, 0.0))
        assert chaos.kills == []
        assert chaos._hit_one(Strike("worker", "SIGKILL", 0.0, 0.3))
        assert victim.wait() == -signal.SIGKILL


@pytest.mark.parametrize("wrong", [["num_workers=2"], ["min_workers=4"]])
def test_a_run_that_cannot_lose_a_worker_is_refused(wrong):
    with pytest.raises(ConfigError, match="chaos_workers"):
        bench_chaos(load_config(CONFIG, wrong), CONFIG, Damage(10, 0))


TABLE = '{"claims": [{"claim": "steps", "outcome": "%s", "record": "step 3", "says": "it was not charged"}]}'


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        (("{}", TABLE % "proved"), ()),
        (("{}", TABLE % "FAILED"), ("steps: step 3: it was not charged",)),
        (('{"error": {"code": "log_broken", "message": "entry 3"}}',), ("log_broken: entry 3",)),
        (("{}", ""), ("chaos_verify: raycloak verify: it broke",)),
    ],
)
def test_the_claims_that_an_auditor_would_refuse_are_named(printed, found, tmp_path, monkeypatch):
    path, answers = tmp_path / "runs" / "chaos-a", iter(printed)
    path.mkdir(parents=True)
    record = RunRecord(
        run_id="a", name="chaos", base="", secret_file=None, started_at=0.0, status="running", driver_base=""
    )
    RunFolder(path, record).mark("stopped")
    run = ChildRun(ChildTask(CONFIG, (), tmp_path / "secret"), tmp_path, {}, 1.0)

    def done(command, by, *, environment, folder):
        assert environment["RAYCLOAK_HOME"] == str(folder) == str(tmp_path)
        return Exited(code=3, last_words="it broke"), next(answers)

    monkeypatch.setattr(child_run, "run", done)
    assert run.failed_claims() == found
    assert next(answers, None) is None
