"""Token budgets of one adapter: how many tokens each projection has answered, for whom, durably and for ever.

A client can reconstruct a projection from about as many tokens as it is wide. So a budget is of a projection's whole
life, and no restart, session or new set of keys gives any of it back.

Guarantee: a charge is on disk before it is granted, and no charge takes a total above its budget, whatever the number
of processes. A crash between charge and answer costs tokens, and never gives any.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from raycloak.attestation.files.sqlite import BUSY_DEADLINE_S, Transactions, enter_wal
from raycloak.metrics.errors import BudgetError
from raycloak.metrics.file_errors import file_error

_SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
    projection TEXT NOT NULL, client TEXT NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (projection, client)
) STRICT
"""


class TokenBudgets:
    """The budgets of one adapter.

    Args:
        path: its file; created if it is missing.
        of_adapter: most tokens of a projection for all clients together.
        of_client: most tokens of a projection for one client.

    Raises:
        ConfigError: ``token_budgets`` if the file cannot be used.
    """

    def __init__(self, path: Path, of_adapter: int, of_client: int) -> None:
        self._of_adapter, self._of_client = of_adapter, of_client
        try:
            self._db = sqlite3.connect(path, BUSY_DEADLINE_S, isolation_level=None, check_same_thread=False)
            enter_wal(self._db)
            # A lost charge would be tokens that nobody counted.
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(_SCHEMA)
        except sqlite3.Error as error:
            raise file_error("token_budgets", "open", path, OSError(str(error))) from None
        self._transactions = Transactions(self._db)

    def charge(self, client: str, projections: Iterable[str], tokens: int) -> None:
        """Spend ``tokens`` of each projection for ``client``, of all or of none.

        Raises:
            BudgetError: ``tokens_spent``.
        """
        with self._transactions.transaction():
            for projection in projections:
                if self.left(client, [projection]) < tokens:
                    raise BudgetError(
                        "tokens_spent",
                        f"'{projection}' has no {tokens} tokens left for this client or for all of them.",
                        "Budgets are for ever: ask the adapter's owner, who can only decide to reveal more of it.",
                    )
                self._db.execute(
                    "INSERT INTO spent VALUES (?1, ?2, ?3)"
                    " ON CONFLICT (projection, client) DO UPDATE SET tokens = tokens + ?3",
                    (projection, client, tokens),
                )

    def left(self, client: str, projections: Iterable[str]) -> int:
        """Return the tokens that the projection with the least has left for ``client``."""
        left = []
        for projection in projections:
            everybody, own = self._db.execute(
                "SELECT COALESCE(SUM(tokens), 0), COALESCE(SUM(tokens) FILTER (WHERE client = ?2), 0)"
                " FROM spent WHERE projection = ?1",
                (projection, client),
            ).fetchone()
            left.append(max(0, min(self._of_adapter - everybody, self._of_client - own)))
        return min(left, default=0)

    def left_of_adapter(self, projections: Iterable[str]) -> int:
        """Return the tokens that the projection with the least has left for all clients together."""
        query = "SELECT COALESCE(SUM(tokens), 0) FROM spent WHERE projection = ?"
        spent = [self._db.execute(query, (each,)).fetchone()[0] for each in projections]
        return max(0, self._of_adapter - max(spent, default=0))

    def close(self) -> None:
        """Close the file."""
        self._db.close()
