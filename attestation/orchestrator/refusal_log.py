"""The refusals in the evidence log: each has its own entry, up to a budget, and is only counted beyond it.

An entry stays for ever, and being refused costs nothing. So refusals over the service have a budget: `BURST` refusals,
and `PER_SECOND` more. Refusals beyond it are counted. An entry ``refusals_omitted`` gives their count by code. It is
written before the next logged refusal, and when the log is exported or its owner closes.

Strangers share one budget, as they cannot be told apart. Members, whose identity key is admitted and certified their
channel, share a second budget that no stranger can use up. An ``admitted`` entry names a member that floods it.
Refusals of the orchestrator's own driver have no budget: each is an entry.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final, Literal

from pydantic import JsonValue

from raycloak.attestation.core.rate_limit import RateLimit
from raycloak.attestation.log.evidence_log import EvidenceLog

Asker = Literal["stranger", "member"]
# Anybody who reaches the service can be refused 2,000 times per second, and an entry stays for ever.
BURST: Final = 4096
PER_SECOND: Final = 1.0
# Letters of a name that are logged: over the service anybody may ask in a name of any length.
_LOGGED_NAME: Final = 200


class RefusalLog:
    """The refusals of one evidence log.

    Guarantee: over the service, strangers cause at most ``BURST`` + ``PER_SECOND`` * seconds entries about refusals,
    and members as many. Each has at most one ``refusals_omitted`` beside it. Omitted refusals are counted by code.
    Not guaranteed: the count since the last such entry is in memory, and a crash loses it.

    Args:
        transaction: of the log's owner.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        log: EvidenceLog,
        transaction: Callable[[], AbstractContextManager[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._transaction = transaction
        self._budgets = RateLimit(PER_SECOND, BURST, clock)
        self._asker: Asker | None = None
        self._omitted: Counter[str] = Counter()

    @contextmanager
    def asked_by(self, asker: Asker) -> Iterator[None]:
        """Charge refusals inside to the budget of ``asker``, who asks over the service."""
        former, self._asker = self._asker, asker
        try:
            yield
        finally:
            self._asker = former

    def append(self, kind: str, member_id: str, code: str, /, **more: str) -> None:
        """Log a refusal of ``code``, or count it, in a transaction of the caller's."""
        if self._asker is not None and not self._budgets.allows(self._asker):
            self._omitted[code] += 1
            return
        self._state_omitted()
        self._log.append(kind, {"member_id": member_id[:_LOGGED_NAME], "code": code, **more})

    def settle(self) -> None:
        """Log the count of omitted refusals; durable, or part of the caller's transaction."""
        if self._omitted:
            with self._transaction():
                self._state_omitted()

    def close(self) -> None:
        """Log the count as :meth:`settle`, if it can be written; otherwise it is lost, as in a crash."""
        with suppress(sqlite3.Error):
            self.settle()

    def _state_omitted(self) -> None:
        if self._omitted:
            codes: dict[str, JsonValue] = dict(self._omitted)
            self._log.append("refusals_omitted", {"count": self._omitted.total(), "codes": codes})
            self._omitted.clear()
