"""The prediction of `raycloak-lab scale` as tables: check, assumptions, a row for each size and for each width."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from raycloak.coordinator.console.tables import fields_table
from raycloak_lab.scale.calibration import Check
from raycloak_lab.scale.devices import DeviceScale
from raycloak_lab.scale.simulation import RefusedSize, Scale, ScaleConfig

SIZES = (
    "workers",
    "parameters",
    "bits",
    "sent",
    "worker",
    "aggregators",
    "store",
    "computing",
    "network",
    "first limit",
)
"""``sent`` is by each worker in a step; ``computing`` is a worker's time and then an aggregator's."""

DEVICES = ("workers", "GPUs", "frozen", "trained", "sums", "rows", "words", "together", "words take", "model takes")
"""Of the fullest GPU of a worker. ``rows`` are all micro-batches under way; times are the least."""

THREADS = (1, 8, 32)
"""Of a worker whose host computes words."""

_UNKNOWN = "not known"

WIDTHS = ("workers", "masks", "control", "start", "ledger")


class ScaleTables:
    """Printed as four tables, with more of workers on GPUs and of a large model."""

    def __init__(self, assumed: ScaleConfig, found: Sequence[Scale | RefusedSize], checked: Check) -> None:
        self._assumed, self._found, self._checked = assumed, found, checked

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        checked = self._checked
        told = (
            f"{checked.parameters:,} parameters and {checked.workers} workers took {checked.measured_seconds:.2f} s of "
            f"processor time, predicted {checked.predicted_seconds:.2f} s ({checked.ratio:.2f})"
        )
        assumed = [(name.replace("_", " "), str(value)) for name, value in self._assumed.model_dump().items()]
        yield fields_table("Check: a step beyond what was measured", [("a step of", told)])
        yield fields_table("Assumed, not measured", assumed)
        predicted = [each for each in self._found if isinstance(each, Scale)]
        rows = [_row(each) if isinstance(each, Scale) else _refused(each) for each in self._found]
        yield _table("A step after the first, without the gradient", SIZES, rows)
        on_devices = [(each, device) for each in predicted for device in each.devices]
        if on_devices:
            yield _table("The fullest GPU of a worker in a step", DEVICES, [_device(*each) for each in on_devices])
            yield fields_table("Its rates", [("", source) for source in on_devices[0][1].sources or (_UNKNOWN,)])
        if self._assumed.model:
            on_threads = [f"{threads} thread" + "s" * (threads > 1) for threads in THREADS]
            words = [(f"{each.workers:,}", *map(_seconds, _word_seconds(each))) for each in predicted]
            yield _table("Words on a worker's host instead, at least", ("workers", *on_threads), words)
            yield _table("What breaks first", ("workers", *["limit"] * 4), [_limits(each) for each in predicted])
        widths = {each.workers: _width(each) for each in reversed(predicted)}
        yield _table("By workers", WIDTHS, [widths[workers] for workers in sorted(widths)])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _row(size: Scale) -> tuple[str, ...]:
    chosen = next(each for each in size.aggregators if each.ranks == size.ranks)
    return (
        f"{size.workers:,}",
        _count(size.parameters),
        str(size.ring_bits),
        _size(size.up_bytes),
        _size(size.worker_bytes),
        f"{size.ranks} x {_size(chosen.bytes)}",
        _size(size.store_bytes),
        _seconds(size.worker_seconds + chosen.seconds),
        _seconds(chosen.gather_seconds + chosen.spread_seconds),
        _limit(size, size.first_limit),
    )


def _device(size: Scale, device: DeviceScale) -> tuple[str, ...]:
    limit = _UNKNOWN if device.limit_bytes is None else _size(device.limit_bytes)
    together, full = f"{_size(device.memory_bytes)} of {limit}", device.fullest
    breaks = device.limit_bytes is not None and device.memory_bytes > device.limit_bytes
    times = (device.words_seconds, device.model_seconds)
    held = (full.frozen, full.parameters, full.sums, full.micro_batches, device.words_bytes)
    return (
        f"{size.workers:,}",
        str(device.gpus),
        *map(_size, held),
        f"[red]{together}[/red]" if breaks else together,
        *(_UNKNOWN if seconds is None else _seconds(seconds) for seconds in times),
    )


def _word_seconds(size: Scale) -> list[float]:
    """Return a worker's seconds for its words by `THREADS`, if threads share the work evenly."""
    return [(size.vector_seconds + size.mask_seconds) / threads for threads in THREADS]


def _limits(size: Scale) -> tuple[str, ...]:
    """Return the limits that are used most."""
    most = sorted(size.uses, key=lambda limit: -size.uses[limit])[:4]
    return (f"{size.workers:,}", *(_limit(size, limit) for limit in most))


def _limit(size: Scale, limit: str) -> str:
    told = f"{limit} {100 * size.uses[limit]:.0f} %"
    return f"[red]{told}[/red]" if size.uses[limit] > 1 else told


def _width(size: Scale) -> tuple[str, ...]:
    return (
        f"{size.workers:,}",
        f"{size.mask_degree} each",
        _seconds(size.control_seconds),
        _seconds(size.start_seconds),
        f"{size.ledger_steps_per_second:.0f} steps/s",
    )


def _refused(size: RefusedSize) -> tuple[str, ...]:
    return (f"{size.workers:,}", _count(size.parameters), *[""] * (len(SIZES) - 3), f"[red]{size.code}[/red]")


def _count(parameters: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6)):
        if parameters >= scale:
            return f"{parameters / scale:g} {unit}"
    return f"{parameters:,}"


def _size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9)):
        if count >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count / 1e6:.0f} MB"


def _seconds(value: float) -> str:
    return f"{_digits(value)} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
