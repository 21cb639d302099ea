"""The page of a run: one HTML file that needs neither network nor script, with the verdict first.

Hides how a record becomes a document. Names, errors and paths are escaped wherever they appear.

Guarantee: the same record gives the same bytes. Precondition: the same versions of raycloak and matplotlib.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from raycloak.attestation.files.whole import write_whole
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.record.run_reader import RunData, read_run
from raycloak.coordinator.record.verdict import SIMULATED, Verdict
from raycloak.coordinator.report.ai_act import documentation_of
from raycloak.coordinator.report.curves import drawings_of
from raycloak.coordinator.report.facts import commands_of, data_rows, is_old, limits_of, model_rows, sampling_rows
from raycloak.coordinator.report.incidents import MOST, incidents_of, utc
from raycloak.coordinator.report.members import Evidence, ReportedMember, evidence_of
from raycloak.coordinator.report.words import released_text, verdict_rows
from raycloak.metrics.file_errors import file_error
from raycloak.version import VERSION

FILE: Final = "report.html"
TEMPLATES: Final = Path(__file__).parent / "templates"
MOST_MEMBERS: Final = 200


def write_report(run_dir: Path, output: Path | None = None, *, eu_ai_act: bool = False) -> Path:
    """Write the page of a run; by default as ``report.html`` of its directory.

    Raises:
        ConfigError: ``not_a_run``, ``run_file``, or ``report_file`` if the page cannot be written.
    """
    run = read_run(run_dir)
    path = run.path / FILE if output is None else output
    page = report_page(run, eu_ai_act=eu_ai_act)
    try:
        write_whole(path, page.encode())
    except OSError as error:
        raise file_error("report_file", "write", path, error) from None
    return path


def report_page(run: RunData, *, eu_ai_act: bool = False) -> str:
    """Return the page of a run as HTML."""
    verdict, evidence = run.opened_verdict(), evidence_of(run)
    incidents = incidents_of(run, evidence)
    pages = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    return pages.get_template("report.html").render(
        version=VERSION,
        name=run.record.name,
        path=run.path,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        about=_about(run),
        marks=_marks(run, verdict, evidence),
        notices=_notices(run, verdict),
        lead=_lead(run, verdict),
        tiles=_tiles(verdict) if verdict is not None else [],
        verdict=verdict_rows(verdict) if verdict is not None else [],
        drawings=drawings_of(run),
        data=data_rows(run),
        sampling=sampling_rows(run),
        released=[
            (f"{each.query.replace('_', ' ')}, after step {each.after}", released_text(each)) for each in run.released
        ],
        evidence=evidence,
        evidence_says=_evidence_says(evidence),
        members=[_member_row(each) for each in evidence.members[:MOST_MEMBERS]],
        more_members=_more(len(evidence.members), MOST_MEMBERS, "members", "evidence.jsonl"),
        incidents=incidents[:MOST],
        incidents_say=_incidents_say(len(incidents)),
        commands=commands_of(run, evidence),
        model=model_rows(run),
        limits=limits_of(run, verdict),
        act=documentation_of(run, evidence) if eu_ai_act else None,
    )


def _about(run: RunData) -> list[tuple[str, str]]:
    about = [("run", run.record.run_id), ("status", run.record.status), ("began", f"{utc(run.record.started_at)} UTC")]
    return [*about, ("last record", f"{utc(run.events[-1]['time'])} UTC")] if run.events else about


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


def _notices(run: RunData, verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return [_WHY_NO_VERDICT.get(run.record.status, "There is no verdict in the run directory.")]
    if is_old(run, verdict):
        return [
            f"The run has gone on since this verdict, which counts {verdict.steps} steps of {len(run.steps)} on "
            "record. It is under way again, or its process was killed."
        ]
    return []


_WHY_NO_VERDICT: Final[Mapping[str, str]] = {
    "running": "There is no verdict: the run is under way, or its process was killed before it could end.",
    "failed": "There is no verdict: the run failed before it finished a step, or its result could not be saved.",
    "stopped": "There is no verdict: it could not be written when the run was stopped.",
    "void": "There is no verdict: the run ended before anything was charged, or was discarded.",
    "done": "There is no verdict: it could not be written, or was removed.",
}


def _lead(run: RunData, verdict: Verdict | None) -> str:
    if verdict is None:
        done = len(run.steps)
        planned = f" of {run.manifest.computation.mechanism.steps}" if run.manifest is not None else ""
        return f"Nothing is claimed for this run. Its record has {done}{planned} committed steps."
    ended = _ENDED.get(verdict.ending, f" and ended by the error {verdict.ending}")
    said = [f"The run finished {verdict.steps} of {verdict.planned_steps} steps{ended}."]
    if verdict.private:
        delta = "unknown" if verdict.privacy_delta is None else f"{verdict.privacy_delta:g}"
        said.append(
            f"Against outsiders and the aggregator it claims ε\u00a0=\u00a0{epsilon_text(verdict.privacy_epsilon)} at "
            f"δ\u00a0=\u00a0{delta}, however it ended."
        )
    else:
        said.append("It is NOT PRIVATE: differential privacy was off.")
    if verdict.simulated:
        said.append("Its evidence is SIMULATED: no hardware vouches for the workers.")
    return " ".join(said)


_ENDED: Final[Mapping[str, str]] = {
    "complete": "",
    "cap_exceeded": " and ended because its account's cap is reached",
    "stopped": " and was stopped; it can be resumed",
}


@dataclass(frozen=True, slots=True)
class _Tile:
    label: str
    value: str
    note: str
    word: bool = False


def _tiles(verdict: Verdict) -> list[_Tile]:
    if verdict.private:
        delta = "unknown" if verdict.privacy_delta is None else f"{verdict.privacy_delta:g}"
        privacy = _Tile("ε claimed", epsilon_text(verdict.privacy_epsilon), f"at δ = {delta}, one example")
    else:
        privacy = _Tile("privacy", "NOT PRIVATE", "nothing was clipped or noised", word=True)
    evidence = (
        _Tile("evidence", "SIMULATED", "no hardware vouches for it", word=True)
        if verdict.simulated
        else _Tile("evidence", verdict.evidence_class, f"of {verdict.num_workers} workers", word=True)
    )
    steps = _Tile(
        "steps", f"{verdict.steps} / {verdict.planned_steps}", f"{verdict.wall_seconds:,.0f} s with the start"
    )
    return [privacy, _quality_tile(verdict), steps, evidence]


def _quality_tile(verdict: Verdict) -> _Tile:
    if verdict.evaluation_accuracy is not None:
        return _Tile("accuracy", f"{verdict.evaluation_accuracy:.1%}", "on the public split")
    if verdict.evaluation_loss is not None:
        return _Tile("loss", f"{verdict.evaluation_loss:.4g}", "mean over the public split")
    measured = [each for each in verdict.measurements if each.query == "evaluation"]
    if measured:
        newest = measured[-1]
        if "accuracy" in newest.values:
            value, noise = newest.values["accuracy"], newest.deviation["accuracy"]
            return _Tile("accuracy, noised", f"{value:.1%}", f"± {2 * noise:.1%} (2 σ of the noise), private examples")
        value, noise = newest.values["loss"], newest.deviation["loss"]
        return _Tile("loss, noised", f"{value:.4g}", f"± {2 * noise:.2g} (2 σ of the noise), private examples")
    return _Tile("accuracy", "not measured", "no evaluation data", word=True)


def _evidence_says(evidence: Evidence) -> str:
    machines = len({member.platform_id for member in evidence.members})
    return (
        f"{len(evidence.members)} members on {machines} {'machine' if machines == 1 else 'machines'} were admitted, in "
        f"{evidence.entries:,} entries of the evidence log. It is signed by the orchestrator that the "
        "manifest names. Whether each member's evidence passes your policy is for raycloak verify to say."
    )


def _member_row(member: ReportedMember) -> dict[str, Any]:
    simulated = member.evidence_class.lower() == SIMULATED
    renewed = f", presented {member.presentations} times" if member.presentations > 1 else ""
    return {
        "name": member.member_id,
        "role": member.role,
        "evidence": f"{'SIMULATED' if simulated else member.evidence_class}{renewed}",
        "machine": " ".join(part for part in (member.hardware, member.platform_id[:12]) if part),
        "admitted": utc(member.admitted_at)[:-3],
        "expires": utc(member.expires_at)[:-3],
        "holds": _numbers(sorted(member.virtual_workers)) or "none",
        "left": f"left: {member.left}" if member.left is not None else "",
    }


def _numbers(numbers: list[int]) -> str:
    """Return numbers with runs of three and more as a range."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    shown = [f"{each[0]} to {each[-1]}" if len(each) > 2 else ", ".join(map(str, each)) for each in groups]
    return ", ".join(shown)


def _incidents_say(count: int) -> str:
    return _more(count, MOST, "incidents", "metrics.jsonl and evidence.jsonl") or (
        f"{count} on record. A step that was repeated or resumed is charged once and gives the same bytes."
    )


def _more(count: int, most: int, what: str, where: str) -> str:
    return f"The first {most} of {count:,} {what}; all of them are in {where}." if count > most else ""
