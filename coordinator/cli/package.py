"""The commands ``raycloak package``: keys and trust of sealed packages, and reading one without its run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloak.coordinator.cli.options import command
from raycloak.coordinator.console.output import Output
from raycloak.metrics.file_errors import require_absent

if TYPE_CHECKING:
    from raycloak.coordinator.checkpoints.reader import VerifiedPackage

package = typer.Typer(help="Sealed packages: recipients, trusted signers, verification.")

PackagePath = Annotated[str, typer.Argument(metavar="PATH", help="Folder, file or s3:// URL of one package.")]
OfRun = Annotated[str | None, typer.Option("--run", metavar="ID", help="Refuse a package of another run.")]
OfStep = Annotated[int | None, typer.Option("--step", metavar="N", help="Refuse a package of another step.")]
Trust = Annotated[Path, typer.Option("--trust", metavar="STORE", help="Trust store of the reader.")]


@command(package, "keygen")
def keygen_command(
    output: Output, file: Annotated[Path, typer.Argument(metavar="FILE", help="New private key file.")]
) -> None:
    """Make a recipient's key pair: FILE stays with its owner, FILE.pub goes into checkpoint.recipients of a run."""
    from raycloak.attestation.sealed.package_keys import create_recipient

    public, public_path = create_recipient(file)
    facts = {"name": public.name, "key_id": public.key_id, "private": str(file), "public": str(public_path)}
    output.show("Recipient", facts)


@command(package, "trust")
def trust_command(
    output: Output,
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Trust store; created if missing.")],
    signer: Annotated[Path, typer.Option(metavar="FILE", help="Public file of the signer.")],
    name: Annotated[str, typer.Option(help="Name of this signer in the store.")],
) -> None:
    """Add a signer to a trust store. Get the signer's file over a channel that you trust."""
    from raycloak.attestation.sealed.package_keys import TrustStore, load_signer

    known = TrustStore.load(store) if store.exists() else TrustStore()
    public = load_signer(signer)
    known.with_signer(name, public).save(store)
    output.show("Trusted signer", {"name": name, "key_id": public.key_id, "store": str(store)})


@command(package, "verify")
def verify_command(output: Output, path: PackagePath, trust: Trust, run: OfRun = None, step: OfStep = None) -> None:
    """Check signatures and every byte of a package; needs no key. Exit code 3 if it is refused."""
    from raycloak.coordinator.checkpoints.reader import Expected, package_at

    with package_at(path, trust, Expected(run_id=run, step=step)) as found:
        _show(output, found)


@command(package, "open")
def open_command(
    output: Output,
    path: PackagePath,
    trust: Trust,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private key of a recipient.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New safetensors file.")],
    run: OfRun = None,
    step: OfStep = None,
) -> None:
    """Verify a package, and decrypt its parameters to a safetensors file."""
    from raycloak.attestation.sealed.package_keys import load_recipient_key
    from raycloak.coordinator.checkpoints.reader import Expected, open_to_file, package_at

    own = load_recipient_key(key)
    require_absent(out)
    with package_at(path, trust, Expected(run_id=run, step=step)) as found:
        open_to_file(found, found.unwrap(own), out)
        _show(output, found, out=str(out))


def _show(output: Output, found: "VerifiedPackage", **more: str) -> None:
    """Show what the package states, without keys and payload tables."""
    manifest = found.manifest
    facts = {
        "verified": True,
        "signer": found.signer,
        **manifest.model_dump(mode="json", exclude={"format", "payloads", "recipients"}),
        "package_digest": manifest.digest(),
        "recipients": [recipient.name for recipient in manifest.recipients],
        **more,
    }
    output.show("Package (SIMULATED evidence)" if "simulated" in manifest.evidence_class else "Package", facts)
