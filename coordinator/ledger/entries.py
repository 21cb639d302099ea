"""Entries of the ledger: signed events in one hash chain, and the check that anyone can make of a copy.

``hash = SHA-256(LP("raycloak/ledger-entry/v1", sequence, previous, kind, body))`` covers every field. The signature
covers the hash. Sequences count from 1, and the first entry's ``previous`` is ``GENESIS``.

A rotation is the entry that hands the ledger over to another key, and both keys sign it. So whoever trusts one key of a
ledger can check all of it: the new key signs what came before, and the former key names the new one. A former key that
leaked can still sign another chain. Only a reader who trusts the new key tells the two apart.

A head is a signed line about the newest entry. A witness keeps such lines, and an exported chain ends in one. Its
holder can show later that the ledger once had this entry. A ledger that was put back to an earlier time, or continued
differently, cannot produce it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self, get_args

from pydantic import Field

from raycloak.attestation.core.canonical import DIGEST_BYTES, digest, length_prefixed
from raycloak.attestation.core.data_marks import DataMarks
from raycloak.attestation.core.keys import IdentityKey, signature_is_valid
from raycloak.attestation.core.lineage import Lineage
from raycloak.attestation.core.messages import Envelope, Message, open_envelope, parse, seal
from raycloak.attestation.core.roster import Query
from raycloak.coordinator.ledger.cap_authority import SignedCap
from raycloak.metrics.errors import BudgetError, ProtocolError
from raycloak.workers.terms.mechanism import AccountantName, Mechanism

GENESIS = bytes(DIGEST_BYTES)


class LedgerEvent(Message):
    """Anything that an entry records. ``recorded_at`` is Unix time in seconds, by the ledger's own clock."""

    recorded_at: int


class AccountOpened(LedgerEvent):
    """The opening of an account.

    Attributes:
        accountant: the accountant that holds its cap.
        orders: the Renyi orders that its first private run fixes one of.
        authority: raw Ed25519 key that may let the cap be raised; empty if it can only be lowered.
        data: marks of the only dataset whose runs may charge; empty for any dataset.
        also: whether it may pay for data that another account pays for: one more budget, given deliberately.
    """

    DOMAIN: ClassVar[str] = "account_opened"

    account: str
    epsilon_cap: float
    delta: float
    accountant: AccountantName
    orders: tuple[float, ...]
    authority: bytes
    data: DataMarks
    also: bool


class DataKnown(LedgerEvent):
    """The marks of data that an account is to be known by from now on: under another key, or at another place."""

    DOMAIN: ClassVar[str] = "data_known"

    account: str
    data: DataMarks


class CapChanged(LedgerEvent):
    """A change of an account's cap.

    Attributes:
        old_cap, epsilon_cap: before and after.
        authorisation: the authority's signed permission, if the cap was raised; None if it was lowered.
    """

    DOMAIN: ClassVar[str] = "cap_changed"

    account: str
    old_cap: float
    epsilon_cap: float
    authorisation: SignedCap | None


class CapTransferred(LedgerEvent):
    """A move of epsilon between two accounts' caps. ``source_cap`` and ``target_cap`` are the caps afterwards."""

    DOMAIN: ClassVar[str] = "cap_transferred"

    source: str
    target: str
    source_cap: float
    target_cap: float


class AccountClosed(LedgerEvent):
    """The closing of an account, with its last cap. No run is registered and nothing is charged any more."""

    DOMAIN: ClassVar[str] = "account_closed"

    account: str
    epsilon_cap: float


