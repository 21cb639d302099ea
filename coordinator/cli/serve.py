"""``raycloak serve``: the training service as a command."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.attestation.processes.channel import Channel
from raycloak.coordinator.cli.options import LOOK_S, ended_by_signals
from raycloak.coordinator.client.local_service import Listening
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.quick_imports import quickly
from raycloak.metrics.errors import ConfigError, RunFailedError

if TYPE_CHECKING:
    from raycloak.coordinator.service.service import TrainingServiceFacts


def serve_command(
    output: Output,
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML file of the service.")] = None,
    base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder that relative paths start from; default: CONFIG's.")
    ] = None,
    token: Annotated[bool, typer.Option("--token", help="Instead make a token, and show it this once.")] = False,
) -> None:
    """Train for clients over gRPC until SIGTERM or Ctrl-C; first prints where it listens.

    At the end each run stops after its step; the next start goes on with it.
    """
    if token:
        if config is not None:
            raise ConfigError("usage", "--token takes no CONFIG.", "Add the line that it prints to a tenant there.")
        from raycloak.coordinator.service.tenants import new_token

        made, digest = new_token()
        rows = [("token, for the client", made), ("line of token_sha256", f'{{sha256: "{digest}"}}')]
        output.show("Token; it is shown this once", {"token": made, "sha256": digest}, rows)
    elif config is None:
        raise ConfigError("usage", "no CONFIG is given.", "Name the YAML file of the service, or give --token.")
    else:
        _serve(config, base, lambda facts: output.show(f"Training service ({facts.evidence} evidence)", asdict(facts)))


def serve_parent(parent: Channel, config: str, base: str) -> None:
    """Serve the program that this process is a child of, and tell it where; see `LocalService`."""
    keep_memory_private()
    _serve(Path(config), Path(base), lambda facts: parent.send(Listening(address=facts.address)))


def _serve(path: Path, base: Path | None, announce: "Callable[[TrainingServiceFacts], None]") -> None:
    """Serve until SIGTERM or Ctrl-C."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # every refused handshake would be a line
    with quickly():  # a full collection is a pause for every client
        from raycloak.coordinator.service.settings import load_settings, require_modules

        # Before the libraries of a service, which take longer to import.
        settings, base = load_settings(path), (base or path.parent).resolve()
        require_modules(settings, base)
        from raycloak.coordinator.service.service import TrainingService

    with ended_by_signals() as ended:
        with TrainingService(settings, base) as service:
            announce(service.facts)
            while not ended.wait(LOOK_S) and service.failure is None:
                pass
        failure = service.failure
    if failure is not None:
        cause = type(failure).__name__
        raise RunFailedError("service_failed", f"the service could not write its store ({cause}).", "Start it again.")
