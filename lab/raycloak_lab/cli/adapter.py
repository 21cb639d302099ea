"""The commands ``raycloak-lab adapter``: serve an adapter over encrypted activations, and show a client's key."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raycloak.coordinator.cli.options import RUN_OR_OTHER, command, ended_by_signals
from raycloak.coordinator.console.output import Output

adapter = typer.Typer(help="Adapters over encrypted activations (experimental).")


@command(adapter, "serve")
def serve_command(
    output: Output,
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN|PACKAGE", help=f"Adapter, as a {RUN_OR_OTHER}; or a sealed package.", show_default=False
        ),
    ],
    settings: Annotated[Path, typer.Argument(metavar="SETTINGS", help="YAML file of the server.", show_default=False)],
    config: Annotated[Path | None, typer.Option(help="Configuration that names a package's model.")] = None,
    trust: Annotated[Path | None, typer.Option(help="Trust store of a package's reader.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of one of a package's recipients.")] = None,
) -> None:
    """Answer encrypted batches until SIGTERM or Ctrl-C; first prints the address for clients.

    It hides clients' hidden states from the server. It does not hide the adapter from clients: see
    docs/encrypted-adapters.md.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # every refused handshake would be a line
    from raycloak_lab.adapter.serve import served_adapter
    from raycloak_lab.adapter.settings import load_settings

    terms = load_settings(settings)
    output.announce("starting the worker, which reads the adapter")
    with (
        served_adapter(path, terms, trust, key, config) as facts,
        # Not before: a signal ends a start at once, though reading the adapter can take minutes.
        ended_by_signals() as ended,
    ):
        output.show(f"Encrypted adapter ({facts.evidence} evidence)", asdict(facts))
        ended.wait()


@command(adapter, "identity")
def identity_command(output: Output) -> None:
    """Print the key that an adapter's owner names this client by; made at the first call."""
    from raycloak.attestation.core.keys import IdentityKey
    from raycloak.attestation.keys.run_secret import load_secret
    from raycloak_lab.adapter.places import identity_file

    key = IdentityKey.from_seed(load_secret(identity_file())).public.hex()
    output.show("Client of encrypted adapters", {"identity_key": key})