class RunRegistered(LedgerEvent):
    """The registration of a run, which may then charge to an account.

    The first one with a private mechanism fixes the one order of an rdp account, before anything was released from it.

    Attributes:
        mechanisms: all that the run may release, each with a ``query`` of its own.
        unit: what epsilon is for the presence of: one ``row``, or the public name of a unit of rows; the same for all
            runs of an account.
        orders: the account's in use. Empty where nothing is private; all that the account has under ``pld``.
        step_rdp: per mechanism, RDP of one release at ``orders``; zeros where nothing is private.
        epsilon_cap: the account's cap at the registration. The run was planned for it.
        delta_slack: part of the account's delta that the run's slack takes at that cap.
        data: marks of the run's data, as its workers state them.
        public: whether the data was declared to need no protection. The account is then about nobody.
        quote_counts, quote_epsilon: the cost of parts of the run, if the account's accountant holds a fixed plan. Per
            part: releases of each private mechanism, and epsilon. Empty for a Renyi filter.
        accountant_version: libraries that computed ``step_rdp`` and ``quote_epsilon``.
        lineage: by which each charge was held to the model before; None of a run whose caller makes the updates.
    """

    DOMAIN: ClassVar[str] = "run_registered"

    run_id: str
    account: str
    mechanisms: tuple[Mechanism, ...]
    unit: str
    manifest_digest: bytes
    data: DataMarks
    public: bool
    orders: tuple[float, ...]
    step_rdp: tuple[tuple[float, ...], ...]
    quote_counts: tuple[tuple[int, ...], ...]
    quote_epsilon: tuple[float, ...]
    epsilon_cap: float
    delta_slack: float
    accountant_version: str
    lineage: Lineage | None


class RunPrepaid(RunRegistered):
    """The registration of a run that charges all that it plans at once, in this entry.

    Its steps are charged one by one all the same, because each needs a receipt, but add nothing to the account.
    """

    DOMAIN: ClassVar[str] = "run_prepaid"


class RunEvent(LedgerEvent):
    """Something that befell a registered run. ``fencing`` is the number of the ledger instance that wrote it."""

    run_id: str
    manifest_digest: bytes
    fencing: int


class DataBound(RunEvent):
    """The data of a run, bound before its first charge.

    Attributes:
        data_root: see `raycloak.workers.terms.receipt.data_root`.
    """

    DOMAIN: ClassVar[str] = "data_bound"

    data_root: bytes


class StepCharged(RunEvent):
    """One release of a run's mechanism.

    Attributes:
        query, step: the mechanism, and the number of its release, from 0.
        input_digest: of the parameters, and of the batches that a client sent; see
            `raycloak.workers.terms.step_input`.
        charged_epsilon: the account's epsilon after this charge: the total of all events up to this one.
        state_digest: of what the update rule keeps at the start of the step; empty without a lineage.
    """

    DOMAIN: ClassVar[str] = "step_charged"

    query: Query
    step: int
    input_digest: bytes
    mechanism_digest: bytes
    charged_epsilon: float
    state_digest: bytes


class VectorsBound(RunEvent):
    """The vectors of a charged step, bound before anybody may add them up.

    Attributes:
        query, step: as in :class:`StepCharged`.
        vectors_digest: see `raycloak.workers.terms.binding.vectors_digest`.
        sums: see `raycloak.workers.terms.binding.sum_digests`; left out of the bytes where there are none.
    """

    DOMAIN: ClassVar[str] = "vectors_bound"

    query: Query
    step: int
    vectors_digest: bytes
    sums: tuple[bytes, ...] = Field(default=(), exclude_if=lambda sums: not sums)


class KeyRotated(LedgerEvent):
    """The rotation of the ledger's key. The former key signs this entry, and the new one all that follow.

    Attributes:
        former_key, new_key: raw Ed25519 keys.
        acceptance: the new key's signature over this entry's place and both keys.
    """

    DOMAIN: ClassVar[str] = "key_rotated"

    former_key: bytes
    new_key: bytes
    acceptance: bytes


AccountEvent = CapChanged | CapTransferred | AccountClosed
"""The events that change an account."""

