"""The commands ``raycloak-lab bench ...``: measurements that only raycloak's developers need."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table

from raycloak.coordinator.cli.options import ConfigFile, Overrides, command
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.console.figures import size_text, value_text
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.console.tables import columns_table
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from raycloak.workers.vectors.ring import RingBits
    from raycloak_lab.bench.device_words import DeviceWordsBench
    from raycloak_lab.bench.gradient import GradientBench, MethodFigures, RoundSpread

bench = typer.Typer(help="Measurements on this machine.")


@command(bench, "mask")
def mask_command(
    output: Output,
    params: Annotated[int, typer.Option(help="Coordinates of the vector.")] = 10_000_000,
    workers: Annotated[int, typer.Option(help="Workers of the roster.")] = 8,
    colluding_workers: Annotated[
        int | None, typer.Option(help="Number that a sparse mask graph withstands; also compares with 32 workers.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Width of the ring, 32 or 64.")] = 32,
) -> None:
    """Clamp, encode, mask and tag one worker's vector on one core, compared with bare ChaCha20 keystreams."""
    from raycloak_lab.bench.mask import bench_mask

    result = bench_mask(params, workers, _ring_bits(bits), colluding_workers=colluding_workers)
    output.show("bench mask", asdict(result))


def _ring_bits(bits: int) -> "RingBits":
    if bits not in (32, 64):
        raise ConfigError("ring_bits", f"a ring of {bits} bits does not exist.", "Give 32 or 64.")
    return cast("RingBits", bits)


@command(bench, "words")
def words_command(
    output: Output,
    params: Annotated[int, typer.Option(help="Coordinates of the vector.")] = 10_000_000,
    threads: Annotated[int | None, typer.Option(help="Threads beside one; all CPUs of this process if absent.")] = None,
    peers: Annotated[int, typer.Option(help="Masks of the vector, and vectors of the aggregator's sum.")] = 3,
    bits: Annotated[int, typer.Option(help="Width of the ring, 32 or 64.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which both sides have a turn.")] = 7,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: the words of a GPU beside the CPU's on its threads.")
    ] = "cpu",
) -> None:
    """Compare the words of a step on one thread and on several, byte by byte, and time both; or on a GPU."""
    from raycloak.workers.vectors.threads import WordThreads
    from raycloak_lab.bench.device_words import bench_device_words
    from raycloak_lab.bench.gpu_use import bench_device
    from raycloak_lab.bench.words import bench_words

    place, count = bench_device(device), WordThreads.of_share().count if threads is None else threads
    if place.type != "cpu":
        found = bench_device_words(place, params, count, _ring_bits(bits), peers, rounds)
        output.result(asdict(found), _device_words_table(found))
        return
    result = bench_words(params, count, _ring_bits(bits), peers, rounds)
    title = (
        f"bench words: {params:,} parameters, {result.bits} bits, {count} threads on {result.cpus} CPUs, load "
        f"{result.load:.1f}; of linear {result.together_of_linear:.2f} together, {result.cores_of_linear:.2f} possible"
    )
    headers = ("words", "ns a parameter, 1 thread", f"{count} threads", "of linear", "over a copy")
    rows = [
        (
            name,
            f"{each.alone_seconds / params * 1e9:.2f}",
            f"{each.seconds / params * 1e9:.2f}",
            f"{each.of_linear:.2f}",
            f"{each.over_copy:.1f}",
        )
        for name, each in result.phases.items()
    ]
    output.result(asdict(result), columns_table(title, headers, rows))


def _device_words_table(result: "DeviceWordsBench") -> Table:
    """Return the table of words on a GPU."""
    title = (
        f"bench words: {result.params:,} parameters, {result.bits} bits, {result.device}, which copies "
        f"{result.copy_bytes_per_second / 1e9:.0f} GB/s"
    )
    rows = [
        (
            name,
            value_text(each.cpu_seconds),
            value_text(each.seconds),
            f"{each.cpu_seconds / each.seconds:.1f}",
            "" if each.of_copy is None else f"{each.of_copy:.2f}",
        )
        for name, each in result.phases.items()
    ]
    headers = ("words", f"CPU, {result.threads} thread(s), s", "device, s", "times as fast", "of a copy")
    return columns_table(title, headers, rows)


