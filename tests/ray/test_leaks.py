"""Leaks: every byte that left a worker is searched for what only a worker may know.

The needles are made inside the workers' vaults, by their own classes from their own state, and never leave them: what
comes back is the names of those found. The searched places are the object store's memory, that of every process that
Ray runs, Ray's whole session folder (logs, spilled objects), the metrics page, the state folder (run directory,
packages, ledger, evidence) and what was said on the way. The search itself is tested by planting.
"""

import json
import shutil
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import ray

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.sealed.sealed_data import SealedHeader, SealedSource, SliceKeys
from raycloak.coordinator.cluster.ray_backend import RayBackend
from raycloak.coordinator.cluster.ray_calls import ask, fetch
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.sealing import SealTerms, seal_for
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import RunFailedError
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.terms.manifest import Manifest
from tests.protocol import RENYI
from tests.ray import leaks
from tests.ray.relayed import SearchingWorkerActor
from tests.ray.searching import SearchingWorkerVault

STEPS = 3
DEADLINE_S = 240
EXAMPLES = 600
SECRET = bytes(range(100, 132))
HERE = Path(__file__).resolve().parent


class _Watching(RayBackend):
    """Knows the handles of its workers."""

    workers: dict = {}

    def start_worker(self, member_id):
        actor = super().start_worker(member_id)
        self.workers[member_id] = actor.handle
        return actor


@pytest.fixture
def watching(monkeypatch):
    monkeypatch.setattr(_Watching, "workers", {})
    monkeypatch.setattr("raycloak.coordinator.runs.ray_session.RayBackend", _Watching)
    monkeypatch.setattr("raycloak.coordinator.cluster.ray_backend.TrainWorkerActor", SearchingWorkerActor)
    return _Watching


