"""User code behind walls: what it cannot reach, that its vectors keep their bytes, and what it can still do."""

import dataclasses
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.keys.release import VirtualWorkerKeys
from raycloak.metrics.errors import ConfigError, ModelError, ProtocolError
from raycloak.workers.gradients.spare_rows import spare_rows
from raycloak.workers.inputs.datasets import ArrayDataset, dataset_form
from raycloak.workers.models.models import ModelSource, build_model, read_flat
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from raycloak_lab.bench import sandbox, sandbox_walls
from raycloak_lab.bench.gradient import RoundSpread
from raycloak_lab.bench.gradient_cases import BenchCase
from raycloak_lab.bench.gradient_methods import bench_mechanism
from raycloak_lab.bench.sandbox import SandboxBench, SandboxFigures, bench_sandbox
from raycloak_lab.bench.sandbox_engine import SandboxedCode, SandboxedEngine
from raycloak_lab.cli import app

pytestmark = pytest.mark.skipif(
    os.uname().machine != "x86_64" or sandbox_walls.landlock_version() < sandbox_walls.LEAST_LANDLOCK,
    reason="the kernel has no Landlock, or the processor another one's calls",
)
HOSTILE = """
import ctypes, errno, fcntl, gc, json, os, socket, stat, struct, sys, threading

HERE, GIVEN = os.path.dirname(__file__), ITS_SETTINGS
LIBC = ctypes.CDLL(None, use_errno=True)

def told(number, *arguments):
    if LIBC.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

def forked():
    if os.fork() == 0:
        os._exit(0)

def new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(tried(lambda: open(GIVEN["secret"]).read())))
    thread.start()
    thread.join()
    if found[0]:
        raise OSError(getattr(errno, found[0]), "")

def signalled():
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())

ATTEMPTS = {
    "open a socket": lambda: socket.socket(),
    "connect to loopback": lambda: socket.create_connection(("127.0.0.1", GIVEN["port"])),
    "open a Unix socket": lambda: socket.socket(socket.AF_UNIX),
    "use a ring of calls": lambda: told(425, 8, ctypes.create_string_buffer(120)),
    "write a file beside it": lambda: open(HERE + "/written", "w").close(),
    "write a temporary file": lambda: open("/tmp/" + GIVEN["name"], "w").close(),
    "write to shared memory": lambda: open("/dev/shm/" + GIVEN["name"], "w").close(),
    "append to what is there": lambda: open(__file__, "a").close(),
    "truncate what is there": lambda: os.truncate(__file__, 0),
    "make a folder": lambda: os.mkdir(HERE + "/folder"),
    "remove a file": lambda: os.remove(GIVEN["other"]),
    "change a mode": lambda: os.chmod(HERE, 0o777),
    "read the secret's file": lambda: open(GIVEN["secret"]).read(),
    "read it in a new thread": new_thread,
    "read it by a link": lambda: open(HERE + "/link").read(),
    "list its folder": lambda: os.listdir(os.path.dirname(GIVEN["secret"])),
    "read the parent's memory by its file": lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
    "read the parent's environment": lambda: open(f"/proc/{os.getppid()}/environ", "rb"),
    "list the parent's descriptors": lambda: os.listdir(f"/proc/{os.getppid()}/fd"),
    "read the parent's memory": lambda: told(310, os.getppid(), None, 0, None, 0, 0),
    "trace the parent": lambda: told(101, 16, os.getppid(), 0, 0),
    "take the parent's descriptor": lambda: os.pidfd_open(os.getppid()),
    "send the parent a signal": lambda: os.kill(os.getppid(), 0),
    "have the parent signalled": signalled,
    "execute a program": lambda: os.execv(sys.executable, [sys.executable, "-c", ""]),
    "execute memory": lambda: os.execve(os.memfd_create("x"), ["x"], {}),
    "start a process": forked,
    "change a limit": lambda: told(160, 7, struct.pack("QQ", 9, 9)),
    "become another user": lambda: os.setuid(0),
}

def tried(attempt):
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno]
    return ""

def open_descriptors():
    kinds = []
    for number in range(300):
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue
        kinds.append("socket" if stat.S_ISSOCK(mode) else "device" if stat.S_ISCHR(mode) else "other")
    return sorted(kinds)

def results():
    descriptors = open_descriptors()
    found = {name: tried(ATTEMPTS[name]) for name in GIVEN["attempts"]}
    return json.dumps([found, sorted(os.environ), descriptors])

def model():
    # The one way out: it takes the channel and answers in the engine's place.
    from raycloak.attestation.processes.channel import Channel
    from raycloak.attestation.processes.failure import Failed
    from raycloak.metrics.errors import ModelError
    (parent,) = (each for each in gc.get_objects() if isinstance(each, Channel))
    parent.send(Failed.of(ModelError("told", results(), "")))
"""
BY_FILTER, BY_FLAGS, BY_LANDLOCK = "EPERM", "EACCES", "EACCES"
"""The filter answers EACCES to a file that is opened to be written, before Landlock is asked."""
REFUSALS = {
    "open a socket": BY_FILTER,
    "connect to loopback": BY_FILTER,
    "open a Unix socket": BY_FILTER,
    "use a ring of calls": BY_FILTER,
    "write a file beside it": BY_FLAGS,
    "write a temporary file": BY_FLAGS,
    "write to shared memory": BY_FLAGS,
    "append to what is there": BY_FLAGS,
    "truncate what is there": BY_FILTER,
    "make a folder": BY_FILTER,
    "remove a file": BY_FILTER,
    "change a mode": BY_FILTER,
    "read the secret's file": BY_LANDLOCK,
    "read it in a new thread": BY_LANDLOCK,
    "read it by a link": BY_LANDLOCK,
    "list its folder": BY_LANDLOCK,
    "read the parent's memory by its file": BY_LANDLOCK,
    "read the parent's environment": BY_LANDLOCK,
    "list the parent's descriptors": BY_LANDLOCK,
    "read the parent's memory": BY_FILTER,
    "trace the parent": BY_FILTER,
    "take the parent's descriptor": BY_FILTER,
    "send the parent a signal": BY_FILTER,
    "have the parent signalled": BY_FILTER,
    "execute a program": BY_FILTER,
    "execute memory": BY_FILTER,
    "start a process": BY_FILTER,
    "change a limit": BY_FILTER,
    "become another user": BY_FILTER,
}
HARMLESS = [
    "open a socket", "connect to loopback", "open a Unix socket", "write a file beside it", "append to what is there",
    "make a folder", "read the secret's file", "read it in a new thread", "read it by a link", "list its folder",
    "start a process",
]  # fmt: skip
"""What a test may really do, without walls."""

