"""The commands ``raycloak attest log``: check a run's evidence log with the public keys of its owner."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycloak.coordinator.cli.options import RUN_OR_OTHER, command, run_or_path
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.console.tables import facts_table
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error

if TYPE_CHECKING:
    from raycloak.attestation.core.hybrid_signature import SignerPublic
    from raycloak.attestation.log.entries import SignedHead
    from raycloak.attestation.log.evidence_log import ExportedLog

attest_log = typer.Typer(help="The evidence log: check it, or prove one entry of it.")

LOG_FILE = "evidence.jsonl"

LogPath = Annotated[str, typer.Argument(metavar="RUN|FILE", help=f"A {RUN_OR_OTHER}; or an exported log.")]
TrustedKey = Annotated[
    Path,
    typer.Option(
        "--key",
        metavar="FILE",
        help="Trust file, the owner's two public keys, or a manifest; from another channel than the log.",
    ),
]
OwnKey = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="As of `verify`; default: the run's own manifest, on its site."),
]


@command(attest_log, "verify")
def verify_command(
    output: Output,
    log: LogPath,
    key: TrustedKey,
    head: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An older head or log, which this one must extend.")
    ] = None,
) -> None:
    """Check every entry, and the head by trusted keys; name the first entry that is wrong. Exit code 3 if one is."""
    from raycloak.attestation.log.entries import broken, check_extends
    from raycloak.attestation.log.evidence_log import read_exported_head

    owner, opened = _opened(run_or_path(log), key)
    facts: dict[str, Any] = {
        "verified": True,
        "run_id": opened.head.run_id,
        "entries": opened.head.length,
        "root": opened.head.root,
        "owner": owner.key_id,
        "keys_from": str(key),
    }
    if head is not None:
        old = read_exported_head(head).open(owner)
        if old.length > opened.head.length:
            broken(f"it has {opened.head.length} entries, the older head {old.length}: it was cut off")
        check_extends(old, opened.head, opened.prove_extends(old.length))
        facts["extends"] = old.length
    admitted = [entry.content for entry in opened.entries if entry.kind == "admitted"]
    # Of a member's guest, and of its GPUs where the entry states claims.
    gpus = (gpu for member in admitted for gpu in member.get("claims", {}).get("submods", {}).values())
    facts["evidence_classes"] = classes = sorted({each["evidence_class"] for each in (*admitted, *gpus)})
    output.show("Evidence log (SIMULATED evidence)" if "simulated" in classes else "Evidence log", facts)


@command(attest_log, "prove")
def prove_command(
    output: Output,
    log: LogPath,
    sequence: Annotated[int, typer.Argument(metavar="SEQUENCE", help="Position of the entry, from 0.", min=0)],
    key: OwnKey = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="New file for the proof.")] = None,
) -> None:
    """Check a log, and write a proof of one entry: the entry, the hashes up to the root, and the signed head."""
    _, opened = _opened(run_or_path(log), key)
    if sequence >= opened.head.length:
        raise ConfigError(
            "log_entry", f"the log has {opened.head.length} entries; there is no entry {sequence}.", "Count from 0."
        )
    proof = opened.prove(sequence)
    if out is not None:
        try:
            with out.open("xb") as file:
                file.write(proof.encode() + b"\n")
        # Opened exclusively: a proof must not take the place of another one.
        except FileExistsError:
            raise ConfigError("out_exists", f"{out} already exists.", "Choose another name, or remove it.") from None
        except OSError as error:
            raise file_error("out_unwritable", "write", out, error) from None
    facts = {"sequence": sequence, "kind": proof.entry.kind, "hashes": len(proof.path), "entries": opened.head.length}
    output.result(facts | {"proof": proof.model_dump(mode="json")}, facts_table("Proof of an entry", facts))


@command(attest_log, "check")
def check_command(
    output: Output,
    proof: Annotated[Path, typer.Argument(metavar="PROOF", help="File that `prove` wrote.")],
    key: TrustedKey,
) -> None:
    """Check a proof without its log. Exit code 3 if it does not hold."""
    from raycloak.attestation.log.entries import EntryProof, LogHead, parse_line

    stated = parse_line(EntryProof, _read(proof).strip(), "the proof")
    claimed = parse_line(LogHead, stated.head.head, "the signed head")
    entry, head = stated.check(_owner(key, stated.head), claimed.run_id)
    facts = {"verified": True, "run_id": head.run_id, "sequence": entry.sequence, "kind": entry.kind}
    output.show("Proof of an entry", facts | {"entries": head.length, "body": entry.content})


def _opened(path: Path, key: Path | None) -> tuple["SignerPublic", "ExportedLog"]:
    from raycloak.attestation.log.evidence_log import read_exported_head, read_exported_log

    if not path.exists():
        raise ConfigError(
            "log_missing",
            f"there is no run directory and no log at {path}.",
            "Name a run directory: runs/ in RAYCLOAK_HOME has them.",
        )
    folder, file = (path, path / LOG_FILE) if path.is_dir() else (path.parent, path)
    owner = _owner(key or folder / "manifest.json", read_exported_head(file))
    return owner, read_exported_log(file, owner)


def _owner(path: Path, head: "SignedHead") -> "SignerPublic":
    """Return the owner that the file names: by its two public keys, as a manifest, or as a trust file.

    A trust file may name the owners of several runs. The one whose key the head claims is taken, and checked later.
    """
    from raycloak.attestation.core.hybrid_signature import SignerPublic
    from raycloak.attestation.core.messages import parse, parse_stored
    from raycloak.coordinator.proof.trust import Trust
    from raycloak.metrics.errors import ProtocolError
    from raycloak.workers.terms.manifest import Manifest

    data = _read(path).strip()
    if b'"orchestrators"' in data:
        owners = Trust.load(path).orchestrators
        return next((each for each in owners if each.key_id == head.signature.key_id), owners[0])
    try:
        if b'"run_id"' in data:
            return parse_stored(Manifest, data, str(path)).log_owner
        return parse(SignerPublic, data)
    except ProtocolError as error:
        raise ConfigError(
            "log_key",
            f"{path} does not name the owner of a log: {error.message}.",
            "Give the trust file of the run, a manifest that you trust, or a file of both public keys.",
        ) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        if path.name == "manifest.json":
            raise ConfigError(
                "log_key", f"cannot read {path}: {error.strerror}.", "Give the file with --key."
            ) from None
        raise file_error("log_key", "read", path, error) from None
