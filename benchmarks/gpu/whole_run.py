"""Section on a whole run by the command line: two workers share the card, and one of them is killed.

The same secret without a kill must give the same model after every step.
"""

import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found
from raycloak.coordinator.cluster.processes import descendants, process_table
from raycloak.coordinator.runs.demo import demo_config
from raycloak_lab.bench.chaos.chaos import new_site
from raycloak_lab.bench.chaos.child_run import ChildRun, ChildTask
from raycloak_lab.bench.chaos.cluster import victims

STEPS = 20
KILLED_AFTER = 3
"""Steps before the kill: a worker of both runs has then noised and masked vectors."""
PATIENCE_S = 150.0
"""For one event of a run. A worker compiles its kernels before its first vector, and so does a replacement."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of the run.

    Attributes:
        seconds: from its driver's start to its end, Ray's start included.
        departures: codes of the workers that were lost.
        digests: of the model after each step, in hexadecimal digits.
        device: that the gradients were computed on, as the manifest states it.
    """

    seconds: float
    departures: tuple[str, ...]
    digests: tuple[str, ...]
    device: str


@dataclass(frozen=True, slots=True)
class WholeRun:
    """The same run twice, with one run secret."""

    killed: Execution
    undisturbed: Execution

    def faults(self, kind: str) -> list[str]:
        """Return a sentence for each promise that is broken.

        Args:
            kind: of the device that the workers were to compute on, as torch names it.
        """
        faults = []
        for name, each in (("killed", self.killed), ("undisturbed", self.undisturbed)):
            if len(each.digests) != STEPS:
                faults.append(f"{name}: {len(each.digests)} of {STEPS} steps were made")
            if not each.device.startswith(kind):
                faults.append(f"{name}: the workers computed on {each.device}")
        if self.killed.digests != self.undisturbed.digests:
            faults.append("the same secret gives another model where a worker is killed")
        lost = len(self.killed.departures), len(self.undisturbed.departures)
        if lost != (1, 0):
            faults.append(f"{lost[0]} workers were lost where one was killed, and {lost[1]} where none was")
        return faults


def whole_run(place: Place) -> Found:
    """Train scikit-learn's digits twice on a Ray of its own; the second time nobody is killed."""
    if place.on_gpu:
        # The workers take halves of the card, and this process held what the sections before needed.
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="raycloak-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        site, config, secret = new_site(folder / "site"), folder / "config.yaml", folder / "secret.hex"
        config.write_text(yaml.safe_dump(run_fields(place)), encoding="utf-8")
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32), encoding="utf-8")
        task = ChildTask(config, (), secret)
        # Keys depend on the site's ledger and simulated vendor, so both executions start from copies of one.
        homes = [shutil.copytree(site, folder / home) for home in ("killed", "undisturbed")]
        found = WholeRun(_execution(task, homes[0], kills=True), _execution(task, homes[1], kills=False))
    return Found({"runs": found}, found.faults(place.device.type))


def run_fields(place: Place) -> dict[str, Any]:
    """Return the raw configuration: the demo's, on two workers of the place."""
    share = {"GPU": 0.5} if place.on_gpu else {}
    return {
        **demo_config(),
        "num_workers": 2,
        "virtual_workers": 4,
        "steps": STEPS,
        "use_gpu": place.on_gpu,
        "placement": {"resources_per_worker": {"CPU": 1, **share}},
    }


def _execution(task: ChildTask, home: Path, *, kills: bool) -> Execution:
    run = ChildRun(task, home, {}, PATIENCE_S)
    began = time.monotonic()
    with ExitStack() as stack:
        run.start()
        stack.callback(run.kill)
        if kills:
            run.wait_until(lambda: len(run.steps) >= KILLED_AFTER, f"step {KILLED_AFTER}")
            # The relay of each worker comes first, then its vault, which has the data and the keys.
            _, vault, *_ = victims(descendants([run.pid], process_table()), aggregators=1)["worker"]
            os.kill(vault.pid, signal.SIGKILL)
        run.wait_until(lambda: len(run.steps) >= STEPS, "its last step")
        run.finish(PATIENCE_S)
    seconds = time.monotonic() - began
    assert run.tail is not None, "it has seen steps"
    manifest = json.loads((run.folder.path / "manifest.json").read_text(encoding="utf-8"))
    return Execution(
        seconds=round(seconds, 2),
        departures=tuple(left.code for left in run.tail.departures),
        digests=tuple(each.model_digest for each in run.steps),
        device=manifest["computation"]["numerics"]["device"],
    )
