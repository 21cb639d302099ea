"""The page of a run: one HTML file that needs neither network nor script, with the verdict first.

Hides how a record becomes a document. Names, errors and paths are escaped wherever they appear.

Guarantee: the same record gives the same bytes. Precondition: the same versions of raycloak and matplotlib.
"""

from itertools import groupby
from pathlib import Path
from typing import Final

from markupsafe import Markup

from raycloak.coordinator.record.run_reader import RunData, read_run
from raycloak.coordinator.record.verdict import SIMULATED, Verdict
from raycloak.coordinator.report.ai_act import documentation_of
from raycloak.coordinator.report.curves import drawings_of
from raycloak.coordinator.report.facts import (
    TEMPLATES,
    commands_of,
    data_rows,
    filled,
    is_old,
    limits_of,
    sampling_rows,
    written,
)
from raycloak.coordinator.report.incidents import incidents_of
from raycloak.coordinator.report.members import Evidence, evidence_of
from raycloak.coordinator.report.words import released_text, verdict_rows
from raycloak.version import VERSION

FILE: Final = "report.html"


def write_report(run_dir: Path, output: Path | None = None, *, eu_ai_act: bool = False) -> Path:
    """Write the page of a run; by default as ``report.html`` of its directory.

    Raises:
        ConfigError: ``not_a_run``, ``run_file``, or ``report_file`` if the page cannot be written.
    """
    run = read_run(run_dir)
    return written(run.path / FILE if output is None else output, report_page(run, eu_ai_act=eu_ai_act))


def report_page(run: RunData, *, eu_ai_act: bool = False) -> str:
    """Return the page of a run as HTML."""
    verdict, evidence = run.opened_verdict(), evidence_of(run)
    return filled(
        "report.html",
        version=VERSION,
        run=run,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        marks=_marks(run, verdict, evidence),
        verdict=verdict,
        is_old=verdict is not None and is_old(run, verdict),
        verdict_rows=verdict_rows(verdict) if verdict is not None else [],
        drawings=drawings_of(run),
        data=data_rows(run),
        sampling=sampling_rows(run),
        released=[
            (f"{each.query.replace('_', ' ')}, after step {each.after}", released_text(each)) for each in run.released
        ],
        evidence=evidence,
        numbers=_numbers,
        incidents=list(incidents_of(run, evidence)),
        commands=commands_of(run, evidence),
        limits=limits_of(run, verdict),
        act=documentation_of(run, evidence) if eu_ai_act else None,
    )


def _marks(run: RunData, verdict: Verdict | None, evidence: Evidence) -> list[str]:
    marks = [] if verdict is not None else ["NO VERDICT"]
    if verdict is not None and is_old(run, verdict):
        marks.append("VERDICT OF AN EARLIER EXECUTION")
    computation = run.manifest.computation if run.manifest is not None else None
    if computation is not None and not computation.mechanism.private:
        marks.append("NOT PRIVATE")
    if computation is not None and not computation.exact:
        marks.append("NOT EXACT")
    classes = {member.evidence_class.lower() for member in evidence.members}
    classes |= {str(event.get("evidence_class", "")).lower() for event in run.of("admitted")}
    if SIMULATED in classes or (verdict is not None and verdict.simulated):
        marks.append("SIMULATED EVIDENCE")
    return marks


def _numbers(numbers: frozenset[int]) -> str:
    """Return numbers with runs of three and more as a range."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda placed: placed[1] - placed[0])
    groups = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{each[0]} to {each[-1]}" if len(each) > 2 else ", ".join(map(str, each)) for each in groups)
