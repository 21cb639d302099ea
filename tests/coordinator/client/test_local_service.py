"""A service of a program's own: it says why it did not start, and ends with the program."""

import os
import signal

import pytest

from raycloak.coordinator.client.service_client import ServiceClient
from raycloak.metrics.service_errors import ServiceConnectionError
from tests.process_ends import has_ended

DEADLINE_S = 300
DIGITS = {"digits": {"dataset": {"kind": "digits", "public": True}}}


def test_settings_that_are_refused_are_named(tmp_path):
    with pytest.raises(ServiceConnectionError, match=r"^not_started: the service did not start: config: .*numworkers"):
        ServiceClient.local(datasets=DIGITS, run={"numworkers": 1}, base=tmp_path)


def test_it_serves_until_it_is_closed(tmp_path):
    with ServiceClient.local(datasets=DIGITS, base=tmp_path) as service:
        assert service.capabilities().datasets == ("digits",)
        pid = service._local._child.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_guarantee_it_ends_with_a_program_that_is_killed(run_python_in, tmp_path):
    code = f"""
import os, signal
from raycloak.coordinator.client.service_client import ServiceClient
service = ServiceClient.local(datasets={DIGITS!r})
print(service._local._child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_python_in(tmp_path)("-c", code, deadline_s=DEADLINE_S)
    assert done.code == -signal.SIGKILL, done.stderr
    assert has_ended(int(done.stdout), DEADLINE_S), "it ended by itself"
