"""The commands ``raycloak bench ...``: measurements on this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raycloak.coordinator.cli.options import AsJson, ConfigFile, Debug, Overrides, execute
from raycloak.coordinator.config.run import RunConfig, load_config
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.table import Table

    from raycloak.coordinator.bench.chaos.chaos import Damage
    from raycloak.coordinator.bench.gradient import GradientBench, RoundSpread
    from raycloak.coordinator.bench.start import StartBench

bench = typer.Typer(help="Measurements on this machine.")

Bits = Annotated[int, typer.Option(help="Width of the ring, 32 or 64.")]


@bench.command("mask")
def mask_command(
    params: Annotated[int, typer.Option(help="Coordinates of the vector.")] = 10_000_000,
    workers: Annotated[int, typer.Option(help="Workers of the roster.")] = 8,
    colluding_workers: Annotated[
        int | None, typer.Option(help="Number that a sparse mask graph withstands; also compares with 32 workers.")
    ] = None,
    bits: Bits = 32,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Clamp, encode, mask and tag one worker's vector on one core, compared with bare ChaCha20 keystreams."""
    execute(as_json, debug, lambda output: _bench_mask(output, params, workers, _ring_bits(bits), colluding_workers))


def _bench_mask(output: Output, params: int, workers: int, bits: Literal[32, 64], colluding: int | None) -> int:
    from raycloak.coordinator.bench.mask import bench_mask

    return _measured(output, "bench mask", bench_mask(params, workers, bits, colluding_workers=colluding))


