"""`raycloak-lab bench chaos`: disturbs a training by random signals, and compares it with an undisturbed one.

    cluster     a head and two nodes on this machine, for the bench alone
    disturbed   kills one after the other, each once the run is complete again; then the run is asked to stop
    reference   the same configuration and run secret with the fewest workers, undisturbed, up to the same step
    checks      the bytes of every step, the charges, the ledger's chain, the evidence log, and `raycloak verify`

A driver that is killed is followed by ``raycloak run CONFIG --resume``. A stopped driver is killed after a pause. Every
other stopped process is left to the deadlines of the run.

Guarantee: the bench never removes more than one worker, or the workers of one node, at a time. It never removes so many
that the run would fall below ``min_workers``.
"""

import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak_lab.bench.chaos.child_run import ChildRun, ChildTask
from raycloak_lab.bench.chaos.cluster import ChaosCluster
from raycloak_lab.bench.chaos.figures import Kill
from raycloak_lab.bench.chaos.report import ChaosReport, Runs, report
from raycloak_lab.bench.chaos.schedule import Role, SignalName, Strike, make_schedule

FIRST_STEPS = 5
LATEST_STEPS = 50
# One wait has a fixed deadline, so a long run is followed in parts of so many steps.
FOLLOWED_STEPS = 100
DRIVER_PAUSE_S = 1.0
_NUMBERS: Mapping[SignalName, int] = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
FORCED = ("ledger.url=null", "ledger.account=null", "checkpoint.storage=null")
"""A bench spends from a ledger of its own, and its packages are thrown away with it."""


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage that the bench is asked to do.

    Attributes:
        kills: number of signals to workers, aggregators, ledger, orchestrator and driver.
        nodes_lost: number of raylets to kill besides.
    """

    kills: int
    seed: int
    nodes_lost: int = 0


def bench_chaos(
    config: RunConfig,
    path: Path,
    damage: Damage,
    *,
    overrides: tuple[str, ...] = (),
    notice: Callable[[str], None] = lambda line: None,
) -> ChaosReport:
    """Do ``damage`` to a run of ``config``, which every driver reads from ``path`` with ``overrides``.

    Raises:
        ConfigError: ``chaos_workers`` if the run cannot lose a worker, ``chaos_nodes`` if it cannot lose a node,
            ``chaos_steps`` if it finished before all kills, or gives epochs.
        RunFailedError: ``chaos_stuck`` if the run was not complete again in time, ``chaos_ended`` if it cannot
            continue.
    """
    schedule = make_schedule(damage.kills, damage.seed, _processes(config), damage.nodes_lost)
    if config.num_workers - 1 < config.fewest_workers:
        raise ConfigError(
            "chaos_workers", "the run would fall below min_workers.", "Set num_workers to at least min_workers + 1."
        )
    if config.steps is None:
        raise ConfigError("chaos_steps", "kills need steps, and the configuration gives epochs.", "Give steps.")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="raycloak-chaos-", ignore_cleanup_errors=True) as folder:
        site, secret = new_site(Path(folder) / "site"), Path(folder) / "secret.hex"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32), encoding="utf-8")
        task = ChildTask(path.resolve(), (*overrides, *FORCED), secret)
        with ChaosCluster(config.num_workers) as cluster:
            notice("the cluster is there; the disturbed run starts")
            disturbed = _run(task, shutil.copytree(site, Path(folder) / "disturbed"), config, cluster)
            chaos = Chaos(config, cluster, disturbed, notice)
            try:
                chaos.strike_all(schedule)
                last = chaos.finish()
                notice(f"{len(chaos.kills)} signals sent in {last + 1} steps; the same steps undisturbed")
                # The fewest that the noise was planned for: any number gives the same bytes, and fewer processes start.
                fewest = (f"num_workers={config.fewest_workers}", f"min_workers={config.fewest_workers}", "masks={}")
                few = replace(task, overrides=(*task.overrides, *fewest))
                reference = _run(few, shutil.copytree(site, Path(folder) / "reference"), config, cluster)
                try:
                    reference.start()
                    _follow(reference, last)
                    reference.stop()
                finally:
                    reference.kill()
            finally:
                disturbed.kill()
        runs = Runs(disturbed, reference, chaos.kills)
        return report(config, runs, time.monotonic() - started)


def new_site(folder: Path) -> Path:
    """Make a state folder with an empty ledger and a simulated vendor.

    Keys depend on both, so two executions give the same bytes only if they start from copies of one such folder.
    """
    folder.mkdir(mode=0o700)
    PrivacyLedger(f"sqlite:///{folder / 'ledger.sqlite'}").close()
    SimulatedVendor.load_or_create(folder / "simulator")
    return folder


def _run(task: ChildTask, home: Path, config: RunConfig, cluster: ChaosCluster) -> ChildRun:
    failure = config.failure
    # A stopped worker is missed after one deadline, its replacement has another. Half as much again for slow machines.
    patience_s = 1.5 * (failure.admission_deadline_s + failure.join_timeout_s + failure.step_deadline_s)
    return ChildRun(task, home, cluster.environment, patience_s)


def _processes(config: RunConfig) -> dict[Role, int]:
    return {
        "worker": config.num_workers,
        "aggregator": config.first_aggregators,
        "ledger": 1,
        "orchestrator": 1,
        "driver": 1,
    }


def _last(run: ChildRun) -> int:
    return max((each.step for each in run.steps), default=-1)


def _follow(run: ChildRun, last: int) -> None:
    """Wait until a run has finished step ``last``. It is stuck if some part of the way takes too long."""
    for step in (*range(0, last, FOLLOWED_STEPS), last):
        run.wait_until(lambda step=step: _last(run) >= step, f"step {step} of the undisturbed run")  # type: ignore[misc]


@dataclass(slots=True)
class Chaos:
    """One run that is being disturbed.

    Attributes:
        kills: every signal that was sent.
    """

    config: RunConfig
    cluster: ChaosCluster
    run: ChildRun
    notice: Callable[[str], None]
    kills: list[Kill] = field(default_factory=list)
    _begun: int = 0

    def strike_all(self, schedule: tuple[Strike, ...]) -> None:
        """Start the run and carry out the schedule."""
        self.run.start()
        for number, strike in enumerate(schedule, 1):
            self._complete(f"kill {number} of {len(schedule)}")
            self._strike(strike)
            self.notice(f"{number}/{len(schedule)} {strike.signal} {strike.role} in step {_last(self.run) + 1}")
        self._complete("the last recovery")

    def finish(self) -> int:
        """Ask the run to stop; return its last step."""
        self.run.stop()
        return _last(self.run)

    def _complete(self, what: str) -> None:
        """Wait until the run has noticed the last kill and is complete again."""
        try:
            self.run.wait_until(self._is_complete, f"the complete run before {what}")
        except RunFailedError as failure:
            if _last(self.run) + 1 >= self.config.planned_steps:
                raise ConfigError(
                    "chaos_steps", f"the run finished all its steps before {what}.", "Raise steps."
                ) from None
            if failure.code != "chaos_ended" or self._too_often():
                raise
            self.run.ended.append((time.time(), self.run.last_words()))
            self.notice(f"the run ended by itself and is resumed: {self.run.last_words()}")
            self._resume()
            self._complete(what)

    def _too_often(self) -> bool:
        """Return whether a driver ended by itself although nothing happened since its start."""
        return len(self.run.steps) == self._begun and bool(self.run.ended)

    def _is_complete(self) -> bool:
        steps = self.run.steps[self._begun :]
        if len(steps) < FIRST_STEPS or steps[-1].workers < self.config.num_workers:
            return False
        # Past the step that was in progress when the last driver ended, so that the run makes new steps again.
        if steps[-1].step <= max((each.step for each in self.run.steps[: self._begun]), default=-1) + 1:
            return False
        last = self.kills[-1] if self.kills else None
        if last is None or last.role == "driver" or any(when > last.time for when, _ in self.run.ended):
            return self._all_there()
        noticed = last.time
        if last.role in ("worker", "node"):
            assert self.run.tail is not None, "it has seen steps"
            noticed = next((left.time for left in self.run.tail.departures if left.time > last.time), float("inf"))
        return steps[-1].began >= noticed and self._all_there()

    def _all_there(self) -> bool:
        """Return whether the process table shows the run's processes, and none of an earlier execution."""
        # A relay and its vault each.
        found = {role: len(each) / 2 for role, each in self.cluster.victims(self.config.first_aggregators).items()}
        one = found["ledger"] == found["orchestrator"] == 1
        workers = self.config.num_workers <= found["worker"] <= self.config.most_workers
        return one and workers and found["aggregator"] == self.config.first_aggregators

    def _strike(self, strike: Strike) -> None:
        time.sleep(strike.moment * self._usual_step())
        if strike.role == "driver":
            self._end_driver(strike)
        elif strike.role == "node":
            self._lose_node(strike)
        elif not self._hit_one(strike):
            # The run itself has just given that process up, as on a machine too slow for its deadlines.
            self._complete("a kill that found nobody")
            self._strike(strike)

    def _hit_one(self, strike: Strike) -> bool:
        """Send the signal to a process of the role; return whether there was one."""
        processes = self.cluster.victims(self.config.first_aggregators)[strike.role]
        try:
            pid = processes[int(strike.pick * len(processes))].pid
            sent = time.time()
            os.kill(pid, _NUMBERS[strike.signal])
        except (IndexError, ProcessLookupError):
            return False
        self.kills.append(Kill(strike.role, strike.signal, sent, pid))
        return True

    def _usual_step(self) -> float:
        """Return the recent median of seconds from one commit to the next."""
        times = [each.time for each in self.run.steps[self._begun :][-LATEST_STEPS:]]
        return median(b - a for a, b in pairwise(times))

    def _end_driver(self, strike: Strike) -> None:
        self.kills.append(Kill("driver", strike.signal, time.time(), self.run.pid))
        self.run.signal(_NUMBERS[strike.signal])
        if strike.signal == "SIGSTOP":
            time.sleep(DRIVER_PAUSE_S)
        self.run.kill()
        self._resume()

    def _resume(self) -> None:
        self._begun = len(self.run.steps)
        self.run.start(resume=True)

    def _lose_node(self, strike: Strike) -> None:
        nodes = self.cluster.expendable(self.config.num_workers - self.config.fewest_workers)
        if not nodes:
            raise ConfigError(
                "chaos_nodes",
                "every node holds so many workers that the run would fall below min_workers without it.",
                "Set placement.strategy to SPREAD and min_workers to half of num_workers.",
            )
        node = nodes[int(strike.pick * len(nodes))]
        self.kills.append(Kill("node", "SIGKILL", time.time(), node.pid))
        self.cluster.lose(node)
        self.cluster.replace()
