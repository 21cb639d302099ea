"""Closed clients that are forgotten, and the rows that go with them: a few at a time, since the desk is everybody's.

What a run has written is its operator's, and is left alone: ledger, evidence log, packages, batches.
"""

from collections import deque
from collections.abc import Collection
from typing import Final

from raycloak.coordinator.service.ports import Records
from raycloak.coordinator.service.store import ClientState, Store

_ROWS_AT_ONCE: Final = 2_000  # some tens of milliseconds


class ClientRetention:
    """The rows of clients that have ended. For the desk's thread, inside its turns.

    Guarantee: of a client that was not closed nothing is deleted, and of a closed one nothing while it has a driver or
    an open operation. A batch counts for its tenant as long as its run's directory keeps it.
    """

    def __init__(self, store: Store, records: Records) -> None:
        self._store = store
        self._keeps_batches = records.keeps_batches
        self._due: deque[str] = deque()

    def begin(self) -> None:
        """Go on where the service's last process ended, and look anew which runs keep their batches."""
        self._due = deque(self._store.to_be_tidied())

    def forget(self, tenant: str, newest: int, working: Collection[str]) -> None:
        """Forget the closed clients of a tenant but for the ``newest``, and those that are ``working``."""
        for client_id in self._store.closed_clients(tenant, newest):
            client = self._store.client(client_id)
            if client is not None and client_id not in working:
                self._store.change_client(
                    client, status=ClientState.FORGOTTEN, config="", run_config="", facts="", error=b""
                )
                self._due.append(client_id)

    def go_on(self) -> None:
        """Delete the next rows that are due."""
        left = _ROWS_AT_ONCE
        while self._due and left > 0:
            client = self._store.client(self._due[0])
            if client is None:  # it was due twice, for its batches too
                self._due.popleft()
                continue
            is_forgotten, kept = client.status == ClientState.FORGOTTEN, self._keeps_batches(client.run_dir)
            tables = ["operations", "artifacts", "used_ids"] if is_forgotten else []
            left -= self._store.forget(client.client_id, left, tables if kept else [*tables, "batches"])
            if left > 0:
                self._due.popleft()
                left -= 1
                # Else its batches go on counting, and it is looked at again when the service starts.
                if is_forgotten and not kept:
                    self._store.remove_client(client.client_id)
