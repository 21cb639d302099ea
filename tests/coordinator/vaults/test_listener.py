"""The listener at a machine's socket: whom it takes, and how long a vault lives."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from raycloak.attestation.core.private_memory import NO_GPU_CORE_DUMPS
from raycloak.attestation.processes.channel import Channel
from raycloak.coordinator.vaults import hosted
from raycloak.coordinator.vaults import listener as listeners_module
from raycloak.coordinator.vaults.machine_socket import Seat
from raycloak.coordinator.vaults.machine_vault import MachineVault
from raycloak.coordinator.vaults.openings import LedgerOpening, OrchestratorOpening, PlatformOpening, VaultStart
from raycloak.coordinator.vaults.platform_vault import PlatformVault
from raycloak.coordinator.vaults.run_orchestrator import RunOrchestrator
from raycloak.coordinator.vaults.vault import Vault
from raycloak.metrics.errors import ConfigError, ProtocolError, RefusedError, RunFailedError
from raycloak.workers.gradients.environment import CHOSEN, FIXED, worker_environment
from tests.attestation.serving import eventually
from tests.coordinator.vaults.listeners import (
    STRANGER,
    connected,
    connected_as,
    listening,
    needs_root,
    platform,
    refusing,
    said,
    stop,
    unshare_missing,
    vaults,
    written,
)
from tests.process_ends import has_ended

START = VaultStart(variables={})
DEADLINE_S = 120.0


def asked(path: Path) -> MachineVault:
    return MachineVault(str(path), PlatformOpening())


def opened(path: Path) -> tuple[MachineVault, int]:
    """Return a vault that has answered, and its process."""
    before = vaults()
    vault = asked(path)
    vault.ask(PlatformVault.root)
    (pid,) = vaults() - before
    return vault, pid


# --- who is taken


@needs_root
def test_guarantee_a_vault_is_started_for_a_process_of_the_peers_user_alone(tmp_path):
    with platform(tmp_path) as listener:
        with refusing(connected_as(STRANGER, listener.path), RefusedError, "vault_peer") as said_why:
            assert f"user {STRANGER} asks for a vault of user {os.getuid()}" in said_why
        assert vaults() == set()
        with asked(listener.path) as vault:
            vault.ask(PlatformVault.root)


@needs_root
def test_a_peer_of_another_user_is_served_and_the_vaults_own_user_is_not(tmp_path):
    with platform(tmp_path, peer=str(STRANGER)) as listener:
        channel = said(connected_as(STRANGER, listener.path), START, PlatformOpening())
        eventually(lambda: len(vaults()) == 1)
        with pytest.raises(RefusedError, match="vault_peer"), asked(listener.path) as vault:
            vault.ask(PlatformVault.root)
        channel.close()
        eventually(lambda: not vaults())


@pytest.mark.skipif(unshare_missing() is not None, reason=str(unshare_missing()))
def test_guarantee_a_peer_of_another_user_namespace_is_refused_whatever_the_settings_name(tmp_path):
    """In a namespace without any user, everybody is the user that the kernel shows for those without a name."""
    overflow = Path("/proc/sys/kernel/overflowuid").read_text().strip()
    file = written(tmp_path, "platform", peer=overflow, state=str(tmp_path / "vendor"), vaults=[])
    command = ["unshare", "--user", sys.executable, "-m", "raycloak", "vault", "platform", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as listener:
        try:
            assert listener.stdout is not None
            listener.stdout.readline()
            with pytest.raises(RefusedError, match=r"vault_peer.*user namespace"):
                asked(tmp_path / "platform.sock").ask(PlatformVault.root)
        finally:
            listener.kill()


# --- seats


def test_more_sessions_than_seats_wait_and_are_then_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(listeners_module, "_SEAT_S", 0.2)
    with platform(tmp_path) as listener:
        vault, pid = opened(listener.path)
        with pytest.raises(ProtocolError, match=r"vault_busy.*1 vaults of the platform"):
            asked(listener.path).ask(PlatformVault.root)
        assert vaults() == {pid}
        vault.close()


def test_a_seat_that_is_freed_is_taken_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(listeners_module, "_SEAT_S", DEADLINE_S)
    with platform(tmp_path) as listener:
        vault, pid = opened(listener.path)
        with ThreadPoolExecutor(1) as pool, asked(listener.path) as second:
            waiting = pool.submit(second.ask, PlatformVault.root)
            assert vaults() == {pid}
            assert not waiting.done()
            vault.close()
            waiting.result(DEADLINE_S)
            assert vaults().isdisjoint({pid})


def test_guarantee_each_seat_has_a_process_of_its_own_and_each_session_a_fresh_one(tmp_path):
    with platform(tmp_path, sessions=2) as listener:
        (one, first), (two, second) = opened(listener.path), opened(listener.path)
        assert first != second
        one.close()
        assert has_ended(first, DEADLINE_S)
        again, third = opened(listener.path)
        assert third not in (first, second)
        two.close()
        again.close()


def test_a_session_knows_nothing_of_the_former_one(tmp_path):
    with listening(tmp_path, "orchestrator", state=str(tmp_path / "state"), policies=[]) as listener:
        opening = OrchestratorOpening(state_directory="", bind=None, simulated=False)
        with MachineVault(str(listener.path), opening) as vault:
            vault.ask(RunOrchestrator.open_run, None)
            assert vault.ask(RunOrchestrator.revocations) == 0
        with MachineVault(str(listener.path), opening) as vault, pytest.raises(RunFailedError, match="AssertionError"):
            vault.ask(RunOrchestrator.revocations)


@needs_root
def test_the_settings_say_which_gpu_the_vault_of_a_seat_sees(tmp_path):
    """Root reads the environment that the kernel started a process with."""
    terms = {"ledgers": [], "policies": [], "code": [], "data": []}
    with listening(tmp_path, "worker", sessions=2, devices=[3, 5], **terms) as listener:
        channels = [connected(listener.path) for _ in range(2)]
        eventually(lambda: len(vaults()) == 2)
        eventually(lambda: sorted(map(visible_gpus, vaults())) == ["3", "5"])
        for each in channels:
            each.close()
    with listening(tmp_path, "worker", **terms) as listener:
        channel = connected(listener.path)
        eventually(lambda: len(vaults()) == 1)
        eventually(lambda: list(map(visible_gpus, vaults())) == [""])
        channel.close()


def visible_gpus(pid: int) -> str | None:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [each.partition(b"=")[2].decode() for each in variables if each.startswith(b"CUDA_VISIBLE_DEVICES=")]
    return found[0] if found else None


# --- ends


@pytest.mark.parametrize("stopped", [False, True])
def test_guarantee_a_vault_is_killed_once_its_relay_is_gone_even_if_it_is_stopped(tmp_path, stopped):
    with platform(tmp_path) as listener:
        vault, pid = opened(listener.path)
        if stopped:
            stop(pid)
        vault.close()
        assert has_ended(pid, DEADLINE_S)
        opened(listener.path)[0].close()


LISTENER = """
import sys
from pathlib import Path
from raycloak.coordinator.vaults.listener import Listener
from raycloak.coordinator.vaults.settings import read_settings
listener = Listener("platform", read_settings("platform", Path(sys.argv[1])), Path(sys.argv[1]))
print("ready", flush=True)
listener.run()
"""


@contextmanager
def elsewhere(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Listen in a process of its own; yields that, and the socket."""
    file = written(folder, "platform", state=str(folder / "vendor"), vaults=[])
    with subprocess.Popen([sys.executable, "-c", LISTENER, str(file)], stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            yield program, folder / "platform.sock"
        finally:
            program.kill()


def test_guarantee_no_vault_outlives_its_listener_even_if_it_is_stopped(tmp_path):
    with elsewhere(tmp_path) as (program, path), asked(path) as vault:
        vault.ask(PlatformVault.root)
        (pid,) = vaults(program.pid)
        stop(pid)
        program.kill()
        assert has_ended(pid, DEADLINE_S)


def test_a_vault_that_the_kernel_killed_for_its_memory_is_told_as_such(tmp_path, monkeypatch):
    with platform(tmp_path) as listener:
        lost: list[Exception] = []
        vault = Vault(partial(Seat, str(listener.path)), PlatformOpening(), None, lost.append)
        vault.call("opened", 1, (b"{}",))
        (pid,) = vaults()
        # The kernel counts those that it killed; here another process kills in its stead.
        monkeypatch.setattr("raycloak.attestation.processes.program._killed_for_memory", lambda: 10**6)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: bool(lost))
        assert isinstance(lost[0], MemoryError)
        with pytest.raises(MemoryError):
            vault.call("opened", 1, (b"{}",))


