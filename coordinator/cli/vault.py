"""The command ``raycloak vault``: listens at a machine's socket for the relays of one role."""

from pathlib import Path
from threading import Thread
from typing import Annotated, Any

import typer

from raycloak.coordinator.cli.options import LOOK_S, ended_by_signals
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError


def vault_command(
    output: Output,
    role: Annotated[str, typer.Argument(help="ledger, orchestrator, aggregator, worker or platform.")],
    settings: Annotated[Path, typer.Argument(help="YAML file that says what the vaults serve; see docs/boundary.md.")],
) -> None:
    """Host the vaults of a role on this machine until SIGTERM or Ctrl-C; first prints where they listen.

    Start it before Ray, as a user of its own, whom Ray's user cannot enter.
    """
    from raycloak.attestation.policy.policy import simulated_policy
    from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
    from raycloak.coordinator.vaults.listener import Listener
    from raycloak.coordinator.vaults.settings import ROLES, PlatformSettings, read_settings

    if role not in ROLES:
        raise ConfigError("usage", f"there is no role '{role}'.", f"Name one of {', '.join(ROLES)}.")
    found = read_settings(role, settings)
    with Listener(role, found, settings) as listener, ended_by_signals() as ended:
        Thread(target=listener.run, daemon=True).start()
        facts: dict[str, Any] = {"role": role, "socket": found.socket, "peer": found.peer, "sessions": found.sessions}
        if isinstance(found, PlatformSettings):
            # What the settings of the other roles have to list for a run that names no policy.
            vendor = SimulatedVendor.load_or_create(Path(found.state))
            facts["simulated_policy"] = simulated_policy(vendor, code_measurement()).digest().hex()
        output.show("Vaults of this machine", facts)
        while not ended.wait(LOOK_S):
            pass
