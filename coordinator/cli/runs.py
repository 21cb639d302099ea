"""The commands ``raycloak runs``, ``top`` and ``report``: all runs of a state folder, several, and one in full."""

import time
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from raycloak.coordinator.cli.options import RunName, command
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from raycloak.coordinator.record.run_course import RunCourse

T = TypeVar("T")

runs = typer.Typer(help="The runs in RAYCLOAK_HOME: all of them, one in full, several beside each other.")


@command(runs, "list")
def list_command(
    output: Output,
    name: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only runs of this name; * stands for any text.")
    ] = None,
    status: Annotated[
        str | None, typer.Option(metavar="STATUS", help="Only runs in this state, such as running or killed.")
    ] = None,
) -> None:
    """List the runs, the newest last: status, steps, ε, result, evidence and account."""
    from raycloak.coordinator.cli.views.runs import STATE_NOTES, RunsTable
    from raycloak.coordinator.config.home import home_path
    from raycloak.coordinator.record.run_list import RunSummary, list_runs

    if status is not None and status not in STATE_NOTES:
        raise ConfigError("usage", f"'{status}' is no status of a run.", f"Take one of {', '.join(STATE_NOTES)}.")
    found = list_runs()
    if name is not None:
        found = [each for each in found if isinstance(each, RunSummary) and fnmatchcase(each.name, name)]
    if status is not None:
        found = [each for each in found if isinstance(each, RunSummary) and each.state == status]
    output.result({"runs": [asdict(each) for each in found]}, RunsTable(found, home_path() / "runs", time.time()))


@command(runs, "show")
def show_command(output: Output, run: RunName) -> None:
    """Show one run in full: digests, terms, verdict, measurements and incidents."""
    from raycloak.coordinator.cli.views.runs import run_view
    from raycloak.coordinator.record.run_list import find_run

    facts, course = _facts(find_run(run))
    output.result(facts, run_view(facts, course))


def _facts(path: Path) -> tuple[dict[str, Any], "RunCourse"]:
    """Return all that a run directory says; a part that cannot be read is a problem beside the others."""
    from raycloak.coordinator.record.folder import RunFolder
    from raycloak.coordinator.record.run_course import RunCourse
    from raycloak.coordinator.record.run_list import summary_of
    from raycloak.coordinator.record.run_reader import (
        EventTail,
        read_verdict,
        read_written_config,
        read_written_manifest,
    )

    problems: list[str] = []

    def part(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except ConfigError as error:
            problems.append(f"{error.code}: {error.message}")
            return None

    # First: what has no readable record is no run.
    folder = RunFolder.open(path)
    course = part(lambda: RunCourse.of(EventTail(path).read())) or RunCourse()
    config, manifest = part(lambda: read_written_config(path)), part(lambda: read_written_manifest(path))
    verdict, released = part(lambda: read_verdict(path)), part(folder.released)
    times = course.times()
    facts = {
        **asdict(summary_of(path, course, verdict)),
        "executions": course.executions,
        "repeated_steps": course.repeated,
        "retried_attempts": course.retried,
        "seconds_per_step": times.whole if times else None,
        "departures": dict(course.departures),
        "joins": course.joins,
        "restarts": dict(course.restarts),
        "incidents": [asdict(each) for each in course.incidents],
        "config_digest": config.digest if config else None,
        "config": config.values if config else None,
        "manifest_digest": course.manifest_digest,
        "manifest": manifest,
        "verdict": verdict,
        "measurements": [each.model_dump(mode="json") for each in released or ()],
        "problems": list(dict.fromkeys(problems)),
    }
    return facts, course


@command(runs, "compare")
def compare_command(
    output: Output,
    names: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Run directories, names, beginnings of ids, or 'last'.")
    ],
) -> None:
    """Set runs beside each other: what differs in their configurations and results, and whether bytes are the same."""
    from raycloak.coordinator.cli.views.runs import comparison_view
    from raycloak.coordinator.record.run_comparison import compare
    from raycloak.coordinator.record.run_list import find_run

    paths = [find_run(each) for each in names]
    if len({path.resolve() for path in paths}) < 2:
        raise ConfigError("usage", "a comparison needs two different runs.", "Name another: raycloak runs list")
    found = compare(paths)
    facts = {
        "runs": [
            {**asdict(run.summary), "delta": run.delta, "seconds_per_step": run.seconds_per_step} for run in found.runs
        ],
        "configuration": found.differing,
        "same_bytes": found.same_bytes,
        "same_steps": found.same_steps,
        "cautions": found.cautions,
    }
    output.result(facts, comparison_view(found))


def top_command(output: Output, run: RunName) -> None:
    """Watch a run: ε against its plan, accuracy, members, phase times, rate and time left; q ends. Reads files only."""
    from raycloak.coordinator.cli.views.top import RunWatch, TopView, facts, live_picture
    from raycloak.coordinator.record.run_list import find_run

    watch = RunWatch(find_run(run))
    snapshot = watch.look()
    if output.terminal is not None and snapshot.is_live:
        snapshot = live_picture(output.terminal, watch, snapshot)
    output.result(facts(snapshot), TopView(snapshot))


def report_command(
    to: Output,
    run: RunName,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; default: report.html in the run directory.")
    ] = None,
    pdf: Annotated[bool, typer.Option("--pdf", help="Also print it as PDF beside it; needs Chromium.")] = False,
    eu_ai_act: Annotated[
        bool, typer.Option("--eu-ai-act", help="Add technical documentation along Regulation (EU) 2024/1689.")
    ] = False,
    model_card: Annotated[
        bool, typer.Option("--model-card", help="Also write a model card for the Hugging Face hub beside it.")
    ] = False,
) -> None:
    """Write the record of a run as one page: verdict, curves, evidence, incidents, limits. Reads the run alone."""
    from raycloak.coordinator.record.run_list import find_run
    from raycloak.coordinator.report.document import write_report
    from raycloak.coordinator.report.model_card import write_card
    from raycloak.coordinator.report.pdf import browser, print_pdf

    if pdf and output is not None and output.suffix == ".pdf":
        raise ConfigError("usage", f"{output} would be both page and PDF.", "Name the page, as in --output page.html.")
    if pdf:
        # Before the page, which would otherwise be all that a refused command leaves.
        browser()
    run_dir = find_run(run)
    page = write_report(run_dir, output, eu_ai_act=eu_ai_act)
    written = {"report": page}
    if pdf:
        written["pdf"] = print_pdf(page, page.with_suffix(".pdf"))
    if model_card:
        written["model_card"] = write_card(run_dir, page.with_name(f"{page.stem}-model-card.md"))
    to.show("Report", written)