def test_a_vault_that_ends_by_itself_is_lost_and_frees_its_seat(tmp_path):
    with platform(tmp_path) as listener:
        vault, pid = opened(listener.path)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunFailedError, match="vault_lost"):
            vault.ask(PlatformVault.root)
        opened(listener.path)[0].close()


# --- the socket


def test_a_second_listener_at_a_socket_in_use_is_refused_and_the_first_goes_on(tmp_path):
    with platform(tmp_path) as listener:
        with pytest.raises(ConfigError, match="vault_socket"), platform(tmp_path):
            pass
        opened(listener.path)[0].close()
    assert not listener.path.exists()


def test_a_socket_is_in_use_even_if_it_has_no_room_for_one_more_connection(tmp_path):
    busy = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    busy.bind(str(tmp_path / "platform.sock"))
    busy.listen(0)
    waiting = connected(tmp_path / "platform.sock")
    with pytest.raises(ConfigError, match="vault_socket"), platform(tmp_path):
        pass
    assert (tmp_path / "platform.sock").is_socket()
    waiting.close()
    busy.close()


def test_the_socket_of_a_listener_that_was_killed_is_replaced_and_another_file_is_not(tmp_path):
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(tmp_path / "platform.sock"))
    stale.close()
    with platform(tmp_path) as listener:
        opened(listener.path)[0].close()
    (tmp_path / "platform.sock").write_text("notes")
    with pytest.raises(ConfigError, match="vault_socket"), platform(tmp_path):
        pass
    assert (tmp_path / "platform.sock").read_text() == "notes"


