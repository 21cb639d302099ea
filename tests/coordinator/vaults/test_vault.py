"""A vault in a process of its own: what it answers, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from raycloak.attestation.attester.attester import CpuEvidence
from raycloak.attestation.core.messages import parse
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.vaults.calls import ActorRefusal, Wire
from raycloak.coordinator.vaults.vault import Vault, VaultLost, child
from raycloak.metrics.errors import EvidenceError
from tests.attestation.serving import eventually
from tests.coordinator.vaults.targets import Example, ExampleOpening

TARGET = f"{Example.__module__}:Example"


class Platform:
    """A simulated platform at the relay's end."""

    def collect(self, report_data: bytes) -> CpuEvidence:
        if report_data[:1] == b"x":
            raise EvidenceError("platform_not_ready", "it has no certificate yet")
        return CpuEvidence(b"quote of " + report_data)


class Running:
    """A vault, and calls to it by method."""

    def __init__(self, text: str = "a", source: Platform | None = None) -> None:
        self.lost: list[Exception] = []
        self.vault = Vault(partial(child, TARGET), ExampleOpening(text=text), source, self.lost.append)

    def ask(self, method, *args, returns=1, **options):
        wire = Wire.of(method)
        frames = wire.write_call(wire.positional(args, {}))
        answers = self.vault.call(method.__name__, returns, frames, **options)
        read = tuple(wire.read_answer(index, each) for index, each in enumerate(answers))
        return read if returns > 1 else read[0]

    def refusal(self, method, *args):
        with pytest.raises(ActorRefusal) as refused:
            self.ask(method, *args)
        return parse(Failed, refused.value.args[0]).raised()

    def close(self) -> None:
        if not self.lost:
            os.kill(self.vault.pid, signal.SIGKILL)
            eventually(lambda: self.lost)


@pytest.fixture(scope="module")
def running():
    with_platform = Running(source=Platform())
    yield with_platform
    with_platform.close()


@pytest.fixture
def fresh():
    """Yield a vault in which nobody has asked for the view yet."""
    made = Running()
    yield made
    made.close()


def test_values_arrays_and_states_come_and_go_as_they_were(running):
    assert running.ask(Example.text) == "a"
    array = np.arange(5.0)
    doubled, count = running.ask(Example.twice, array, {"a": np.zeros(2), "b": np.zeros((2, 0))}, returns=2)
    assert doubled.tolist() == (2 * array).tolist()
    assert count == 2
    # More than the kernel passes descriptors at once, as an aggregator of a thousand workers gets.
    many = running.ask(Example.many, *(np.full(3, index, np.uint32) for index in range(1024)))
    assert many.tolist() == np.repeat(np.arange(1024), 3).tolist()


def test_a_call_beside_is_answered_while_another_one_runs(fresh):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fresh.ask, Example.wait)
        beside = fresh.ask(Example.view, beside=True)
        assert waiting.result(120) == "released"
    assert beside != fresh.ask(Example.view), "in a thread of its own"


def test_a_call_that_nobody_waits_for_is_told_so_and_the_next_one_is_not(fresh):
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fresh.ask, Example.wait, is_cancelled=cancelled.is_set)
        assert not waiting.done()
        cancelled.set()
        assert waiting.result(120) == "cancelled"
        waiting = pool.submit(fresh.ask, Example.wait)
        fresh.ask(Example.view, beside=True)
        assert waiting.result(120) == "released"


@pytest.mark.parametrize("asked_again", [True, False])
def test_a_vault_that_can_answer_no_further_call_answers_the_last_and_ends(fresh, asked_again):
    assert fresh.ask(Example.text) == "a"
    assert fresh.ask(Example.spoil) == "spoiled"
    if asked_again:
        with pytest.raises(VaultLost):
            fresh.ask(Example.text)
    eventually(lambda: fresh.lost)