@pytest.fixture
def inputs(tmp_path):
    """Return a folder with the data, whose first row is the marker, and the user's code; it is not searched."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    generator = np.random.default_rng(11)
    features = generator.random((EXAMPLES, 64), np.float32)
    np.savez(folder / "data.npz", images=features, labels=np.arange(EXAMPLES) % 10)
    np.savez(folder / "split.npz", images=generator.random((40, 64), np.float32), labels=np.arange(40) % 10)
    shutil.copy(HERE / "leaky.py", folder / "leaky.py")
    (folder / "secret").write_text(SECRET.hex())
    return folder


def _session():
    return Path(ray._private.worker._global_node.get_session_dir_path())


def _config(kind="sealed"):
    """Return a run that is evaluated on a split that is sealed, or still to be."""
    split = {"npz": {"path": "split.npz"}, "sealed": {"path": "split", "key_file": "split.key", "public": True}}
    raw = demo_config() | {
        "num_workers": 2,
        "virtual_workers": 8,
        "steps": STEPS,
        "expected_batch_size": 200,
        "dataset": {"kind": "npz", "path": "data.npz"},
        "evaluation": {"dataset": {"kind": kind, **split[kind]}, "every": 1},
        "loss": "leaky:loss",
        "dp_config": RENYI,
        "checkpoint": {"checkpoint_frequency": 1},
    }
    return parse_config(raw)


class _Searching:
    """Searches after every step, while workers still have its secrets in memory."""

    def __init__(self, home, workers):
        self.home, self.workers = home, workers
        self.said, self.pages, self.found, self.planted, self.counts, self.places = [], [], [], [], [], {}

    def notice(self, line):
        self.said.append(line)

    def after(self, report):
        (url,) = (line.removeprefix("metrics: ") for line in self.said if line.startswith("metrics: "))
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as page:
            content = page.read()
        self.pages.append(content)
        (self.home / f"page-{report.step}").write_bytes(content)
        for count, places, found in self._search(*self.workers.values(), memory=report.step == STEPS):
            self.counts.append(count)
            self.places |= places
            self.found += found
        if report.step == STEPS:
            self._plant_and_search(next(iter(self.workers.values())))

    def _search(self, *handles, memory=False):
        # One after the other, and memory once: each search reads all places for each needle.
        for index, each in enumerate(handles):
            asked = ask(each, SearchingWorkerVault.search, str(self.home), str(_session()), memory and index == 0)
            count, places, found = fetch(asked, DEADLINE_S)
            yield count, dict(places), found

    def _plant_and_search(self, handle):
        """Search the same process again, now that there is something to be found."""
        planted = self.home / "planted"
        fetch(ask(handle, SearchingWorkerVault.plant, str(planted)), DEADLINE_S)
        ((_, _, self.planted),) = self._search(handle)
        planted.unlink()


def _markers(folder):
    """Return the first example to train on, and the first to evaluate on, with the keys of the split."""
    needles = leaks.key_needles("key of the split", bytes.fromhex((folder / "split.key").read_text()))
    keys = SliceKeys.open(SealedSource(SealedHeader.load(folder / "split"), str(folder / "split.key")), "evaluation")
    for v in range(keys.header.virtual_workers):
        needles |= leaks.key_needles(f"key of slice {v} of the split", keys.of(v).reveal())
    for name in ("data", "split"):
        row = np.load(folder / f"{name}.npz")["images"][0]
        needles |= {
            **leaks.array_needles(f"marker of {name}, float32", row),
            **leaks.array_needles(f"marker of {name}, float64", row.astype(np.float64)),
            **leaks.array_needles(f"marker of {name} less its mean", row - row.mean()),
        }
    return needles


def _run_needles(folder, inputs):
    """Return keys, sampled ids and batch sizes of every step, as the run secret gives them."""
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    after = [bytes.fromhex(event["model_digest"]) for event in events if event["event"] == "step"]
    started_from = [manifest.computation.initial_parameters, *after[:-1]]
    dataset = DatasetDescriptor(kind="npz", path="data.npz").open(inputs)
    return leaks.run_needles(manifest, dataset, Secret(SECRET), started_from)


def test_nothing_that_left_a_worker_tells_an_update_a_draw_a_loss_a_key_or_an_example(
    ray_cluster, raycloak_home, inputs, watching, capfd
):
    """Nor one that it is evaluated on; also when a worker is made to fail by user code that raises private labels.

    That the search would find it is seen by planting: from inside a worker, at the end of the first run.
    """
    searching = _Searching(raycloak_home, watching.workers)
    seal_for(_config("npz"), inputs, inputs / "split.key", inputs / "split", SealTerms("evaluation", None))
    (split := inputs / "split.npz").rename(inputs / "away.npz")
    options = {"config_dir": inputs, "run_secret": inputs / "secret", "notice": searching.notice}
    result = Trainer(_config(), progress=searching.after, **options).train()
    assert isinstance(result["metrics"]["evaluation_loss"], float)
    assert result["metrics"]["evaluation_data"] == "sealed"
    assert len(searching.counts) == 2 * STEPS
    assert min(searching.counts) > 60, "needles of four virtual workers"
    files = ("metrics.jsonl", "ledger.sqlite", "orchestrator/", ".tssp", "page-1", "raylet.out")
    for place in ("object store", "memory of ray::SearchingWorker", *files):
        assert any(place in name for name in searching.places), f"{place} was not searched"
    assert searching.found == []
    assert any("unmasked sum" in line and line.endswith("planted") for line in searching.planted)
    assert all("planted" in line for line in searching.planted)

    (inputs / "away.npz").rename(split)
    (inputs / "other").write_text(SECRET[::-1].hex())
    options |= {"run_secret": inputs / "other", "progress": lambda report: (inputs / "fail").touch()}
    with pytest.raises(RunFailedError, match="worker_error") as failure:
        Trainer(_config(), **options).train()
    said = [*searching.said, str(failure.value), repr(failure.value), *capfd.readouterr()]
    needles = {
        **_run_needles(Path(result["run_dir"]), inputs),
        **leaks.key_needles("secret of the failed run", SECRET[::-1]),
        **_markers(inputs),
        "printed by the loss": b"TOLD-BY" + b"-THE-LOSS",
        "raised by the loss": b"RAISED-BY" + b"-THE-LOSS",
    }
    places = [
        *[("what was said", text.encode()) for text in said],
        *leaks.places_of_run(raycloak_home, _session()),
    ]
    assert any(name.endswith("evidence.jsonl") for name, _ in places)
    assert leaks.leaks(needles, places) == []


# --- the search itself

_KINDS = {
    "clear update": leaks.array_needles("clear update", np.linspace(-1, 1, 64)),
    "encoded update": leaks.array_needles("encoded update", np.arange(5, 500, 3, dtype=np.uint32)),
    "realised batch sizes": leaks.number_needles("realised batch sizes", np.array([51, 49, 60, 47])),
    "sampled ids": leaks.number_needles("sampled ids", np.array([3, 17, 21, 24, 31, 40, 41, 52, 66])),
    "private loss": leaks.float_needles("private loss", 2.3025850929),
    "key": leaks.key_needles("key", bytes(range(7, 39))),
    "marker": leaks.array_needles("marker", np.linspace(0.1, 0.9, 64, dtype=np.float32)),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_the_search_finds_each_kind_in_a_file_and_in_the_object_store(ray_cluster, tmp_path, kind):
    needles = _KINDS[kind]
    places = {f"planted-{i}": needle for i, needle in enumerate(needles.values())}
    for name, needle in places.items():
        (tmp_path / name).write_bytes(b"before " + needle + b" after")
    found = leaks.leaks(needles, leaks.files_below(tmp_path))
    assert {line.rpartition(" in ")[0] for line in found} == set(needles)
    kept = ray.put(np.frombuffer(b"x" * 200_000 + b" ".join(needles.values()), np.uint8))
    found = leaks.leaks(needles, leaks.object_stores(_session().name))
    assert {line.rpartition(" in ")[0] for line in found} == set(needles)
    del kept


def test_the_search_finds_what_a_deleted_object_left_behind_and_in_a_log(ray_cluster, tmp_path):
    needles = leaks.key_needles("key of a log", bytes(range(60, 92)))

    @ray.remote
    def careless():
        print(bytes(range(60, 92)).hex())

    ray.get(careless.remote(), timeout=DEADLINE_S)
    end = time.monotonic() + DEADLINE_S
    while not any(
        "hexadecimal in" in line and "/logs/worker" in line
        for line in leaks.leaks(needles, leaks.files_below(_session()))
    ):
        assert time.monotonic() < end, "it is not found in the log"
        time.sleep(0.1)