def test_the_socket_goes_before_it_stops_to_listen_so_that_a_successor_keeps_its_own(tmp_path, monkeypatch):
    order = []
    with platform(tmp_path):
        unlink = Path.unlink
        monkeypatch.setattr(Path, "unlink", lambda path, **how: (order.append(tried(path)), unlink(path, **how)))
    assert order == ["listens"]


def tried(path: Path) -> str:
    """Return whether somebody listens at a socket."""
    try:
        connected(path).close()
    except OSError:
        return "refuses"
    return "listens"


def test_want_of_descriptors_refuses_a_connection_and_does_not_end_the_listener(tmp_path):
    with elsewhere(tmp_path) as (program, path):
        allowed = resource.prlimit(program.pid, resource.RLIMIT_NOFILE)
        used = len(list(Path(f"/proc/{program.pid}/fd").iterdir()))
        # Room for a connection, and not for the pipe of a process that starts.
        resource.prlimit(program.pid, resource.RLIMIT_NOFILE, (used + 1, allowed[1]))
        with refusing(connected(path), ConfigError, "vault_start"):
            pass
        # No room for a connection.
        resource.prlimit(program.pid, resource.RLIMIT_NOFILE, (used, allowed[1]))
        for _ in range(8):
            connected(path).close()
        resource.prlimit(program.pid, resource.RLIMIT_NOFILE, allowed)
        with asked(path) as vault:
            vault.ask(PlatformVault.root)


# --- first words


def test_settings_that_became_bad_after_the_start_are_told_by_name(tmp_path):
    with platform(tmp_path) as listener:
        opened(listener.path)[0].close()
        (tmp_path / "platform.yaml").chmod(0o666)
        with pytest.raises(ConfigError, match=r"vault_settings.*others"):
            asked(listener.path).ask(PlatformVault.root)
        (tmp_path / "platform.yaml").chmod(0o644)
        opened(listener.path)[0].close()


@pytest.mark.parametrize(
    "words",
    [
        (PlatformOpening(),),
        (VaultStart(variables={"LD_PRELOAD": "/tmp/own.so"}),),
        (VaultStart(variables={"PYTHONPATH": "/tmp"}),),
        *((VaultStart(variables={name: "1"}),) for name in FIXED),
        (START, LedgerOpening(url="", create=False, witness=None)),
        (START, START),
    ],
)
def test_other_first_words_than_a_start_and_an_opening_are_refused_by_name(tmp_path, words):
    with platform(tmp_path) as listener:
        channel = said(connected(listener.path), *words)
        with refusing(channel, ProtocolError, "malformed"):
            pass
        opened(listener.path)[0].close()


@pytest.mark.parametrize("words", [(), (START,)])
def test_a_relay_that_says_nothing_holds_no_vault(tmp_path, monkeypatch, words):
    monkeypatch.setattr(hosted, "START_S", 0.1)
    for each in FIXED:
        monkeypatch.setenv(each, "1")  # so that they are put back
    file = written(tmp_path, "platform", state=str(tmp_path / "vendor"), vaults=[])
    ours, its = map(Channel, socket.socketpair())
    said(ours, *words)
    hosted.serve_machine(its, "platform", str(file))
    with refusing(ours, ProtocolError, "vault_silent"):
        pass
    its.close()


def test_a_vault_on_a_cpu_without_the_instructions_of_the_run_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(hosted, "own_flags", lambda: ["avx2", "fma"])
    held = worker_environment("avx512")
    for each in held:
        monkeypatch.setenv(each, "1")
    ours, its = map(Channel, socket.socketpair())
    said(ours, VaultStart(variables={name: held[name] for name in held if name in CHOSEN}))
    hosted.serve(its, "not:imported")
    with refusing(ours, ConfigError, "cpu_capability"):
        pass
    its.close()


def test_a_vault_sets_itself_what_no_run_chooses(tmp_path, monkeypatch):
    """That a GPU writes its memory to a file, for one, or that products lose bits."""
    assert NO_GPU_CORE_DUMPS.items() <= FIXED.items()
    assert not FIXED.keys() & CHOSEN
    monkeypatch.setattr(hosted, "START_S", 0.1)
    for each in FIXED:
        monkeypatch.setenv(each, "1")
    ours, its = map(Channel, socket.socketpair())
    said(ours, START)
    file = written(tmp_path, "platform", state=str(tmp_path / "vendor"), vaults=[])
    hosted.serve_machine(its, "platform", str(file))
    assert {each: os.environ[each] for each in FIXED} == FIXED
    ours.close()
    its.close()