@bench.command("noise")
def noise_command(
    draws: Annotated[int, typer.Option(help="Draws per run.")] = 1_000_000,
    sigma: Annotated[float, typer.Option(help="Standard deviation in ring units.")] = 1e4,
    bits: Bits = 32,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Draw integer Gaussian noise on one core."""
    execute(as_json, debug, lambda output: _bench_noise(output, draws, sigma, _ring_bits(bits)))


def _bench_noise(output: Output, draws: int, sigma: float, bits: Literal[32, 64]) -> int:
    from raycloak.coordinator.bench.noise import bench_noise

    return _measured(output, "bench noise", bench_noise(draws, sigma, bits))


@bench.command("adapter")
def adapter_command(as_json: AsJson = False, debug: Debug = False) -> None:
    """Answer one encrypted block for widths 384, 768 and 4096, beside the clear adapter and TenSEAL's own product."""
    execute(as_json, debug, _bench_adapter)


def _bench_adapter(output: Output) -> int:
    from rich.table import Table

    from raycloak.coordinator.bench.adapter import bench_adapter
    from raycloak.coordinator.console.figures import value_text

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


@bench.command("step")
def step_command(
    config: ConfigFile,
    overrides: Overrides = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="PEER", help="bare-ray (a program of the same calls) or opacus takes turns with it."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time the phases of CONFIG's steps on Ray."""
    execute(as_json, debug, lambda output: _bench_step(output, load_config(config, overrides), config.parent, against))


def _bench_step(output: Output, config: RunConfig, config_dir: Path, against: str | None) -> int:
    from raycloak.coordinator.bench.step import bench_step

    return _measured(output, "bench step", bench_step(config, config_dir=config_dir, against=against))


@bench.command("start")
def start_command(
    config: ConfigFile,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="Starts of each program, in turns.", min=1)] = 3,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time CONFIG's run from its command to its first step, beside a bare Ray program of as many actors."""
    execute(as_json, debug, lambda output: _bench_start(output, config, tuple(overrides or ()), rounds))


def _bench_start(output: Output, path: Path, overrides: tuple[str, ...], rounds: int) -> int:
    from raycloak.coordinator.bench.start import bench_start

    result = bench_start(load_config(path, list(overrides)), path, overrides, rounds)
    output.result(asdict(result), _start_table(result))
    return 0


def _start_table(result: "StartBench") -> "Table":
    from raycloak.coordinator.console.figures import value_text
    from raycloak.coordinator.console.tables import fields_table

    rows = [
        (name.replace("_", " "), value_text(value))
        for name, value in asdict(result).items()
        if not isinstance(value, dict)
    ]
    rows += [(f"phase: {name}", value_text(seconds)) for name, seconds in result.phases.items()]
    for name, seconds in result.processes.items():
        bare = value_text(result.bare_ray_processes.get(name, 0.0))
        rows.append((f"processor s: {name}", f"{value_text(seconds)}, bare {bare}"))
    return fields_table("bench start", rows)


@bench.command("gradient")
def gradient_command(
    model: Annotated[str, typer.Argument(help="cnn, mlp, bert, bert-lora, gpt2, gpt2-lora or llama-lora.")],
    against: Annotated[
        str, typer.Option(metavar="PEERS", help="Any of opacus, ghost and plain, separated by commas.")
    ] = "opacus,ghost,plain",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of torch, for every method.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which every method has one turn.")] = 7,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Sum the clipped gradients of MODEL beside Opacus and non-private training: speed, memory, and the right sum."""
    execute(as_json, debug, lambda output: _bench_gradient(output, model, against.split(","), device, threads, rounds))


def _bench_gradient(output: Output, model: str, against: list[str], device: str, threads: int, rounds: int) -> int:
    from raycloak.coordinator.bench.gradient import bench_gradient
    from raycloak.coordinator.bench.gradient_cases import case_named

    result = bench_gradient(case_named(model), against, device=device, threads=threads, rounds=rounds)
    output.result(asdict(result), _gradient_table(result))
    return 0


def _gradient_table(result: "GradientBench") -> "Table":
    from rich.table import Table

    from raycloak.coordinator.console.figures import size_text, value_text

    table = Table(
        title=f"bench gradient {result.model}: {result.parameters:,} trained parameters, {result.micro_batches} x "
        f"{result.rows} rows, {result.device}, {result.threads} thread(s), {result.rounds} rounds, {result.clock} time",
        title_justify="left",
        title_style="bold",
    )
    for column in ("method", "seconds", "vs non-private", "ours vs it", "error", "peak memory", "vs non-private"):
        table.add_column(column)
    ours = {"plain": result.vs_nonprivate, "opacus": result.vs_opacus_hooks, "ghost": result.vs_opacus_ghost}
    for name, figures in result.methods.items():
        if figures.refused:
            table.add_row(name, f"refused: {figures.refused}")
            continue
        table.add_row(
            name,
            _range_text(figures.seconds),
            _range_text(figures.vs_nonprivate),
            _range_text(ours.get(name)),
            "" if figures.sum_error is None else f"{figures.sum_error:.1e}",
            "" if figures.peak_extra_bytes is None else size_text(figures.peak_extra_bytes),
            value_text(figures.memory_vs_nonprivate),
        )
    return table


def _range_text(spread: "RoundSpread | None") -> str:
    return "" if spread is None else f"{spread.median:.3g} ({spread.low:.3g} to {spread.high:.3g})"


@bench.command("chaos")
def chaos_command(
    config: ConfigFile,
    kills: Annotated[int, typer.Option(help="Number of signals to send to processes of the run.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the damage: what is hit, how and when.")] = 0,
    nodes_lost: Annotated[int, typer.Option(help="Number of cluster nodes to kill as well.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 4 also for a missed expectation.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Kill and stop processes of a run, and compare it with the undisturbed one; exit code 4 for a broken promise."""
    from raycloak.coordinator.bench.chaos.chaos import Damage

    damage = Damage(kills, seed, nodes_lost)
    execute(as_json, debug, lambda output: _bench_chaos(output, config, tuple(overrides or ()), damage, strict))


def _bench_chaos(output: Output, path: Path, overrides: tuple[str, ...], damage: "Damage", strict: bool) -> int:
    from raycloak.coordinator.bench.chaos.chaos import bench_chaos
    from raycloak.coordinator.bench.chaos.report import chaos_view

    config = load_config(path, list(overrides))
    result = bench_chaos(config, path, damage, overrides=overrides, notice=output.announce)
    output.result(asdict(result), chaos_view(result))
    missed = strict and not all(each.met for each in result.expectations)
    return 4 if result.breaches or missed else 0


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
    from raycloak.coordinator.bench.attest import bench_attest

    return _measured(output, "bench attest (SIMULATED)", bench_attest(connections, concurrency, held))


@bench.command("service")
def service_command(
    clients: Annotated[int, typer.Option(help="Clients that call at the same time.")] = 16,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time operations through a training service whose drivers train nothing, beside Ray actors and bare gRPC."""
    execute(as_json, debug, lambda output: _bench_service(output, clients))


def _bench_service(output: Output, clients: int) -> int:
    from raycloak.coordinator.bench.service import bench_service

    return _measured(output, "bench service", bench_service(clients))


def _ring_bits(bits: int) -> Literal[32, 64]:
    if bits == 32:
        return 32
    if bits == 64:
        return 64
    raise ConfigError("ring_bits", f"a ring of {bits} bits does not exist.", "Give 32 or 64.")


def _measured(output: Output, title: str, result: "DataclassInstance") -> int:
    from raycloak.coordinator.console.figures import value_text
    from raycloak.coordinator.console.tables import fields_table

    figures = asdict(result)
    rows = [(name.replace("_", " "), value_text(value)) for name, value in figures.items()]
    output.result(figures, fields_table(title, rows))
    return 0
