"""Views of a run on Ray in progress: its metrics, the vectors of its aggregators, and its evidence."""

import os
import signal
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import ray

from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.cluster.ray_backend import RayBackend
from raycloak.coordinator.cluster.remote import Aggregator, Worker
from raycloak.coordinator.config import home
from raycloak.coordinator.evidence.observer import Observer
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.coordinator.runs.evidence_address import manifest_in, served_at
from raycloak.coordinator.runs.trainer import Trainer


class Watching(RayBackend):
    """Notes what aggregators are given, and can kill a worker as a step begins.

    Attributes:
        seen: for each range and release, references to the vectors of all workers.
        doomed: worker and number of its release at which it is killed; the first counts classes.
    """

    seen: list = []
    asked: list = []
    doomed = None
    killed_time = 0.0

    def call(self, actor, method, *args, **options):
        if method is Worker.step:
            if self.doomed == (actor.member_id, self.asked.count(actor.member_id)):
                os.kill(
                    ray.get(actor.handle.__ray_call__.remote(lambda self: os.getpid()), timeout=120), signal.SIGKILL
                )
                Watching.killed_time = time.monotonic()
            self.asked.append(actor.member_id)
        references = super().call(actor, method, *args, **options)
        if method is Aggregator.reduce:
            self.seen.append(args[4:])
        return references


@contextmanager
def watched():
    """Yield `Watching`, which every trainer takes for its backend meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watching, "seen", [])
        patch.setattr(Watching, "asked", [])
        patch.setattr(Watching, "doomed", None)
        patch.setattr("raycloak.coordinator.runs.ray_session.RayBackend", Watching)
        yield Watching


class Scraping:
    """Reads the metrics page after every step."""

    def __init__(self):
        self.notices, self.pages = [], []

    def __call__(self, report):
        (url,) = (line.removeprefix("metrics: ") for line in self.notices if line.startswith("metrics: "))
        with urllib.request.urlopen(url, timeout=120) as page:
            self.pages.append(page.read().decode())


@dataclass
class Observed:
    """The observations of a run: metrics pages, processes, the vectors its aggregators were given, and its evidence."""

    trainer: Trainer
    result: dict
    pages: list
    processes: set
    vectors: list
    evidence: list
    notices: list


def observe(trainer, name, scratch):
    """Return what an observer on this machine sees of a run in progress."""
    folder = trainer._execution.folder.path
    vendor = SimulatedVendor.load_or_create(home.simulator_folder())
    policy, collateral = simulated_policy(vendor, code_measurement()), vendor.collateral(int(time.time()))
    source = LocalPlatform(vendor.platform())
    observer = Observer(served_at(folder), name, manifest_in(folder), source, policy, collateral)
    return observer.look(scratch / "log.jsonl")
