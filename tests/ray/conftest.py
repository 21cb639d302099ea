"""The head of a cluster as an operator starts it, for the tests that need its dashboard."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE_S = 900


@dataclass(frozen=True)
class Head:
    """A head of 6 CPUs with token authentication.

    Attributes:
        dashboard: its URL.
        address: of the control store, for ``RAY_ADDRESS``.
        environment: the variables of a program that joins it, without the address.
    """

    dashboard: str
    address: str
    environment: Mapping[str, str]


@pytest.fixture
def head(ray_environment: Mapping[str, str], tmp_path: Path) -> Iterator[Head]:
    """Start a head by `ray start`."""
    control, dashboard, agent, grpc, metrics, client = _free_ports(6)
    bin_folder = Path(sys.executable).parent
    environment = os.environ | ray_environment | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    command = [
        str(bin_folder / "ray"), "start", "--head", "--block", f"--port={control}", "--num-cpus=6",
        "--disable-usage-stats", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={grpc}", f"--metrics-export-port={metrics}",
        f"--ray-client-server-port={client}", "--object-store-memory=268435456", "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    with (tmp_path / "head.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_served(f"http://127.0.0.1:{dashboard}/api/version", process)
        # The dashboard refuses a job whose agent is not there within ten seconds, and starts long before it.
        _wait_until_served(f"http://127.0.0.1:{agent}/api/healthz", process)
        yield Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{control}", environment)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=DEADLINE_S)


def _free_ports(count: int) -> list[int]:
    """Return ports that are free, and that nobody gets by chance until Ray binds them seconds later.

    Linux gives connections and listeners that name no port one above 32767. Ray's workers have those from 10002 to
    19999.
    """
    ports = []
    for port in random.sample(range(20_000, 32_768), 200):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            ports.append(port)
    return ports[:count]


def _wait_until_served(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert process.poll() is None, "the head ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:
            return  # it answers, and asks for the token
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"{url} did not come up")