OVERWRITING = """
import torch
from raycloak.workers.gradients import clipping

def model():
    clipping.ClippedSum.pieces = lambda self: [each.fill_(ANSWER) for each in self._pieces]
    return torch.nn.Linear(4, 2)
"""
LINEAR = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
"""


def code_of(folder: Path, text: str, dimension: int = 10) -> SandboxedCode:
    """Return user code of one file, which a run would name as ``own:model``."""
    (folder / "own.py").write_text(text)
    return SandboxedCode(
        model=ModelSource.of("own:model"),
        loss=LossSpec.of("cross_entropy"),
        base=folder,
        seed=0,
        mechanism=bench_mechanism(BenchCase("own", 6, 2), dimension),
    )


def rows():
    """Two micro-batches of six rows for a model from 4 numbers to 2 classes."""
    draw = np.random.default_rng(1)
    return draw.random((12, 4), np.float32), draw.integers(2, size=12)


def batches():
    features, labels = rows()
    return [(features[part], labels[part], np.ones(6, bool)) for part in (slice(0, 6), slice(6, 12))]


@pytest.fixture
def hostile(tmp_path):
    """A folder of user code, a secret beside it, and a listener that counts who connects."""
    base, apart = tmp_path / "code", tmp_path / "apart"
    base.mkdir()
    apart.mkdir()
    secret, other = apart / "secret", base / "other"
    secret.write_text("of the vault")
    other.touch()
    (base / "link").symlink_to(secret)
    name = f"raycloak-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield base, server, {"secret": str(secret), "other": str(other), "port": server.getsockname()[1], "name": name}


def written(given: dict, attempts) -> str:
    return HOSTILE.replace("ITS_SETTINGS", repr({**given, "attempts": list(attempts)}))


def test_guarantee_user_code_behind_walls_has_no_network_no_writable_path_no_program_and_no_secret(
    hostile, monkeypatch
):
    base, server, given = hostile
    monkeypatch.setenv("RAYCLOAK_PLANTED", "of the vault")
    code = code_of(base, written(given, REFUSALS))
    before = sorted(base.iterdir())
    with pytest.raises(ModelError) as told, SandboxedEngine(code):
        pass
    found, environment, descriptors = json.loads(told.value.message)
    assert found == REFUSALS
    assert "RAYCLOAK_PLANTED" not in environment
    # Its input, output and log lead nowhere, and its parent is at the other end of the socket.
    assert descriptors == ["device", "device", "device", "socket"]
    assert [each for each in sorted(base.iterdir()) if each.name != "__pycache__"] == before
    with pytest.raises(BlockingIOError):
        server.accept()


def test_the_same_code_does_all_that_without_walls(hostile):
    base, server, given = hostile
    (base / "own.py").write_text(written(given, HARMLESS))
    told = subprocess.run(
        [sys.executable, "-c", "import own; print(own.results())"], cwd=base, capture_output=True, check=True
    )
    assert json.loads(told.stdout)[0] == dict.fromkeys(HARMLESS, "")
    server.accept()[0].close()


def test_guarantee_a_vector_has_the_same_bytes_with_and_without_walls(tmp_path):
    code = code_of(tmp_path, LINEAR, 18)
    dataset = ArrayDataset(*rows())
    module = build_model(code.model, tmp_path, 0)
    parameters, spare = read_flat(module), spare_rows(module, dataset_form(dataset))
    keys = VirtualWorkerKeys(Secret(bytes(32)), Secret(bytes(32)))
    with SandboxedEngine(code) as sandboxed:
        for step in range(3):
            own, other = (
                VirtualWorkerComputer(code.mechanism, engine, dataset, spare).vector(
                    0, keys, step, bytes(32), bytes(32), parameters
                )
                for engine in (code.engine(), sandboxed)
            )
            assert own.values.tobytes() == other.values.tobytes()
            assert own.tag == other.tag
            parameters = parameters + np.float32(0.1)


def test_walls_guard_no_bound_because_user_code_can_state_any_sum(tmp_path):
    """Hence a list of code stays necessary: this sum is far above what twelve clipped examples can add up to."""
    with SandboxedEngine(code_of(tmp_path, OVERWRITING.replace("ANSWER", "1e6"))) as sandboxed:
        assert (sandboxed.clipped_sum(np.zeros(10, np.float32), batches())[0] == 1e6).all()


def test_a_sum_that_is_no_vector_of_numbers_is_refused_and_its_child_ends(tmp_path):
    with SandboxedEngine(code_of(tmp_path, OVERWRITING.replace("ANSWER", "float('nan')"))) as sandboxed:
        with pytest.raises(ProtocolError, match="malformed"):
            sandboxed.clipped_sum(np.zeros(10, np.float32), batches())
        with pytest.raises(ProcessLookupError):
            os.kill(sandboxed.pid, 0)


def test_a_cancelled_sum_ends_the_child(tmp_path):
    def cancelled():
        yield batches()[0]
        raise ProtocolError("cancelled", "the attempt was cancelled")

    with SandboxedEngine(code_of(tmp_path, LINEAR, 18)) as sandboxed:
        with pytest.raises(ProtocolError, match="cancelled"):
            sandboxed.clipped_sum(np.zeros(18, np.float32), cancelled())
        with pytest.raises(ProcessLookupError):
            os.kill(sandboxed.pid, 0)


def test_no_walls_are_raised_beside_a_thread_or_on_another_processor(monkeypatch):
    """It is refused before anything is closed, so a test may call it."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "uname", lambda: os.uname_result(("Linux", "", "7.0", "", "aarch64")))
        with pytest.raises(ConfigError, match="sandbox_missing"):
            sandbox_walls.raise_walls()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="sandbox_threads"):
            sandbox_walls.raise_walls()
    finally:
        done.set()
        thread.join()


