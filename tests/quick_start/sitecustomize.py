"""Starts Ray's workers without importing Ray beforehand; for interpreters that have this folder on their PYTHONPATH.

All of them collect garbage rarely, as the tests themselves do: what they import stays.

Ray starts a worker by a script that imports the whole of Ray, only to set variables and to become the worker, which
imports it once more: half a second of CPU for each process. Here the interpreter becomes the worker at once. A worker
that is to have more than variables is left to Ray's script. A log monitor does nothing.
"""

import gc
import os
import sys
import time

SCRIPT = "ray/_private/workers/setup_worker.py"
LOG_MONITOR = "ray/_private/log_monitor.py"
"""Reads all logs of a cluster ten times a second, for drivers that print them; none of ours does."""
CONTEXT = "--serialized-runtime-env-context="
PYTHON = "--language=PYTHON"


def worker_of(words: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return command and variables of the worker that Ray's script makes of an interpreter with these arguments."""
    if len(words) < 2 or not words[1].endswith(SCRIPT) or PYTHON not in words:
        return None
    import json

    contexts = [word for word in words if word.startswith(CONTEXT)]
    asked = json.loads(contexts[0].removeprefix(CONTEXT)) if contexts else {}
    variables = asked.pop("env_vars", {})
    executable = asked.pop("py_executable", sys.executable)
    if len(contexts) > 1 or any(asked.values()) or any("$" in value for value in variables.values()):
        return None
    return [executable, *(word for word in words[2:] if word not in (*contexts, PYTHON))], variables


if (_worker := worker_of(sys.orig_argv)) is not None:
    os.execve(_worker[0][0], _worker[0], {**os.environ, **_worker[1]})

if any(word.endswith(LOG_MONITOR) for word in sys.orig_argv[1:3]):
    # Ray ends it with the cluster. Where nobody does, it ends with the process that started the cluster.
    _parent = os.getppid()
    while os.getppid() == _parent:
        time.sleep(1.0)
    os._exit(0)

gc.set_threshold(50_000)