Event = AccountOpened | DataKnown | AccountEvent | RunRegistered | DataBound | StepCharged | VectorsBound | KeyRotated
_KINDS: dict[str, type[Event]] = {kind.DOMAIN: kind for kind in (*get_args(Event), RunPrepaid)}


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One link of the chain, as stored. ``body`` is the canonical JSON of the event that ``kind`` names."""

    sequence: int
    previous: bytes
    kind: str
    body: bytes
    hash: bytes
    signature: bytes

    @property
    def event(self) -> Event:
        """The parsed body.

        Raises:
            BudgetError: ``chain_broken``.
        """
        cls = _KINDS.get(self.kind)
        if cls is None:
            raise broken(self.sequence, f"its kind '{self.kind}' is unknown")
        try:
            return parse(cls, self.body)
        except ProtocolError as error:
            raise broken(self.sequence, f"its body is {error.message.removesuffix('.')}") from None


@dataclass(frozen=True, slots=True)
class Head:
    """The position and hash of a chain's last entry. Sequence 0 is the empty chain."""

    sequence: int = 0
    hash: bytes = GENESIS


def make_entry(head: Head, event: Event, key: IdentityKey) -> LedgerEntry:
    """Make the entry that continues the chain at ``head`` with ``event``, signed by ``key``."""
    sequence, body = head.sequence + 1, event.encode()
    link = _link(sequence, head.hash, event.DOMAIN, body)
    return LedgerEntry(sequence, head.hash, event.DOMAIN, body, link, key.sign(_signed(link)))


@dataclass(frozen=True, slots=True)
class LedgerKeys:
    """The keys of one ledger in their order, each with the first entry that it signs."""

    since: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, rotations: Iterable[LedgerEntry], current: bytes) -> Self:
        """Return the keys of a ledger that has these rotations, in order, and signs with ``current``.

        Raises:
            BudgetError: ``chain_broken`` if one key does not follow from the other.
        """
        entries = tuple(rotations)
        keys = cls(((1, first_key(entries, current)),))
        for entry in entries:
            check_entry(entry, keys.current, Head(entry.sequence - 1, entry.previous))
            keys = keys.after(entry)
        if keys.current != current:
            raise broken(keys.since[-1][0], "the ledger's key is not the one that its last rotation names")
        return keys

    def __contains__(self, key: bytes) -> bool:
        return any(key == each for _, each in self.since)

    @property
    def first(self) -> bytes:
        """The key that the ledger was made with. It stands for the ledger as long as it lives."""
        return self.since[0][1]

    @property
    def current(self) -> bytes:
        """The key that signs now."""
        return self.since[-1][1]

    def at(self, sequence: int) -> bytes:
        """Return the key that signs the entry at ``sequence``."""
        return next(key for start, key in reversed(self.since) if start <= sequence)

    def after(self, entry: LedgerEntry) -> Self:
        """Return the keys once ``entry``, a rotation that the current key signed, is in the chain.

        Guarantee: a key is added only if the key before it and the key itself signed that it follows there.

        Raises:
            BudgetError: ``chain_broken``.
        """
        event = entry.event
        assert isinstance(event, KeyRotated), "its kind says so"
        if event.former_key != self.current:
            raise broken(entry.sequence, "it rotates another key than the ledger's")
        # A key that was replaced because it leaked must not come back.
        if event.new_key in self:
            raise broken(entry.sequence, "it returns to a former key")
        place = Head(entry.sequence - 1, entry.previous)
        if not signature_is_valid(event.new_key, _accepted(place, event.former_key, event.new_key), event.acceptance):
            raise broken(entry.sequence, "the new key did not sign it")
        return replace(self, since=(*self.since, (entry.sequence + 1, event.new_key)))


def first_key(entries: Iterable[LedgerEntry], current: bytes) -> bytes:
    """Return the key that signs the first of ``entries``, which are in order and end under ``current``."""
    events = (entry.event for entry in entries if entry.kind == KeyRotated.DOMAIN)
    return next((event.former_key for event in events if isinstance(event, KeyRotated)), current)


def rotation(head: Head, former_key: bytes, new_key: IdentityKey, recorded_at: int) -> KeyRotated:
    """Build the event that hands the chain that ends at ``head`` over to another key."""
    acceptance = new_key.sign(_accepted(head, former_key, new_key.public))
    return KeyRotated(recorded_at=recorded_at, former_key=former_key, new_key=new_key.public, acceptance=acceptance)


