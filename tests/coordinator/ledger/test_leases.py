"""At most one of two live instances of a ledger is believed for a run; real processes, stopped and woken up."""

import io
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raycloak.attestation.core.messages import Envelope
from raycloak.coordinator.cli.budget import accounts_view
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.receipt import Receipt, check_receipt
from tests.coordinator.ledger import ledger_instance
from tests.coordinator.ledger.ledger_cases import CAP, DELTA, MANIFEST, PARAMETERS, expected_epsilon, mechanism

# Forked from a process that has imported what an instance needs.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([ledger_instance.__name__])
DEADLINE_S = 120.0


class Instance:
    """A process that holds the ledger open."""

    def __init__(self, url: str, deadline_s: float) -> None:
        self._channel, its = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=ledger_instance.serve, args=(its, url, deadline_s))
        self.process.start()
        its.close()
        self.fencing = self.answer()["fencing"]

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, order: str) -> None:
        """Give an order without waiting."""
        self._channel.send(order)

    def answer(self) -> dict[str, Any]:
        """Return the next answer."""
        return self._channel.recv()

    def ask(self, line: str) -> dict[str, Any]:
        """Give an order and wait for its answer."""
        self.tell(line)
        return self.answer()

    def stop(self) -> None:
        """Send SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)
        self.await_stop()

    def await_stop(self) -> None:
        """Wait until the process is stopped."""
        end = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end
            time.sleep(0.01)

    def wake(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self.process.kill()
        self.process.join()
        self._channel.close()


@pytest.fixture
def reader(ledger_url: str) -> Iterator[PrivacyLedger]:
    """Yield an account with a ledger that only this test's process looks at."""
    ledger = PrivacyLedger(ledger_url)
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    yield ledger
    ledger.close()


@pytest.fixture
def instance(ledger_url: str, reader: PrivacyLedger) -> Iterator[Callable[..., Instance]]:
    """Start processes that hold the ledger open, and end them."""
    started: list[Instance] = []

    def start(deadline_s: float = 30.0) -> Instance:
        started.append(Instance(ledger_url, deadline_s))
        return started[-1]

    yield start
    for each in started:
        each.end()


def believed(reader: PrivacyLedger, answer: dict[str, Any], step: int, lowest_fencing: int = 0) -> Receipt:
    """Return the receipt in an answer as a worker checks it that has seen ``lowest_fencing``."""
    return check_receipt(
        Envelope(body=bytes.fromhex(answer["body"]), signature=bytes.fromhex(answer["signature"])),
        ledger_key=reader.public_key,
        run_id="run-a",
        step=step,
        input_digest=PARAMETERS,
        manifest_digest=MANIFEST,
        account="patients",
        mechanism_digest=mechanism().digest(),
        lowest_fencing=lowest_fencing,
    )


def lease_of(reader: PrivacyLedger, run: int = 0) -> tuple[int, str]:
    lease = reader.view().accounts[0].runs[run].lease
    assert lease is not None
    assert lease.opened_at <= lease.renewed_at
    return lease.fencing, lease.holder


def shown(reader: PrivacyLedger) -> str:
    """Return what `raycloak budget show` prints."""
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(accounts_view(reader.view().accounts))
    return console.export_text()


def test_an_instance_that_was_paused_and_replaced_is_believed_by_nobody(
    instance: Callable[..., Instance], reader: PrivacyLedger
):
    paused = instance()
    paused.ask("register run-a")
    first = paused.ask("charge run-a 0")
    assert believed(reader, first, 0).fencing == paused.fencing
    assert lease_of(reader) == (paused.fencing, f"{socket.gethostname()}/{paused.pid}")
    paused.stop()
    paused.tell("charge run-a 2")

    second = instance()
    assert second.fencing > paused.fencing
    again = believed(reader, second.ask("charge run-a 0"), 0)
    # There is one charge, no matter who shows its receipt: no two instances can let a step go on from different
    # parameters.
    assert again == believed(reader, first, 0).model_copy(update={"fencing": second.fencing})
    second.ask("charge run-a 1")

    paused.wake()
    assert paused.answer() == {"refused": "fenced"}
    for order in ("charge run-a 0", "charge run-a 1", "register run-a"):
        assert paused.ask(order) == {"refused": "fenced"}
    with pytest.raises(ProtocolError, match="receipt_fenced"):
        believed(reader, first, 0, lowest_fencing=again.fencing)
    assert lease_of(reader) == (second.fencing, f"{socket.gethostname()}/{second.pid}")
    assert f"instance {second.fencing}, {socket.gethostname()}/{second.pid}," in shown(reader)
    assert believed(reader, second.ask("charge run-a 2"), 2, again.fencing).charged_epsilon == pytest.approx(
        expected_epsilon(3)
    )
    assert sorted(reader.verify().runs["run-a"].charges["gradient"]) == [0, 1, 2]


def test_instances_that_live_side_by_side_hold_runs_of_their_own(
    instance: Callable[..., Instance], reader: PrivacyLedger
):
    one, other = instance(), instance()
    one.ask("register run-a")
    other.ask("register run-b")
    for step in range(3):
        # Both at once, so that they meet at the lock.
        one.tell(f"charge run-a {step}")
        other.tell(f"charge run-b {step}")
        assert "body" in one.answer()
        assert "body" in other.answer()
    assert [lease_of(reader, run)[0] for run in (0, 1)] == [one.fencing, other.fencing]
    # The older one takes nothing from the newer one; the newer one takes what it is asked to.
    assert one.ask("charge run-b 3") == {"refused": "fenced"}
    assert "body" in other.ask("charge run-a 3")
    assert one.ask("charge run-a 4") == {"refused": "fenced"}
    assert reader.view().accounts[0].spent_epsilon == pytest.approx(expected_epsilon(7))
    reader.verify()


def test_an_instance_that_is_paused_inside_its_transaction_leaves_no_half(
    instance: Callable[..., Instance], reader: PrivacyLedger, ledger_url: str
):
    """A server takes the lock from who does nothing. A file's lock ends with its holder, who first finishes."""
    paused = instance()
    other = instance(deadline_s=0.5 if ledger_url.startswith("sqlite") else 30.0)
    paused.ask("register run-a")
    paused.tell("stop run-a 2")
    paused.await_stop()
    if ledger_url.startswith("sqlite"):
        assert other.ask("charge run-a 0") == {"refused": "ledger_unavailable"}
        paused.wake()
        assert paused.answer() == {}
        assert "body" in other.ask("charge run-a 0")
    else:
        assert "body" in other.ask("charge run-a 0")
        paused.wake()
        assert paused.answer() == {"refused": "ledger_unavailable"}
    assert paused.ask("charge run-a 1") == {"refused": "fenced"}
    assert lease_of(reader)[0] == other.fencing
    assert reader.view().accounts[0].runs[0].charged_steps == 1
    reader.verify()


def test_a_lock_whose_holder_was_killed_is_free(instance: Callable[..., Instance], reader: PrivacyLedger):
    paused = instance()
    paused.ask("register run-a")
    paused.tell("stop run-a 2")
    paused.await_stop()
    paused.end()
    other = instance()
    assert "body" in other.ask("charge run-a 0")
    assert reader.view().accounts[0].runs[0].charged_steps == 1
    reader.verify()
