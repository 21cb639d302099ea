"""The commands ``raycloak-lab bench ...``: measurements that only raycloak's developers need."""

from dataclasses import asdict
from typing import Annotated

import typer

from raycloak.coordinator.cli.bench import measured
from raycloak.coordinator.cli.options import AsJson, Debug, execute
from raycloak.coordinator.console.output import Output

bench = typer.Typer(help="Measurements on this machine.")


@bench.command("adapter")
def adapter_command(as_json: AsJson = False, debug: Debug = False) -> None:
    """Answer one encrypted block for widths 384, 768 and 4096, beside the clear adapter and TenSEAL's own product."""
    execute(as_json, debug, _bench_adapter)


def _bench_adapter(output: Output) -> int:
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
def attest_command(
    connections: Annotated[int, typer.Option(help="Workers to attest, each over a connection of its own.")] = 2000,
    concurrency: Annotated[int, typer.Option(help="Workers that attest at the same time.")] = 16,
    held: Annotated[int, typer.Option(help="Idle, half-open and slow connections to hold meanwhile.")] = 0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Attest simulated workers over the gRPC evidence service: handshake, challenge, appraisal, keys. SIMULATED."""
    execute(as_json, debug, lambda output: _bench_attest(output, connections, concurrency, held))


def _bench_attest(output: Output, connections: int, concurrency: int, held: int) -> int:
    from raycloak_lab.bench.attest import bench_attest

    return measured(output, "bench attest (SIMULATED)", bench_attest(connections, concurrency, held))


@bench.command("service")
def service_command(
    clients: Annotated[int, typer.Option(help="Clients that call at the same time.")] = 16,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time operations through a training service whose drivers train nothing, beside Ray actors and bare gRPC."""
    execute(as_json, debug, lambda output: _bench_service(output, clients))


def _bench_service(output: Output, clients: int) -> int:
    from raycloak_lab.bench.service import bench_service

    return measured(output, "bench service", bench_service(clients))
