"""The command for a worker that `tests/quick_start` makes of Ray's."""

import sys
from pathlib import Path

import pytest
from ray._private import log_monitor
from ray._private.ray_constants import SETUP_WORKER_FILENAME
from ray._private.runtime_env.context import RuntimeEnvContext

from tests.quick_start.sitecustomize import CONTEXT, LOG_MONITOR, PYTHON, SCRIPT, worker_of

WORKER = ["default_worker.py", "--node-ip-address=127.0.0.1", "--runtime-env-hash=7"]


def command(**context):
    """Return the command that the raylet runs for a worker of this environment."""
    first, *options = WORKER
    asked = RuntimeEnvContext(**context).serialize()
    return [sys.executable, f"/site/{SCRIPT}", first, PYTHON, *options, f"{CONTEXT}{asked}"]


def test_a_worker_with_variables_is_started_at_once():
    variables = {"CUDA_VISIBLE_DEVICES": "", "ATEN_CPU_CAPABILITY": "default"}
    assert worker_of(command(env_vars=variables)) == ([sys.executable, *WORKER], variables)
    assert worker_of(command()) == ([sys.executable, *WORKER], {})
    assert worker_of(command(py_executable="/usr/bin/python"))[0][0] == "/usr/bin/python"
    assert SCRIPT.endswith(SETUP_WORKER_FILENAME)


@pytest.mark.parametrize(
    "context",
    [
        {"env_vars": {"PATH": "${HOME}/bin"}},
        {"command_prefix": ["cd /somewhere", "&&"]},
        {"override_worker_entrypoint": "other.py"},
        {"java_jars": ["a.jar"]},
    ],
    ids=str,
)
def test_one_that_needs_more_is_left_to_ray(context):
    assert worker_of(command(**context)) is None


def test_rays_log_monitor_is_where_it_was():
    assert Path(log_monitor.__file__).as_posix().endswith(LOG_MONITOR)


@pytest.mark.parametrize("words", [["python"], ["python", "-c", "pass"], ["python", f"/site/{SCRIPT}"]], ids=str)
def test_another_process_is_left_alone(words):
    assert worker_of(words) is None
