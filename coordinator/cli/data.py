"""The commands ``raycloak data``: sealing examples before they leave their owner."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from raycloak.coordinator.cli.options import AsJson, ConfigFile, Debug, Overrides, execute
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.console.output import Output

data = typer.Typer(help="Data: encrypt a dataset so that only attested workers open it.")


@data.callback()
def _group() -> None:
    """Keep this a group of commands while it has only one."""


@data.command("seal")
def seal_command(
    config: ConfigFile,
    key: Annotated[
        Path, typer.Option(metavar="FILE", help="Key of the data owner; made if missing.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder.", show_default=False)],
    part: Annotated[
        Literal["training", "evaluation"], typer.Option(help="Seal CONFIG's dataset, or its evaluation.dataset.")
    ] = "training",
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Encrypt examples of CONFIG, one slice per virtual worker, for CONFIG's policy."""
    execute(as_json, debug, lambda output: _seal(output, config, overrides, key, out, part))


def _seal(
    output: Output,
    config: Path,
    overrides: list[str] | None,
    key: Path,
    out: Path,
    part: Literal["training", "evaluation"],
) -> int:
    from raycloak.coordinator.console.tables import fields_table, size_text
    from raycloak.coordinator.planning.sealing import seal_for

    header, policy = seal_for(load_config(config, overrides), config.parent, key, out, part)
    cipher_bytes = sum(each.cipher_bytes for each in header.slices)
    simulated = policy.accepts_simulated
    facts = {
        "path": str(out),
        "part": part,
        "key_file": str(key),
        "slices": header.virtual_workers,
        "bytes": cipher_bytes,
        "policy_digest": header.policy_digest.hex(),
        "simulated": simulated,
    }
    rows = [
        ("folder", f"{out}, for {part}"),
        ("slices", f"{header.virtual_workers}, {size_text(cipher_bytes)}"),
        ("opened by", "workers of a run under the policy " + header.policy_digest.hex()),
        ("key", f"{key}: keep it; {'' if part == 'training' else 'evaluation.'}dataset.key_file of a run names it"),
    ]
    output.result(
        facts, fields_table("Sealed data (SIMULATED evidence opens it)" if simulated else "Sealed data", rows)
    )
    return 0
