"""``raycloak attest``: check evidence against policies, outside of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycloak.coordinator.cli.attest.log import attest_log
from raycloak.coordinator.cli.attest.observe import observe_command
from raycloak.coordinator.cli.attest.policy import measure, policy
from raycloak.coordinator.cli.attest.revoke import revoke_command
from raycloak.coordinator.cli.attest.serve import serve_command
from raycloak.coordinator.cli.options import command
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from raycloak.attestation.vectors.check import CaseVerdict

attest = typer.Typer(name="attest", help="Check evidence of trusted hardware, and the policies it is judged by.")
attest.add_typer(attest_log, name="log")
attest.add_typer(policy, name="policy")
attest.add_typer(measure, name="measure")
attest.command("serve")(serve_command)
attest.command("revoke")(revoke_command)
attest.command("observe")(observe_command)


@attest.command("verify")
@command
def verify_command(
    output: Output,
    index: Annotated[Path, typer.Option(metavar="FILE", help="Index of evidence, JSON.", show_default=False)],
    case: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Appraise only this case; may be repeated.")
    ] = None,
) -> int:
    """Appraise the evidence that an index lists. Exit code 4 if a case could not be appraised."""
    from raycloak.attestation.vectors.check import check
    from raycloak.attestation.vectors.index import read_index

    wanted = case or []
    cases = read_index(index)
    unknown = sorted(set(wanted) - {each.fields.id for each in cases})
    if unknown:
        raise ConfigError("case_unknown", f"{index} has no case '{unknown[0]}'.", "Leave --case out to judge all.")
    verdicts = [check(each) for each in cases if not wanted or each.fields.id in wanted]
    failed = [verdict for verdict in verdicts if verdict.accepted is None]
    output.result({"cases": [_as_json(verdict) for verdict in verdicts]}, _table(verdicts))
    simulated = [verdict.case.fields.id for verdict in verdicts if verdict.evidence_class == "simulated"]
    if simulated:
        output.note(f"SIMULATED: the accepted evidence of {', '.join(simulated)} proves nothing about a machine.")
    for verdict in verdicts:
        if verdict.uncovered:
            listed = ", ".join(map(str, verdict.uncovered))
            output.note(f"not compared: {verdict.case.fields.id}: in no reference manifest are measurements {listed}.")
    for verdict in failed:
        output.note(f"not appraised: {verdict.case.fields.id}: {verdict.detail}")
    return 4 if failed else 0


def _as_json(verdict: "CaseVerdict") -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": verdict.case.fields.id,
        "verdict": _word(verdict.accepted),
        "refusal": verdict.refusal,
        "step": verdict.step or None,
        "milliseconds": round(verdict.milliseconds, 3),
    }
    if verdict.uncovered:
        fields["uncovered_measurements"] = list(verdict.uncovered)
    return fields | ({"error": verdict.detail} if verdict.accepted is None else {})


def _word(accepted: bool | None) -> str | None:
    return None if accepted is None else "accept" if accepted else "refuse"


def _table(verdicts: "list[CaseVerdict]") -> "Table":
    from rich.table import Table

    accepted = sum(verdict.accepted is True for verdict in verdicts)
    unexpected = sum(verdict.as_expected is False for verdict in verdicts)
    title = f"{accepted} of {len(verdicts)} cases accepted, {unexpected} not as the index expects"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("case", "verdict", "refusal", "step"):
        table.add_column(name, overflow="fold")
    table.add_column("ms", justify="right")
    table.add_column("expected")
    for verdict in verdicts:
        expected = {True: "yes", False: "NO", None: ""}[verdict.as_expected]
        simulated = " (SIMULATED)" if verdict.evidence_class == "simulated" else ""
        word = (_word(verdict.accepted) or "not appraised") + simulated
        row = (verdict.case.fields.id, word, verdict.refusal or "", verdict.step)
        table.add_row(*row, f"{verdict.milliseconds:.1f}", expected)
    return table
