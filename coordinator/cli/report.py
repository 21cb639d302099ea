"""The command ``raycloak report``."""

from pathlib import Path
from typing import Annotated

import typer

from raycloak.coordinator.cli.options import RunName
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError


def report_command(
    to: Output,
    run: RunName,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page; default: report.html in the run directory."),
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
