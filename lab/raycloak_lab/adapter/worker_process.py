"""The worker in a process of its own, so that the server that strangers reach holds neither adapter nor keys.

The two talk over a pipe, one call at a time. A worker that dies is not replaced: its identity key, evidence and
sessions die with it, and every later call is refused. A worker that hangs is killed.
"""

import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from raycloak.attestation.attester.attester import EvidenceSource
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.trust.channel import ChannelEnd
from raycloak.metrics.errors import RaycloakError, RefusedError, RunFailedError
from raycloak_lab.encrypted.adapter_worker import Adapter, AdapterFacts, AdapterWorker

START_DEADLINE_S: Final = 300.0
CALL_DEADLINE_S: Final = 60.0
"""Bounds one call; a block of the widest projection takes a second."""
_STOP_S: Final = 5.0


class WorkerProcess:
    """The parent's side of a worker process.

    Args:
        load: returns the adapter; called in the worker's process alone, so that the parent never has it.
        tokens: tokens of a block.
        source: returns the platform of the worker; called in its process too.

    Raises:
        RaycloakError: whatever kept the worker from starting. RunFailedError ``worker_gone`` if it died.
    """

    def __init__(self, load: Callable[[], Adapter], tokens: int, source: Callable[[], EvidenceSource]) -> None:
        # Not fork: a forked child would share the parent's sockets and locks.
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, load, tokens, source), daemon=True)
        self._process.start()
        child.close()
        try:
            self.facts, self.end = self._answer(START_DEADLINE_S)
        except BaseException:
            self.stop()
            raise

    facts: AdapterFacts
    end: ChannelEnd

    def present(self, session: str, contract: bytes, policy: bytes, challenge: bytes) -> Envelope:
        """See `AdapterWorker.present`."""
        presented: Envelope = self._call("present", session, contract, policy, challenge)
        return presented

    def register(self, session: str, release: KeyRelease, fingerprint: bytes, sealed: bytes) -> None:
        """See `AdapterWorker.register`."""
        self._call("register", session, release, fingerprint, sealed)

    def apply(self, session: str, fingerprint: bytes, batch: bytes, names: Sequence[str]) -> tuple[bytes, ...]:
        """See `AdapterWorker.apply`."""
        answers: tuple[bytes, ...] = self._call("apply", session, fingerprint, batch, tuple(names))
        return answers

    def close(self, session: str) -> None:
        """See `AdapterWorker.close`."""
        self._call("close", session)

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_STOP_S)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._answer(CALL_DEADLINE_S, (name, arguments))

    def _answer(self, deadline_s: float, *sent: Any) -> Any:
        # Killed, since a worker that stopped may leave a message half read, or its answer half written.
        timer = threading.Timer(deadline_s, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            for each in sent:
                self._pipe.send(each)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise _gone() from None
        finally:
            timer.cancel()
        if isinstance(answer, RaycloakError):
            raise answer
        return answer


def _gone() -> RunFailedError:
    return RunFailedError(
        "worker_gone", "the worker of the adapter does not answer.", "Its owner must start the server again."
    )


def _serve(pipe: Connection, load: Callable[[], Adapter], tokens: int, source: Callable[[], EvidenceSource]) -> None:
    """Answer calls until the parent closes its end."""
    # Ctrl-C reaches both: the parent first awaits what is under way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        keep_memory_private()
        worker = AdapterWorker(load(), tokens, source())
    except RaycloakError as error:
        pipe.send(error)
        return
    pipe.send((worker.facts, worker.end))
    methods = {name: getattr(worker, name) for name in ("present", "register", "apply", "close")}
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = methods[name](*arguments)
        except RaycloakError as error:
            answer = error
        except Exception:
            # One client's call must not end the others' sessions.
            logging.getLogger(__name__).exception("a call of the adapter's worker failed")
            answer = RefusedError("adapter_failed", "the worker failed at this call.", "See the log of the server.")
        pipe.send(answer)