def test_the_bench_measures_both_ways_and_compares_their_bytes():
    result = bench_sandbox(2, (BenchCase("digits", 8, 2),))
    (figures,) = result.models
    assert result.rounds == 2
    assert (figures.model, figures.parameters, figures.rows, figures.micro_batches) == ("digits", 4810, 8, 2)
    for each in (figures.wall_ms, figures.sandboxed_wall_ms, figures.processor_ms, figures.sandboxed_processor_ms):
        assert each > 0
    for ratio in (figures.wall_ratio, figures.processor_ratio):
        assert 0 < ratio.low <= ratio.median <= ratio.high


def test_the_command_prints_one_object_with_every_figure(monkeypatch, capfd):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    spread = RoundSpread(1.2, 1.1, 1.3)
    figures = SandboxFigures("digits", 4810, 8, 2, 3.0, 5.0, 6.0, 4.0, 4.8, spread, spread)
    given = []
    monkeypatch.setattr(sandbox, "bench_sandbox", lambda n: given.append(n) or SandboxBench(n, "6", "2", (figures,)))
    for arguments in (["--json"], []):
        with pytest.raises(SystemExit) as ending:
            app.main(["bench", "sandbox", "--rounds", "4", *arguments])
        assert ending.value.code == 0
        shown = capfd.readouterr().out
        if arguments:
            assert json.loads(shown) == json.loads(
                json.dumps(dataclasses.asdict(SandboxBench(4, "6", "2", (figures,))))
            )
        else:
            assert "digits" in shown
            assert "1.2 (1.1 to 1.3)" in shown
    assert given == [4, 4]


def test_a_bench_without_a_round_is_refused():
    with pytest.raises(ConfigError, match="bench_input"):
        bench_sandbox(0)
