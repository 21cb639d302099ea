"""The figures of a run as SVG, drawn by matplotlib.

Hides the drawing library. A figure is a function of the record alone: the same record gives the same bytes, since ids
are derived from a fixed salt and nothing states a time. Text stays text, so it prints sharply and can be searched.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.calibration import composed_curve
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.planning.measurements import Schedule
from raycloak.coordinator.record.run_reader import Event, RunData
from raycloak.coordinator.report.facts import TEMPLATES, budget_of
from raycloak.workers.terms.manifest import Manifest

ACCENT: Final = "#0b5f83"
INK: Final = "#20262b"
MUTED: Final = "#6b747b"
PHASES: Final = {
    "charge": ("charge_seconds", "#0b5f83"),
    "compute": ("compute_seconds", "#6fa3bb"),
    "reduce": ("reduce_seconds", "#c3d9e2"),
    "other": ("", "#e6e6e6"),
}
POINTS: Final = 16
"""Points of the plan's line: the ledger quotes an account of `pld` at as many, and more would cost seconds."""
MOST_COLUMNS: Final = 60
"""Columns of the phases' figure: one a step up to here, then one for several steps, which a page can show."""

_WIDTH, _HEIGHT = 3.5, 2.45  # inches: two side by side on A4
_PLACE = (0.135, 0.165, 0.85, 0.735)


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure.

    Attributes:
        name: its anchor in the page.
        caption: what it shows and what it does not, a sentence or two.
        svg: without a prologue, to stand within a page.
    """

    name: str
    title: str
    caption: str
    svg: str


def drawings_of(run: RunData) -> tuple[Drawing, ...]:
    """Return the figures for which the run has a record, in the order of a page."""
    quality = _quality("accuracy", run), _quality("loss", run)
    drawn = (_epsilon(run), *quality, _counts(run), _phases(run), _members(run))
    return tuple(drawing for drawing in drawn if drawing is not None)


def _epsilon(run: RunData) -> Drawing | None:
    charged = _charged(run)
    if run.manifest is None or not charged:
        return None
    plan = _planned(run, run.manifest)
    cap, delta = budget_of(run)
    accountant = run.manifest.computation.mechanism.accountant
    with _axes("epsilon", "steps finished", f"ε at δ = {delta:g}") as (axes, finish):
        if cap is not None:
            axes.axhline(cap, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), label=f"cap of the account, {cap:g}")
        if plan:
            axes.plot(
                *zip((0, 0.0), *plan, strict=True), color=MUTED, linewidth=1.2, linestyle="--", label="this run's plan"
            )
        axes.step(*zip(*charged, strict=True), where="post", color=ACCENT, label="charged to the account")
        if len(charged) == 1:
            axes.plot(*charged[0], "o", color=ACCENT, markersize=3.5)
        axes.set_xlim(0, run.manifest.computation.mechanism.steps)
        axes.set_ylim(bottom=0)
        _whole_numbers(axes)
        axes.legend(loc="lower right")
        svg = finish()
    last = charged[-1]
    steps = " An account of this accountant is quoted in sixteenths of the plan." if accountant == "pld" else ""
    caption = (
        f"After step {last[0]} the account had been charged ε {epsilon_text(last[1])}, for all its runs together. "
        f"The plan's line is computed again from the manifest, for a fresh account.{steps}"
    )
    return Drawing("epsilon", "Budget against plan", caption, svg)


def _planned(run: RunData, manifest: Manifest) -> list[tuple[int, float]]:
    """Return (finished steps, epsilon) of the plan on a fresh account, measurements included; empty if not private."""
    computation = manifest.computation
    mechanism, plan = computation.mechanism, Schedule(computation.mechanism, computation.measurements)
    if not mechanism.private:
        return []
    cap, delta = budget_of(run)
    points = sorted({-(-mechanism.steps * point // POINTS) for point in range(1, POINTS + 1)})
    orders = None
    if cap is not None:
        limits = AccountLimits(cap, accountant_delta(delta), ORDERS)
        whole = plan.releases(mechanism.steps, mechanism.steps)
        # The orders that the ledger fixes when the run is registered, so that both lines are of one accountant.
        orders = accountant_of(mechanism.accountant).fixed_orders(whole, limits)
    releases = [plan.releases(point, point) for point in points]
    return list(zip(points, composed_curve(releases, delta, mechanism.accountant, orders), strict=True))


def _charged(run: RunData) -> list[tuple[int, float]]:
    """Return (finished steps, epsilon of the account) after each step, the measurements that follow it included."""
    found = {event["step"] + 1: event["epsilon"] for event in run.steps if "epsilon" in event}
    for event in run.of("measurement"):
        found[event["steps"]] = max(event["epsilon"], found.get(event["steps"], 0.0))
    return sorted(found.items())


def _quality(metric: str, run: RunData) -> Drawing | None:
    """Draw accuracy or loss: exact on an evaluation split, noised on the private examples."""
    field, scale = f"evaluation_{metric}", 100 if metric == "accuracy" else 1
    exact = [(event["step"] + 1, scale * event[field]) for event in run.steps if field in event]
    noised = [
        (each.after, scale * each.values[metric], scale * each.deviation[metric])
        for each in run.released
        if metric in each.values
    ]
    if not exact and not noised:
        return None
    split = "sealed split" if run.config.evaluation and run.config.evaluation.kept == "sealed" else "public split"
    with _axes(metric, "steps finished", "accuracy, %" if metric == "accuracy" else "mean loss") as (axes, finish):
        if noised:
            steps, values, deviations = np.array(noised).T
            twice = 2 * deviations
            axes.fill_between(steps, values - twice, values + twice, color=ACCENT, alpha=0.16, linewidth=0)
            axes.errorbar(
                steps,
                values,
                yerr=twice,
                color=MUTED,
                ecolor="#8fb4c6",
                linewidth=1.1,
                marker="s",
                markersize=3,
                capsize=2,
                label="private examples, noised (±2 σ)",
            )
        if exact:
            axes.plot(*zip(*exact, strict=True), color=ACCENT, marker="o", markersize=3, label=split)
        if run.manifest is not None:
            axes.set_xlim(0, run.manifest.computation.mechanism.steps * 1.02)
        _whole_numbers(axes)
        _legend_above(axes, 2)
        svg = finish()
    unit = " %" if metric == "accuracy" else ""
    said = []
    if exact:
        said.append(f"Last on the {split}: {exact[-1][1]:.4g}{unit} after step {exact[-1][0]}.")
    if noised:
        after, value, deviation = noised[-1]
        said.append(
            f"Last on the private examples: {value:.4g}{unit} ± {2 * deviation:.2g}{unit} after step {after}. The band "
            "is two standard deviations of the noise that privacy needs; it is no confidence interval of the model."
        )
    return Drawing(metric, metric.capitalize(), " ".join(said), svg)


def _counts(run: RunData) -> Drawing | None:
    """Draw the noised class counts; there is one release of them."""
    counts = next((each for each in run.released if each.query == "class_counts"), None)
    if counts is None:
        return None
    with _axes("class-counts", "class", "private examples") as (axes, finish):
        bars = list(counts.values.values())
        twice = [2 * each for each in counts.deviation.values()]
        line = {"elinewidth": 0.8, "capsize": 2}
        axes.bar(range(len(bars)), bars, color="#6fa3bb", width=0.7, yerr=twice, ecolor=INK, error_kw=line)
        axes.grid(visible=False, axis="x")
        axes.set_ylim(bottom=min(0.0, *bars))
        _whole_numbers(axes)
        svg = finish()
    caption = "Noised counts of the private examples of each class, with two standard deviations of the noise."
    return Drawing("class-counts", "Examples by class", caption, svg)


def _phases(run: RunData) -> Drawing | None:
    steps = run.steps
    if not steps:
        return None
    width = -(-len(steps) // MOST_COLUMNS)
    groups = [steps[first : first + width] for first in range(0, len(steps), width)]
    edges = [*(group[0]["step"] + 0.5 for group in groups), groups[-1][-1]["step"] + 1.5]
    with _axes("phases", "step", "seconds a step") as (axes, finish):
        # Twice the last, for its right edge.
        columns = [*groups, groups[-1]]
        means = [[fmean(_phase(event, field) for event in each) for each in columns] for field, _ in PHASES.values()]
        colours = [colour for _, colour in PHASES.values()]
        # One area a phase: a bar a step would be a thousand shapes.
        axes.stackplot(edges, means, labels=list(PHASES), colors=colours, step="post", linewidth=0)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(bottom=0)
        axes.grid(visible=False, axis="x")
        _whole_numbers(axes)
        _legend_above(axes, 4)
        svg = finish()
    total = sum(event["seconds"] for event in steps)
    shares = ", ".join(
        f"{name} {100 * sum(_phase(event, field) for event in steps) / (total or 1):.0f} %"
        for name, (field, _) in PHASES.items()
    )
    bars = f" Each column is the mean of up to {width} steps." if width > 1 else ""
    unit, unit_name = _time_unit(total)
    took = f"{len(steps)} steps took {total / unit:.1f} {unit_name}"
    caption = f"{took}: {shares}. Other is repeated attempts and waiting.{bars}"
    return Drawing("phases", "Where the time went", caption, svg)


def _phase(event: Event, field: str) -> float:
    if field:
        return float(event[field])
    known = sum(float(event[each]) for each, _ in PHASES.values() if each)
    return max(0.0, float(event["seconds"]) - known)


def _members(run: RunData) -> Drawing | None:
    """Draw the workers of each step over time, and the moments at which members left, joined or were restarted."""
    counted = [event for event in run.events if event["event"] in ("admitted", "step", "join") and "workers" in event]
    if not counted or not run.steps:
        return None
    start = run.events[0]["time"]
    unit, name = _time_unit(run.events[-1]["time"] - start)

    def at(event: Event) -> float:
        return float(event["time"] - start) / unit

    sizes = [event["workers"] for event in counted]
    marks = (("departure", "v", INK, "left"), ("join", "^", ACCENT, "joined"), ("restart", "D", MUTED, "restarted"))
    with _axes("members", f"{name} since the first record", "workers") as (axes, finish):
        axes.step([at(event) for event in counted], sizes, where="post", color=ACCENT)
        axes.set_ylim(0, max(sizes) * 1.35)
        for kind, marker, colour, label in marks:
            moments = [at(event) for event in run.of(kind)]
            if moments:
                heights = [max(sizes) * 1.14] * len(moments)
                axes.plot(moments, heights, marker, color=colour, markersize=5, label=f"{label} ({len(moments)})")
        for event in run.of("admitted")[1:]:
            axes.axvline(at(event), color=MUTED, linewidth=0.8, linestyle=":")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        if any(run.of(kind) for kind, *_ in marks):
            _legend_above(axes, 3)
        svg = finish()
    resumed = len(run.of("admitted")) - 1
    later = f" Dotted lines: the run was resumed {resumed} times." if resumed > 0 else ""
    size = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{max(sizes)}"
    caption = f"{size} workers; {len(run.of('departure'))} left, {len(run.of('join'))} joined later.{later}"
    return Drawing("members", "Workers over time", caption, svg)


@contextmanager
def _axes(name: str, x_label: str, y_label: str) -> Iterator[tuple[Axes, Callable[[], str]]]:
    """Give axes in the house style, and the function that turns them into SVG."""
    # Above the library's defaults: a user's own settings would be part of the bytes.
    with mpl.rc_context({"svg.hashsalt": f"raycloak-{name}"}, fname=TEMPLATES / "curves.mplstyle"):
        figure = Figure(figsize=(_WIDTH, _HEIGHT))
        FigureCanvasSVG(figure)
        # The same place in every figure, so that axes stand in line on the page.
        axes = figure.add_axes(_PLACE)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.tick_params(length=0)

        def finish() -> str:
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            return _inline(out.getvalue())

        yield axes, finish


def _inline(document: str) -> str:
    """Return an SVG document as an element of a page: without prologue, metadata, own size, and ids nobody uses."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # The page sets the size; the view box keeps the proportions.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    # Two figures of one page would both have a figure_1.
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg).strip()


def _whole_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _legend_above(axes: Axes, columns: int) -> None:
    """Put the legend above the axes, where it covers nothing: a band may fill all of them."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, columnspacing=1, handlelength=1.4
    )


def _time_unit(seconds: float) -> tuple[float, str]:
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next((each for each in units if seconds > 2 * each[0]), (1.0, "seconds"))
