"""A service that is killed at any statement of its store: after a restart everything ends, and nothing is done twice.

A nursery process imports everything once and forks a service for each kill, which starts again until its work is done.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import traceback
from itertools import count
from pathlib import Path

import pytest

from raycloak.coordinator.service.databases import open_database
from tests.coordinator.service.scripted import SENT, TEXT, Site, World, digest

DEADLINE_S = 300
TEXTS = {"prompts": ["a"], "max_tokens": 3, "top_p": 1.0, "completions": 1}


class Fatal:
    """A database after whose ``at``-th statement the process is killed."""

    def __init__(self, url, at):
        self._database, self._at = open_database(url), at
        self.begin, self.types, self.tables = self._database.begin, self._database.types, self._database.tables
        self.close = self._database.close
        self.count = 0
        if url.startswith("sqlite"):
            # The kernel keeps what a killed process has written, so nothing has to wait for the disk.
            self._database.run("PRAGMA synchronous = OFF")

    def run(self, statement, values=()):
        """Run a statement."""
        self.count += 1
        found = self._database.run(statement, values)
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def life(folder: Path, url: str, at: int) -> None:
    """Do all work of two clients, as far as it is not done."""
    # A package every second step: a resumed driver repeats one.
    database = Fatal(url, at)
    site = Site(folder, database=database, world=World(folder / "world"), package_every=2)
    client = site.create(config=TEXT, key="client")
    sender = site.create(config=SENT, key="sender")
    pairs = [(site.submit(client, "forward_backward", key=f"f{n}"), site.submit(client, "optim_step", key=f"o{n}")) for n in range(2)]  # fmt: skip # noqa: E501
    site.submit(client, "save_state", key="save")
    site.run()
    artifact = f"{client}.4"
    site.submit(client, "load_state", key="load", artifact_id=artifact)
    sample = site.submit(client, "sample", key="sample", **TEXTS)
    site.send(sender, "a", "b", key="b0")
    site.send(sender, "c", key="b1")
    site.submit(sender, "optim_step", key="sent")
    site.run()
    if site.get(sample).state == "running":
        assert sample.operation_id in site.sampler.asked
        site.ask(site.desk.reports.sampled, sample.operation_id, [])
    cancelled = site.submit(client, "forward_backward", key="cancelled")
    site.cancel(cancelled)
    site.run()
    site.ask(site.desk.close_client, "north", client)
    site.run()
    _check(site, client, sender, pairs)
    site.close()


def _check(site, client, sender, pairs):
    """Assert that all work was done once."""
    assert [site.get(pair[1]).optim_step.model_digest for pair in pairs] == [digest(1), digest(2)]
    operations = [site.store.operation(client, number) for number in range(8)]
    assert [each and each.state for each in operations[:7]] == ["done"] * 7
    # Killed between the submission and the cancellation, it was computed by then.
    assert operations[7].state in ("cancelled", "done")
    assert [site.store.operation(sender, number).state for number in range(3)] == ["done"] * 3
    for row in (site.store.client(client), site.store.client(sender)):
        assert (row.open, row.error) == (0, b"")
    assert [site.store.used_in_step(sender, hashed)[0] for hashed in _hashes("a", "b", "c")] == [1, 1, 1]
    assert len(site.store.batch_files()) == 2
    begun = [run for run in site.world.runs() if site.world.facts(run, "charge")]
    # Of each client one run was charged; an orphan that no service knew of was never allowed a step.
    assert sorted(len(site.world.facts(run, "charge")) for run in begun) in ([1, 2], [1, 3])
    for run in begun:
        for kind in ("charge", "release"):
            facts = site.world.facts(run, kind)
            assert facts == [[step] for step in range(len(facts))]
    assert sorted(len(site.world.facts(run, "release")) for run in begun) == [1, 2]


def _hashes(*ids):
    return [hashlib.sha256(each.encode()).digest()[:16] for each in ids]


def nursery(folder: Path, stride: int, urls: dict[int, str]) -> None:
    """Kill after each ``stride``-th statement, until a life has fewer; print the number of deaths.

    Args:
        urls: of databases on a server by the statement, for those alone.
    """
    deaths = 0
    for at in urls or count(1, stride):
        place = folder / str(at)
        place.mkdir()
        store = urls.get(at, f"sqlite:///{place / 'store' / 's.sqlite'}")
        status = _forked(place, store, at)
        died = status == -signal.SIGKILL
        if died:
            status = _forked(place, store, 0)
        assert status == 0, f"statement {at}"
        deaths += died
        if not died:
            break
    print(json.dumps({"deaths": deaths}))


def _forked(folder, url, at):
    """Live a life in a child; return its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            life(folder, url, at)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child must not go on as its parent
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_nursery(tmp_path, stride, urls):
    given = str(tmp_path), str(stride), *(f"{at} {url}" for at, url in urls.items())
    command = [sys.executable, "-m", "tests.coordinator.service.test_desk_crash", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def test_killed_at_any_statement_everything_ends_once(tmp_path):
    done = _run_nursery(tmp_path, 3, {})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["deaths"] > 60


@pytest.mark.server
def test_killed_on_postgresql_everything_ends_once(tmp_path, postgres):
    done = _run_nursery(tmp_path, 1, {at: postgres.url() for at in (40, 120, 200)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["deaths"] == 3


if __name__ == "__main__":
    nursery(Path(sys.argv[1]), int(sys.argv[2]), {int(each.split()[0]): each.split()[1] for each in sys.argv[3:]})