@command(bench, "step")
def step_command(
    output: Output,
    config: ConfigFile,
    overrides: Overrides = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="PEER", help="bare-ray (a program of the same calls) or opacus takes turns with it."),
    ] = None,
) -> None:
    """Time the phases of CONFIG's steps on Ray."""
    from raycloak_lab.bench.step import bench_step

    result = bench_step(load_config(config, overrides), config_dir=config.parent, against=against)
    output.show("bench step", asdict(result))


@command(bench, "start")
def start_command(
    output: Output,
    config: ConfigFile,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="Starts of each program, in turns.", min=1)] = 3,
) -> None:
    """Time CONFIG's run from its command to its first step, beside a bare Ray program of as many actors."""
    from raycloak_lab.bench.start import bench_start

    result = bench_start(load_config(config, overrides), config, tuple(overrides or ()), rounds)
    facts = asdict(result)
    rows = [(name.replace("_", " "), value_text(value)) for name, value in facts.items() if not isinstance(value, dict)]
    rows += [(f"phase: {name}", value_text(seconds)) for name, seconds in result.phases.items()]
    for name, seconds in result.processes.items():
        bare = value_text(result.bare_ray_processes.get(name, 0.0))
        rows.append((f"processor s: {name}", f"{value_text(seconds)}, bare {bare}"))
    output.show("bench start", facts, rows)


@command(bench, "gradient")
def gradient_command(
    output: Output,
    model: Annotated[str, typer.Argument(help="digits, cnn, mlp, bert, bert-lora, gpt2, gpt2-lora or llama-lora.")],
    against: Annotated[
        str, typer.Option(metavar="PEERS", help="Any of opacus, ghost, plain and units, by commas.")
    ] = "opacus,ghost,plain",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of torch, for every method.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which every method has one turn.")] = 7,
) -> None:
    """Sum the clipped gradients of MODEL beside Opacus and non-private training: speed, memory, and the right sum."""
    from raycloak_lab.bench.gradient import bench_gradient
    from raycloak_lab.bench.gradient_cases import case_named

    result = bench_gradient(case_named(model), against.split(","), device=device, threads=threads, rounds=rounds)
    output.result(asdict(result), _gradient_table(result))


@command(bench, "checks")
def checks_command(
    output: Output,
    layers: Annotated[int, typer.Option(help="Layers of the Llama.", min=1)] = 16,
    width: Annotated[int, typer.Option(help="Its hidden size, a multiple of 64.", min=64)] = 2048,
    tokens: Annotated[int, typer.Option(help="Tokens of an example.", min=2)] = 4,
) -> None:
    """Time the checks that a worker makes of a Llama with LoRA, frozen in bfloat16, before anything is charged."""
    from raycloak_lab.bench.checks import bench_checks

    output.show("bench checks", asdict(bench_checks(layers, width, tokens)))


def _gradient_table(result: "GradientBench") -> Table:
    title = (
        f"bench gradient {result.model}: {result.parameters:,} trained parameters, {result.micro_batches} x "
        f"{result.rows} rows, {result.device}, {result.threads} thread(s), {result.rounds} rounds, {result.clock} time"
    )
    ours = {
        "plain": result.vs_nonprivate,
        "units": result.units_vs_rows,
        "opacus": result.vs_opacus_hooks,
        "ghost": result.vs_opacus_ghost,
    }

    def on_gpu(figures: "MethodFigures") -> tuple[str, ...]:
        use = figures.gpu
        return (f"{use.launches:,}", f"{use.synchronisations:,}", value_text(figures.gpu_busy)) if use else ()

    rows = [
        (name, f"refused: {figures.refused}")
        if figures.refused
        else (
            name,
            _range_text(figures.seconds),
            _range_text(figures.vs_nonprivate),
            _range_text(ours.get(name)),
            "" if figures.sum_error is None else f"{figures.sum_error:.1e}",
            "" if figures.peak_extra_bytes is None else size_text(figures.peak_extra_bytes),
            value_text(figures.memory_vs_nonprivate),
            *on_gpu(figures),
        )
        for name, figures in result.methods.items()
    ]
    headers = ["method", "seconds", "vs non-private", "ours vs it", "error", "peak memory", "vs non-private"]
    if any(figures.gpu for figures in result.methods.values()):
        headers += ["launches", "waits", "GPU busy"]
    return columns_table(title, headers, rows)


