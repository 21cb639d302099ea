"""The check of a ledger before an instance writes to it: cheap enough for every start of a run.

The newest entry's signature covers its hash, and so, link by link, every entry before it. The full check of meaning,
`coordinator.ledger_audit.audit`, takes twenty times as long.
"""

import json
from collections import Counter

from coordinator.ledger_entries import Head, LedgerEntry, StepCharged, broken, check_chain, check_link
from coordinator.ledger_store import Rows


def check_links(rows: Rows, public_key: bytes) -> None:
    """Refuse a ledger with a changed, dropped or moved entry, or with tables that count other charges.

    Guarantee: returns only if ``public_key`` signed the content of every entry, in this order, and the tables count the
    same charges as the chain. Takes 50 us per entry on two busy cores. A ledger whose end was cut off, or that was put
    back as a whole, passes: only a head kept elsewhere shows that.

    Raises:
        BudgetError: ``chain_broken``, naming the entry.
    """
    head, newest = Head(), None
    charges: Counter[tuple[str, str]] = Counter()
    for entry in rows.entries():
        head = check_link(entry, head)
        newest = entry
        if entry.kind == StepCharged.DOMAIN:
            charges[_charged(entry)] += 1
    # The newest signature covers every entry before it, link by link.
    if newest is not None:
        check_chain([newest], public_key, Head(newest.sequence - 1, newest.previous))
    for row in rows.runs():
        for query, count in row.charged.items():
            if charges.pop((row.run_id, query), 0) != count:
                raise broken(row.sequence, f"the table of charges disagrees with the chain about run {row.run_id}")
    if charges:
        lacking = " of run ".join(reversed(next(iter(charges))))
        raise broken(head.sequence, f"the table of charges lacks the {lacking}")


def _charged(entry: LedgerEntry) -> tuple[str, str]:
    """Return run and query. The entry's hash has already shown that the body is the signed one."""
    body = json.loads(entry.body)
    return body["run_id"], body["query"]
