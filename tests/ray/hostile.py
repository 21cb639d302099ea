"""A program of its own that holds the cluster's token, and takes every way that Ray offers into a run.

It runs code in the process of every actor: it takes their ids from Ray's control store and forges handles from one of
its own actors. A plain task of its own searches the memory, environment and open files of every process that Ray runs,
Ray's files and the object store. It reads all that the dashboard tells, logs included. It knows no handle and no name.

Its input is JSON, ``{"needles": {name: hexadecimal}, "dashboard": address}``; it prints what it found, as JSON.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import ray
from ray.core.generated import core_worker_pb2, gcs_pb2

from raycloak.coordinator.cluster import relays
from raycloak.coordinator.vaults.calls import ActorRefusal
from tests.ray import leaks

DEADLINE_S = 300
BAIT = "Planted-" + "bait-of-the-search"
"""What the program itself leaves with Ray: the search is blind where it does not find this."""
OWN = {
    "LedgerActor": ("sqlite:////nonexistent/ledger",),
    "OrchestratorActor": ("/nonexistent",),
    "MaskedAggregatorActor": (None,),
    "TrainWorkerActor": (BAIT, None),
}
"""Arguments of the own actors whose handles are forged into those of others; whether they start does not matter."""
MASK = 0x55
"""The needles go to the task under this mask, or the search would find them in what carries them."""
PAGES = (
    "/logical/actors", "/nodes?view=details", "/api/jobs/", "/api/cluster_status", "/api/v0/cluster_events",
    *(f"/api/v0/{kind}?detail=true&limit=10000"
      for kind in ("actors", "tasks", "objects", "workers", "jobs", "runtime_envs", "placement_groups", "nodes")),
)  # fmt: skip
WANTED = ("_run", "_store", "_stage", "__init__", "__reduce__", "receive")
"""Of the plain classes, where their secrets are; and methods that are none of the calls of a run."""


def alive(name):
    """Return the control store's rows of all actors of a class."""
    state = ray._private.state.state
    state._connect_and_get_accessor()
    rows = map(gcs_pb2.ActorTableData.FromString, state._global_state_accessor.get_actor_table(None, None))
    return [row for row in rows if row.state == gcs_pb2.ActorTableData.ALIVE and row.class_name == name]


def forged(name, row):
    """Return a handle to another driver's actor."""
    cls = getattr(relays, name)
    groups = {"concurrency_groups": {"control": 1}} if hasattr(cls, "receive_beside") else {}
    own = ray.remote(num_cpus=0, max_restarts=0, **groups)(cls).remote(*OWN[name])
    template = ray._private.worker.global_worker.core_worker.serialize_actor_handle(own._ray_actor_id)
    template = template[0] if isinstance(template, tuple) else template
    handle = core_worker_pb2.ActorHandle.FromString(template.replace(own._ray_actor_id.binary(), row.actor_id))
    handle.creation_job_id = row.job_id  # a process ends if it is asked to work for another job than its own
    handle.actor_creation_task_function_descriptor.CopyFrom(row.function_descriptor)
    ray.kill(own)
    return ray.actor.ActorHandle._deserialization_helper(handle.SerializeToString(), True)


def look(actor):
    """Run in the victim's process: return what it is, what it holds, and which ways to a secret it refuses."""
    refused = []
    for name in WANTED:
        try:
            actor.vault.call(name, 1, (b"{}",))
        except ActorRefusal:
            refused.append(name)
    return {"pid": os.getpid(), "attributes": sorted(vars(actor)), "refused": refused}


@ray.remote(num_cpus=0, runtime_env={"env_vars": {"HOSTILE": BAIT}})
def search(masked, session):
    """Search what Ray runs and keeps from a plain task; return the bytes of each kind of place, and what was found."""
    print(BAIT, flush=True)
    needles = {name: bytes(each ^ MASK for each in bytes.fromhex(needle)) for name, needle in masked.items()}
    looked, found = {}, []
    for place, content in leaks.what_ray_has(Path(session)):
        looked[place] = looked.get(place, 0) + len(content)
        found += leaks.leaks(needles, [(place, content)])
    return looked, found


def told_by(dashboard) -> Iterator[tuple[str, bytes]]:
    """Yield all pages of the dashboard, the log files of every node, and the stacks of every actor."""
    headers = {"Authorization": "Bearer " + Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()}

    def page(path):
        with suppress(urllib.error.HTTPError):
            request = urllib.request.Request(dashboard + path, headers=headers)
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.read()
        return b""

    yield from ((path, page(path)) for path in PAGES)
    for node in ray.nodes():
        listed = json.loads(page(f"/api/v0/logs?node_id={node['NodeID']}"))["data"]["result"]
        for name in (each for names in listed.values() for each in names):
            yield f"log {name}", page(f"/api/v0/logs/file?node_id={node['NodeID']}&filename={name}&lines=-1")
        for row in (each for kind in OWN for each in alive(kind)):
            where = f"pid={row.pid}&node_id={node['NodeID']}&native=0&format=raw"
            yield f"stack of {row.class_name}", page(f"/worker/traceback?{where}")


def main():
    told = json.load(sys.stdin)
    needles = {name: bytes.fromhex(needle) for name, needle in told["needles"].items()} | {"bait": BAIT.encode()}
    masked = {name: bytes(each ^ MASK for each in needle).hex() for name, needle in needles.items()}
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, configure_logging=False)
    relays = []
    for name in OWN:
        for row in alive(name):
            victim = forged(name, row)
            relays.append({"actor": name, **ray.get(victim.__ray_call__.remote(look), timeout=DEADLINE_S)})
    session = ray._private.worker._global_node.get_session_dir_path()
    import time

    t0 = time.time()
    looked, found = ray.get(search.remote(masked, session), timeout=DEADLINE_S)
    t1 = time.time()
    for place, content in told_by(told["dashboard"]):
        looked[f"dashboard: {place}"] = len(content)
        found += leaks.leaks(needles, [(f"dashboard: {place}", content)])
    sys.stdout.write(
        json.dumps({"relays": relays, "looked": looked, "found": found, "seconds": [t1 - t0, time.time() - t1]})
    )


if __name__ == "__main__":
    main()
