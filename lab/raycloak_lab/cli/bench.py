"""The commands ``raycloak-lab bench ...``: measurements that only raycloak's developers need."""

from dataclasses import asdict
from typing import Annotated

import typer

from raycloak.coordinator.cli.bench import measured
from raycloak.coordinator.cli.options import command
from raycloak.coordinator.console.output import Output

bench = typer.Typer(help="Measurements on this machine.")


@bench.command("adapter")
@command
def adapter_command(output: Output) -> int:
    """Answer one encrypted block for widths 384, 768 and 4096, beside the clear adapter and TenSEAL's own product."""
    from rich.table import Table

    from raycloak.coordinator.console.figures import value_text
    from raycloak_lab.bench.adapter import bench_adapter

    result = asdict(bench_adapter())
    table = Table(
        title=f"bench adapter (median of {result['runs']}, processor time)", title_justify="left", title_style="bold"
    )
    for header in ("", *(str(each["width"]) for each in result["widths"])):
        table.add_column(header)
    for name in list(result["widths"][0])[1:]:
        table.add_row(name.replace("_", " "), *(value_text(each[name]) for each in result["widths"]))
    output.result(result, table)
    return 0


@bench.command("attest")
@command
def attest_command(
    output: Output,
    connections: Annotated[int, typer.Option(help="Workers to attest, each over a connection of its own.")] = 2000,
    concurrency: Annotated[int, typer.Option(help="Workers that attest at the same time.")] = 16,
    held: Annotated[int, typer.Option(help="Idle, half-open and slow connections to hold meanwhile.")] = 0,
) -> int:
    """Attest simulated workers over the gRPC evidence service: handshake, challenge, appraisal, keys. SIMULATED."""
    from raycloak_lab.bench.attest import bench_attest

    return measured(output, "bench attest (SIMULATED)", bench_attest(connections, concurrency, held))


@bench.command("service")
@command
def service_command(
    output: Output, clients: Annotated[int, typer.Option(help="Clients that call at the same time.")] = 16
) -> int:
    """Time operations through a training service whose drivers train nothing, beside Ray actors and bare gRPC."""
    from raycloak_lab.bench.service import bench_service

    return measured(output, "bench service", bench_service(clients))