def check_entry(entry: LedgerEntry, public_key: bytes, head: Head) -> Head:
    """Check that ``entry`` continues ``head`` and is signed; return the head after it.

    Guarantee: returns only if every field of the entry is what ``public_key`` signed.

    Raises:
        BudgetError: ``chain_broken``, naming the entry.
    """
    # First the content: a signature covers only the hash.
    after = check_link(entry, head)
    if not signature_is_valid(public_key, _signed(entry.hash), entry.signature):
        raise broken(entry.sequence, "it is not signed by the ledger's key")
    return after


def check_link(entry: LedgerEntry, head: Head) -> Head:
    """Check one entry's content and place, but not its signature; return the head after it.

    Raises:
        BudgetError: ``chain_broken``, naming the entry.
    """
    if entry.sequence != head.sequence + 1:
        raise broken(head.sequence + 1, f"entry {entry.sequence} stands in its place")
    if entry.previous != head.hash:
        raise broken(entry.sequence, "it does not follow the entry before it")
    if entry.hash != _link(entry.sequence, entry.previous, entry.kind, entry.body):
        raise broken(entry.sequence, "its content does not match its hash")
    return Head(entry.sequence, entry.hash)


def broken(sequence: int, why: str) -> BudgetError:
    """Build the refusal of a chain at one entry."""
    return BudgetError(
        "chain_broken",
        f"the ledger cannot be trusted at entry {sequence}: {why}.",
        "Restore the ledger from a copy that verifies; spend nothing until then.",
    )


class LedgerHead(Message):
    """The ledger's signed statement that its chain has this entry.

    Attributes:
        ledger_key: raw Ed25519 key of the ledger at that time, which signs this.
        sequence, hash: position and hash of the entry; sequence 0 is the empty chain.
        stated_at: Unix time in seconds, by the ledger's own clock.
    """

    DOMAIN: ClassVar[str] = "raycloak/ledger-head/v1"

    ledger_key: bytes
    sequence: int
    hash: bytes
    stated_at: int

    @property
    def position(self) -> Head:
        """The position and hash alone."""
        return Head(self.sequence, self.hash)


class HeadLine(Message):
    """A :class:`LedgerHead` in its canonical form, and the ledger's signature over it."""

    DOMAIN: ClassVar[str] = "raycloak/ledger-head-line/v1"

    head: bytes
    signature: bytes


def head_line(head: Head, key: IdentityKey, stated_at: int) -> bytes:
    """Return the signed head as one line of canonical JSON, without its line feed."""
    stated = LedgerHead(ledger_key=key.public, sequence=head.sequence, hash=head.hash, stated_at=stated_at)
    envelope = seal(stated, key)
    return HeadLine(head=envelope.body, signature=envelope.signature).encode()


def read_head_line(line: bytes, keys: LedgerKeys) -> LedgerHead:
    """Read the head in a line, after checking that one of the ledger's ``keys`` signed it.

    Raises:
        ProtocolError: ``malformed`` or ``signature``.
    """
    parsed = parse(HeadLine, line)
    stated = parse(LedgerHead, parsed.head).ledger_key
    signer = stated if stated in keys else keys.current
    return open_envelope(LedgerHead, Envelope(body=parsed.head, signature=parsed.signature), signer)


def rolled_back(source: str, pinned: Head, found: bytes | None) -> BudgetError:
    """Build the refusal of a ledger behind or beside a head kept elsewhere. ``found`` is its own hash there."""
    return BudgetError(
        "ledger_rolled_back",
        f"{source} holds the ledger's entry {pinned.sequence} with hash {pinned.hash.hex()}; the ledger has "
        f"{found.hex() if found else 'no such entry'}.",
        "Put the ledger's newest state back; an older one forgets what was spent.",
    )


def _link(sequence: int, previous: bytes, kind: str, body: bytes) -> bytes:
    return digest(length_prefixed("raycloak/ledger-entry/v1", sequence, previous, kind, body))


def _accepted(head: Head, former_key: bytes, new_key: bytes) -> bytes:
    return length_prefixed("raycloak/ledger-key-acceptance/v1", head.sequence, head.hash, former_key, new_key)


def _signed(link: bytes) -> bytes:
    return length_prefixed("raycloak/ledger-signature/v1", link)