def test_it_is_told_that_its_machine_is_about_to_end_it(fresh):
    assert fresh.ask(Example.leaving) is False
    fresh.vault.leave()
    eventually(lambda: fresh.ask(Example.leaving))


def test_a_refusal_arrives_whole_and_a_defect_by_its_type_alone(running):
    refused = running.refusal(Example.refuse)
    assert (type(refused).__name__, refused.code, refused.remedy) == ("BudgetError", "exhausted", "Ask for more.")
    failed = running.refusal(Example.fail)
    assert failed.code == "actor_error"
    assert "ValueError" in str(failed)
    assert "planted-text" not in str(failed)
    with pytest.raises(MemoryError):
        running.ask(Example.out_of_memory)
    assert running.ask(Example.text) == "a", "it goes on after all of them"


def test_a_call_of_no_method_is_refused(running):
    with pytest.raises(ActorRefusal):
        running.vault.call("_private", 1, ())
    with pytest.raises(ActorRefusal):
        running.vault.call("text", 1, (b"{}", b"more"))


@pytest.mark.parametrize(("text", "code"), [("refused", "no_place"), ("defect", "actor_error")])
def test_a_vault_that_cannot_be_opened_says_why_to_every_call(text, code):
    running = Running(text)
    for _ in range(2):
        refused = running.refusal(Example.text)
        assert refused.code == code
        assert "planted-text" not in str(refused)
    running.close()


def test_simulated_evidence_comes_through_the_relay_and_other_evidence_does_not(running):
    assert running.ask(Example.quote, True) == b"quote of " + b"r" * 64
    guest = running.refusal(Example.quote, False)
    assert guest.code == "tee_unavailable"
    bare = Running()
    assert bare.refusal(Example.quote, True).code == "malformed", "this relay has no platform"
    bare.close()


def test_guarantee_a_vault_closes_its_memory_as_it_starts(running):
    assert running.ask(Example.is_private) is True


def test_modules_are_found_as_in_the_relay_and_not_in_the_folder_that_it_works_in(running):
    assert running.ask(Example.found, "PYTHONSAFEPATH") == "1"
    assert running.ask(Example.found, "PYTHONPATH") == os.pathsep.join(each or str(Path.cwd()) for each in sys.path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_vault_that_ends_fails_the_call_under_way_and_all_that_come(number):
    running = Running()
    with pytest.raises(VaultLost, match=f"signal {number.value}"):
        running.ask(Example.end, number.value)
    assert list(map(type, running.lost)) == [VaultLost]
    with pytest.raises(VaultLost):
        running.ask(Example.text)


def test_a_vault_that_the_kernel_killed_for_its_memory_is_told_as_such(monkeypatch):
    running = Running()
    # The kernel counts those that it killed; here another process is killed in its stead.
    monkeypatch.setattr("raycloak.attestation.processes.program._killed_for_memory", lambda: 10**6)
    with pytest.raises(MemoryError):
        running.ask(Example.end, signal.SIGKILL.value)
    assert list(map(type, running.lost)) == [MemoryError]
    with pytest.raises(MemoryError):
        running.ask(Example.text)


RELAY = f"""
import os, signal, sys
from functools import partial
from raycloak.coordinator.vaults.vault import Vault, child
from tests.coordinator.vaults.targets import ExampleOpening
vault = Vault(partial(child, {TARGET!r}), ExampleOpening(text="a"), None, print)
vault.call("text", 1, (b"{{}}",))
print(vault.pid, flush=True)
if sys.argv[1] == "stopped":
    os.kill(vault.pid, signal.SIGSTOP)
signal.pause()
"""


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["running", "stopped"])
def test_guarantee_no_vault_outlives_its_relay(how):
    with subprocess.Popen([sys.executable, "-c", RELAY, how], stdout=subprocess.PIPE, text=True) as relay:
        pid = int(relay.stdout.readline())
        assert _runs(pid)
        relay.kill()
        eventually(lambda: not _runs(pid))
