"""The state behind freshness: the nonces that were issued, their holders, and whether they were used.

The book lives in a SQLite database that its owner opens, beside the owner's other tables.
"""

import secrets
import sqlite3
from collections.abc import Callable

from raycloak.attestation.core.evidence import NONCE_BYTES, Challenge, Presentation, Refusal, Role, refuse

_SCHEMA = """
CREATE TABLE IF NOT EXISTS nonces (
    nonce BLOB PRIMARY KEY,
    run_id TEXT NOT NULL,
    member_id TEXT NOT NULL,
    role TEXT NOT NULL,
    manifest_digest BLOB NOT NULL,
    identity_key BLOB NOT NULL,
    expires_at INTEGER NOT NULL,
    consumed INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID
"""

DEFAULT_LIFETIME_S = 300
MAX_USED = 65_536  # so that a replay is told from a nonce that was never issued; see `NonceBook.issue`
_DROP_OLD = """
DELETE FROM nonces WHERE consumed AND expires_at <= ?
AND nonce NOT IN (SELECT nonce FROM nonces WHERE consumed ORDER BY expires_at DESC LIMIT ?)
"""


class NonceBook:
    """A book that issues nonces and accepts each of them once.

    Args:
        connection: open database that commits by itself. A write inside the owner's transaction is durable when that
            commits; outside of one, at once.
        random_bytes: source of nonces.
    """

    def __init__(
        self, connection: sqlite3.Connection, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        self._connection = connection
        self._random_bytes = random_bytes
        self._sweep_at = 0
        connection.execute(_SCHEMA)

    def issue(
        self,
        *,
        run_id: str,
        member_id: str,
        role: Role,
        manifest_digest: bytes,
        now: int,
        lifetime_s: int = DEFAULT_LIFETIME_S,
        identity_key: bytes = b"",
    ) -> Challenge:
        """Issue a challenge with a fresh nonce, recorded before it is returned.

        Guarantee: nonces that nobody answered in time are dropped once in ``DEFAULT_LIFETIME_S``, however long the
        owner runs. So endless requests fill the book with the nonces of two such spans at most. The newest
        ``MAX_USED`` used nonces stay until :meth:`forget_expired`, so that a replay is refused as one. An older nonce
        is refused as never issued.

        Args:
            identity_key: the key the member announced. If given, only a presentation of that key consumes the nonce,
                so no observer of the nonce can spend it.
        """
        # Anybody may ask for challenges, at 2,000 per second, so unanswered ones cannot wait for a restart.
        if now >= self._sweep_at:
            self._connection.execute("DELETE FROM nonces WHERE expires_at <= ? AND NOT consumed", (now,))
            self._connection.execute(_DROP_OLD, (now, MAX_USED))
            self._sweep_at = now + DEFAULT_LIFETIME_S
        challenge = Challenge(
            nonce=self._random_bytes(NONCE_BYTES),
            run_id=run_id,
            member_id=member_id,
            role=role,
            manifest_digest=manifest_digest,
            expires_at=now + lifetime_s,
        )
        session = (challenge.nonce, run_id, member_id, role, manifest_digest, identity_key, challenge.expires_at)
        self._connection.execute("INSERT INTO nonces VALUES (?, ?, ?, ?, ?, ?, ?, 0)", session)
        return challenge

    def consume(self, presentation: Presentation, now: int) -> None:
        """Use up the nonce of a presentation whose signature was verified (`open_presentation`), in a transaction of
        the caller's that writes.

        Guarantee: of all presentations with one nonce at most one passes and is committed, in any number of processes
        and across restarts. The owner commits whatever the appraisal says, so the nonce stays used. A rollback undoes
        this together with the decision.

        Raises:
            EvidenceError: ``nonce_foreign`` if it was never issued, has expired, or was issued to another run, member,
                role or manifest. ``nonce_replayed`` if it was used before. ``peer_not_bound`` if it was issued to
                another key, in which case it stays unused.
        """
        columns = "run_id, member_id, role, manifest_digest, identity_key, expires_at, consumed"
        query = f"SELECT {columns} FROM nonces WHERE nonce = ?"
        row = self._connection.execute(query, (presentation.nonce,)).fetchone()
        if row is None:
            refuse(Refusal.NONCE_FOREIGN, f"the nonce of '{presentation.member_id}' was never issued")
        *issued, identity_key, expires_at, consumed = row
        if consumed:
            refuse(Refusal.NONCE_REPLAYED, f"the nonce of '{presentation.member_id}' was used before")
        # Before the nonce is used up: an observer of the nonce must not be able to spend it.
        if identity_key and identity_key != presentation.identity_key:
            refuse(Refusal.PEER_NOT_BOUND, f"the nonce of '{presentation.member_id}' was issued to another key")
        # Before the session is compared: a presentation for another session uses up the nonce too.
        self._connection.execute("UPDATE nonces SET consumed = 1 WHERE nonce = ?", (presentation.nonce,))
        session = [presentation.run_id, presentation.member_id, presentation.role, presentation.manifest_digest]
        if issued != session:
            refuse(Refusal.NONCE_FOREIGN, f"the nonce of '{presentation.member_id}' was issued to another session")
        if now >= expires_at:
            refuse(Refusal.NONCE_FOREIGN, f"the nonce of '{presentation.member_id}' expired at {expires_at}")

    def forget_expired(self, now: int) -> None:
        """Drop expired nonces, which are refused anyway."""
        self._connection.execute("DELETE FROM nonces WHERE expires_at <= ?", (now,))

    def forget_unused(self) -> None:
        """Drop unanswered nonces. A later answer to one is refused as ``nonce_foreign``."""
        self._connection.execute("DELETE FROM nonces WHERE NOT consumed")
