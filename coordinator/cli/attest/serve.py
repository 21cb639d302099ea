"""``raycloak attest serve``: the evidence service as a command."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raycloak.coordinator.cli.options import command, ended_by_signals
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.quick_imports import quickly
from raycloak.metrics.errors import RunFailedError

# How soon a failed record ends the command; a signal ends the wait at once.
_LOOK_S = 0.5


@command
def serve_command(
    output: Output,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the service.", show_default=False)],
) -> int:
    """Attest members over gRPC and give them their keys until SIGTERM or Ctrl-C; first prints where it listens."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # every refused handshake would be a line
    with quickly():  # a full collection is a pause for every member
        from raycloak.attestation.keys.run_secret import exposure
        from raycloak.coordinator.console.tables import facts_table
        from raycloak.coordinator.evidence.standalone_service import load_service, start_service

    with ended_by_signals() as ended:
        loaded = load_service(config)
        if (warning := exposure(config.parent / loaded.run_secret)) is not None:
            output.note(warning)
        server, session, facts = start_service(loaded, config.parent)
        output.result(asdict(facts), facts_table(f"Evidence service ({facts.evidence} evidence)", asdict(facts)))
        while not ended.wait(_LOOK_S) and server.failure is None:
            pass
        server.stop()
        session.run.close()
    if server.failure is not None:
        cause = type(server.failure).__name__
        raise RunFailedError("service_failed", f"the service could not write its record ({cause}).", "Free the disk.")
    return 0