def _range_text(spread: "RoundSpread | None") -> str:
    return "" if spread is None else f"{spread.median:.3g} ({spread.low:.3g} to {spread.high:.3g})"


@command(bench, "sandbox")
def sandbox_command(
    output: Output,
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which both ways have one turn.")] = 21,
) -> None:
    """Time a worker's step with the model behind walls, in a process without keys, network and writable files."""
    from raycloak_lab.bench.sandbox import bench_sandbox

    result = bench_sandbox(rounds)
    rows = [
        (
            each.model,
            f"{each.parameters:,}",
            f"{each.micro_batches} x {each.rows}",
            value_text(each.processor_ms),
            value_text(each.sandboxed_processor_ms),
            _range_text(each.processor_ratio),
            _range_text(each.wall_ratio),
        )
        for each in result.models
    ]
    headers = ("model", "parameters", "rows", "processor ms", "behind walls", "ratio", "ratio of wall time")
    output.result(asdict(result), columns_table(f"bench sandbox, {rounds} rounds", headers, rows))


@command(bench, "chaos")
def chaos_command(
    output: Output,
    config: ConfigFile,
    kills: Annotated[int, typer.Option(help="Number of signals to send to processes of the run.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the damage: what is hit, how and when.")] = 0,
    nodes_lost: Annotated[int, typer.Option(help="Number of cluster nodes to kill as well.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 4 also for a missed expectation.")] = False,
    overrides: Overrides = None,
) -> int:
    """Kill and stop processes of a run, and compare it with the undisturbed one; exit code 4 for a broken promise."""
    from raycloak_lab.bench.chaos.chaos import Damage, bench_chaos
    from raycloak_lab.bench.chaos.report import chaos_view

    damage, given = Damage(kills, seed, nodes_lost), tuple(overrides or ())
    result = bench_chaos(load_config(config, overrides), config, damage, overrides=given, notice=output.announce)
    output.result(asdict(result), chaos_view(result))
    missed = strict and not all(each.met for each in result.expectations)
    return 4 if result.breaches or missed else 0


@command(bench, "adapter")
def adapter_command(output: Output) -> None:
    """Answer one encrypted block for widths 384, 768 and 4096, beside the clear adapter and TenSEAL's own product."""
    from raycloak_lab.bench.adapter import bench_adapter

    result = asdict(bench_adapter())
    widths = result["widths"]
    rows = [(name.replace("_", " "), *(value_text(each[name]) for each in widths)) for name in list(widths[0])[1:]]
    title = f"bench adapter (median of {result['runs']}, processor time)"
    output.result(result, columns_table(title, ("", *(str(each["width"]) for each in widths)), rows))


@command(bench, "attest")
def attest_command(
    output: Output,
    connections: Annotated[int, typer.Option(help="Workers to attest, each over a connection of its own.")] = 2000,
    concurrency: Annotated[int, typer.Option(help="Workers that attest at the same time.")] = 16,
    held: Annotated[int, typer.Option(help="Idle, half-open and slow connections to hold meanwhile.")] = 0,
) -> None:
    """Attest simulated workers over the gRPC evidence service: handshake, challenge, appraisal, keys. SIMULATED."""
    from raycloak_lab.bench.attest import bench_attest

    output.show("bench attest (SIMULATED)", asdict(bench_attest(connections, concurrency, held)))


@command(bench, "service")
def service_command(
    output: Output, clients: Annotated[int, typer.Option(help="Clients that call at the same time.")] = 16
) -> None:
    """Time operations through a training service whose drivers train nothing, beside Ray actors and bare gRPC."""
    from raycloak_lab.bench.service import bench_service

    output.show("bench service", asdict(bench_service(clients)))
