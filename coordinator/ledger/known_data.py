"""The data that each account is known to be about, and the rules that give the people in it one account.

Pure functions of events. The ledger calls them before it writes an entry, the audit after it has read one. So both hold
an entry to the same rules, whoever asked for it: a run, an audit, a search, a service or a person.

Guarantee: the ledger admits no private release, and none without noise, of data that another account is known by, if
the marks say so (`raycloak.attestation.core.data_marks`). Only an account that somebody opened deliberately beside it
pays for it too. Marks under a fingerprint key that is new to the ledger compare with nothing, so they are refused too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raycloak.attestation.core.data_marks import DataMarks, Likeness, likeness
from raycloak.coordinator.ledger.entries import AccountOpened, DataKnown, RunRegistered
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.mechanism import Mechanism

StatesData = AccountOpened | DataKnown | RunRegistered
"""The events that state data, and so may make their account known by it."""


@dataclass(slots=True)
class Known:
    """The data that accounts are known by.

    Attributes:
        accounts: by name, the marks of all their data.
        whole: whether these are all accounts of the ledger, and so all keys that it compares data under. An extract has
            fewer.
        entries: positions of the entries that said something new, with their accounts, as far as they were followed.
    """

    accounts: dict[str, tuple[DataMarks, ...]] = field(default_factory=dict)
    whole: bool = True
    entries: list[tuple[int, str]] = field(default_factory=list)

    def learns(self, event: StatesData) -> bool:
        """Return whether an event makes its account known by data that it was not known by before.

        A run on data that is declared public, or without noise, says nothing of the people in an account.
        """
        if isinstance(event, RunRegistered) and (event.public or not any(each.private for each in event.mechanisms)):
            return False
        return not event.data.empty and event.data not in self.accounts.get(event.account, ())

    def follow(self, sequence: int, event: StatesData) -> None:
        """Learn from the event of the next entry that states data."""
        if self.learns(event):
            self.put(event.account, event.data)
            self.entries.append((sequence, event.account))

    def put(self, account: str, data: DataMarks) -> None:
        """Let an account be known by more data."""
        self.accounts[account] = (*self.accounts.get(account, ()), data)


_ALSO = "If the people in it are to have one more budget, open it deliberately: raycloak budget open NAME --also"


def accounts_of(known: Known, data: DataMarks) -> dict[str, Likeness]:
    """Return the accounts that are known by this data, each with the strongest reason."""
    found = {}
    for account, marks in known.accounts.items():
        reasons = [reason for each in marks if (reason := likeness(each, data)) is not None]
        if reasons:
            found[account] = max(reasons)
    return found


def check_opening(event: AccountOpened, known: Known) -> None:
    """Refuse to open an account of data that another one is known by, unless that is meant.

    Raises:
        BudgetError: as :func:`check_unknown`.
    """
    if not event.also:
        check_unknown(event.account, event.data, known)


def check_unknown(account: str, data: DataMarks, known: Known) -> None:
    """Refuse data that any account is known by, or may be.

    Raises:
        BudgetError: ``account_known`` or ``fingerprint_key_unknown``.
    """
    _require_comparable(data, known)
    if others := accounts_of(known, data):
        raise _known(account, others)


def check_addition(event: DataKnown, opened: AccountOpened, known: Known) -> None:
    """Refuse to let an account be known by data that is another's; BudgetError ``account_known``.

    The data may be under another key: this is how a key is changed.
    """
    others = accounts_of(known, event.data)
    if others and event.account not in others and not opened.also:
        raise _known(event.account, others)


def check_run_data(
    run_id: str, mechanisms: Sequence[Mechanism], data: DataMarks, opened: AccountOpened, known: Known
) -> None:
    """Refuse a run on data that its account may not pay for, and one without noise on data of any account.

    Args:
        data: marks of the run's data.
        opened: the opening of the account that is to pay.

    Raises:
        BudgetError: ``dataset_mismatch``, ``account_private``, ``account_known`` or ``fingerprint_key_unknown``.
    """
    name, own = opened.account, known.accounts.get(opened.account, ())
    # That two datasets lie at one place does not make them the same examples.
    if not opened.data.empty and not any(likeness(each, data) not in (None, Likeness.PLACE) for each in own):
        found = f"is {data.fingerprint.hex()}" if data.fingerprint else "was not computed"
        raise BudgetError(
            "dataset_mismatch",
            f"account '{name}' is bound to the dataset with fingerprint {opened.data.fingerprint.hex()}; the "
            f"fingerprint of the run's data {found}.",
            "Name the account of this data, and with dataset.fingerprint_key the key the account was opened with.",
        )
    # An account that somebody opened for this very data, or beside others, was meant to be charged for it.
    if not opened.also and data.fingerprint != opened.data.fingerprint:
        _require_comparable(data, known)
    others = accounts_of(known, data)
    clear = [mechanism.query for mechanism in mechanisms if not mechanism.private]
    if clear and (others or own):
        # A mechanism without noise costs nothing. Only an account's owner, not the run's, says whose data it is.
        raise BudgetError(
            "account_private",
            f"account '{next(iter(others), name)}' pays for this data, and run {run_id} would release its {clear[0]} "
            "without noise.",
            "Set dp_config.enabled: true; data that an account is known by is released with noise alone.",
        )
    if others and name not in others and not opened.also:
        raise _known(name, others)


def _require_comparable(data: DataMarks, known: Known) -> None:
    """Refuse marks under a key that nothing known was marked with, if anything was marked with a key.

    Raises:
        BudgetError: ``fingerprint_key_unknown``, with the account at the same place, if there is one.
    """
    keys = sorted({each.key for marks in known.accounts.values() for each in marks if each.key})
    if not known.whole or not data.key or not keys or data.key in keys:
        return
    others = accounts_of(known, data)
    at = f"account '{next(iter(others))}' is known by data at this place, and " if others else ""
    compared = ", ".join(key.hex()[:16] for key in keys)
    raise BudgetError(
        "fingerprint_key_unknown",
        f"{at}the ledger compares data under the fingerprint keys {compared}; this data was read with the key "
        f"{data.key.hex()[:16]}, so nobody can tell whether an account pays for it.",
        "Name a key that the ledger knows: dataset.fingerprint_key. To let an account know its data under another key: "
        f"raycloak budget bind {next(iter(others), 'ACCOUNT')} --dataset CONFIG. {_ALSO}.",
    )


def _known(account: str, others: Mapping[str, Likeness]) -> BudgetError:
    # The strongest reason, and of several accounts the first one opened.
    other = max(others, key=lambda name: others[name])
    return BudgetError(
        "account_known",
        f"account '{account}' cannot pay for this data: it has {others[other].words} of account '{other}'.",
        f"Name the account that pays: ledger.account: {other}. {_ALSO}.",
    )
