"""The comparison of a ledger with heads that were kept elsewhere.

A valid chain may be an older one that was put back. It then lacks an entry that a sealed package, an evidence
log or a witness has seen. The answer names the sources that were used, and those that could not be.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raycloak.attestation.core.messages import parse
from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.attestation.sealed.package_keys import SIGNER_PUBLIC_FILE, TrustStore, load_signer
from raycloak.coordinator.checkpoints.reader import signed_manifest
from raycloak.coordinator.checkpoints.storage import RUN_MANIFEST, STORAGE_ERRORS, PackageStorage, one_line
from raycloak.coordinator.ledger.entries import Head, LedgerKeys, rolled_back
from raycloak.coordinator.ledger.witness import open_witness
from raycloak.metrics.errors import BudgetError, ProtocolError, RaycloakError
from raycloak.workers.terms.manifest import Manifest

PinKind = Literal["package", "evidence log", "witness"]


@dataclass(frozen=True, slots=True)
class Pin:
    """The heads that one source holds; none for a source that could not be used.

    Attributes:
        source: where the heads are kept.
        unusable: why none of them can be compared; empty if they can.
    """

    kind: PinKind
    source: str
    heads: tuple[Head, ...] = ()
    unusable: str = ""

    @property
    def newest(self) -> int:
        """The highest pinned entry; 0 without any."""
        return max((head.sequence for head in self.heads), default=0)


def package_pins(folder: Path, signer_folder: Path, keys: LedgerKeys) -> Iterator[Pin]:
    """Yield the heads in the sealed packages below ``folder``/<run>.

    Each must be signed by the signer whose public file lies in ``signer_folder``.
    """
    for run in sorted(path for path in folder.glob("*") if path.is_dir()):
        storage = PackageStorage.open(str(run))
        for name in storage.names():
            yield _package_pin(storage, name, f"{run / name}", signer_folder, keys)


def _package_pin(storage: PackageStorage, name: str, source: str, signer_folder: Path, keys: LedgerKeys) -> Pin:
    try:
        trust = TrustStore.of("here", load_signer(signer_folder / SIGNER_PUBLIC_FILE))
        stated = signed_manifest(storage, name, trust)
        with storage.reader(name, RUN_MANIFEST) as file:
            run = parse(Manifest, file.read())
    except RaycloakError as error:
        return Pin("package", source, unusable=f"{error.code}: {error.message}")
    except STORAGE_ERRORS as error:
        return Pin("package", source, unusable=one_line(error))
    if run.digest() != stated.manifest_digest:
        return Pin("package", source, unusable="its run manifest is not the one it was sealed with")
    if run.ledger_key not in keys:
        return Pin("package", source, unusable=_other(run.ledger_key))
    return Pin("package", source, (Head(stated.ledger_sequence, stated.ledger_hash),))


def log_pins(runs: Path, keys: LedgerKeys) -> Iterator[Pin]:
    """Yield the heads in exported evidence logs of the runs below ``runs``, one for each committed step."""
    for log in sorted(runs.glob("*/evidence.jsonl")):
        yield _log_pin(log, keys)


def _log_pin(log: Path, keys: LedgerKeys) -> Pin:
    try:
        run = parse(Manifest, (log.parent / "manifest.json").read_bytes().strip())
        entries = read_exported_log(log, run.log_owner).entries
    except (OSError, ProtocolError):
        return Pin("evidence log", str(log), unusable="the run directory has no readable manifest.json")
    except RaycloakError as error:
        return Pin("evidence log", str(log), unusable=f"{error.code}: {error.message}")
    if run.ledger_key not in keys:
        return Pin("evidence log", str(log), unusable=_other(run.ledger_key))
    commits = [entry.content for entry in entries if entry.kind in ("committed", "reproduced")]
    heads = tuple(Head(each["ledger_sequence"], bytes.fromhex(each["ledger_hash"])) for each in commits)
    return Pin("evidence log", str(log), heads, "" if heads else "it tells of no committed step")


def witness_pins(location: str | None, keys: LedgerKeys) -> Iterator[Pin]:
    """Yield the heads of the ledger's witness; nothing without a witness.

    Raises:
        ConfigError, BudgetError: ``witness`` or ``witness_unavailable``. A named witness must be asked.
    """
    if location is None:
        return
    with closing(open_witness(location, keys)) as witness:
        heads = tuple(head.position for head in witness.heads() if head.sequence)
    yield Pin("witness", location, heads, "" if heads else "it holds no head of this ledger")


def check_pins(pins: Iterable[Pin], hash_at: Callable[[int], bytes | None]) -> None:
    """Refuse a ledger that lacks an entry which ``pins`` hold.

    Raises:
        BudgetError: ``ledger_rolled_back``, with the source, the entry and both values.
    """
    for pin in pins:
        # Oldest first, so that the refusal names the first entry that is gone.
        for head in sorted(pin.heads, key=lambda head: head.sequence):
            found = hash_at(head.sequence)
            if found != head.hash:
                raise rolled_back(f"the {pin.kind} {pin.source}", head, found)


def require_key(expected: bytes | None, keys: LedgerKeys) -> None:
    """Refuse a ledger that neither has nor had the key that the reader expects; BudgetError ``ledger_key``."""
    if expected is not None and expected not in keys:
        raise BudgetError(
            "ledger_key",
            f"the ledger signs with the key {keys.current.hex()}, and {expected.hex()} is none of its former ones.",
            "It is another ledger, or was made anew: find the one with this key.",
        )


def _other(key: bytes) -> str:
    return f"it is of another ledger, whose key is {key.hex()}"
