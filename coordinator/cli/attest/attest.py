"""The commands ``raycloak attest``: judge recorded evidence outside of a run, and serve the evidence service."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from raycloak.coordinator.cli.attest.log import attest_log
from raycloak.coordinator.cli.attest.policy import measure, policy
from raycloak.coordinator.cli.attest.run import observe_command, revoke_command
from raycloak.coordinator.cli.options import LOOK_S, command, ended_by_signals
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.console.tables import columns_table
from raycloak.coordinator.quick_imports import quickly
from raycloak.metrics.errors import ConfigError, RaycloakError, RunFailedError

if TYPE_CHECKING:
    from raycloak.attestation.vectors.check import CaseVerdict

attest = typer.Typer(name="attest", help="Check evidence of trusted hardware, and the policies it is judged by.")
attest.add_typer(attest_log, name="log")
attest.add_typer(policy, name="policy")
attest.add_typer(measure, name="measure")
command(attest, "revoke")(revoke_command)
command(attest, "observe")(observe_command)


@command(attest, "verify")
def verify_command(
    output: Output,
    index: Annotated[Path, typer.Option(metavar="FILE", help="Index of evidence, JSON.")],
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
    output.result({"cases": [_as_json(verdict) for verdict in verdicts]}, _table(verdicts))
    simulated = [verdict.case.fields.id for verdict in verdicts if verdict.evidence_class == "simulated"]
    if simulated:
        output.note(f"SIMULATED: the accepted evidence of {', '.join(simulated)} proves nothing about a machine.")
    for verdict in verdicts:
        if verdict.uncovered:
            listed = ", ".join(map(str, verdict.uncovered))
            output.note(f"not compared: {verdict.case.fields.id}: in no reference manifest are measurements {listed}.")
    failed = [verdict for verdict in verdicts if verdict.accepted is None]
    for verdict in failed:
        output.note(f"not appraised: {verdict.case.fields.id}: {verdict.detail}")
    return RaycloakError.exit_code if failed else 0


_WORDS = {True: "accept", False: "refuse", None: None}


def _as_json(verdict: "CaseVerdict") -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": verdict.case.fields.id,
        "verdict": _WORDS[verdict.accepted],
        "refusal": verdict.refusal,
        "step": verdict.step or None,
        "milliseconds": round(verdict.milliseconds, 3),
    }
    if verdict.uncovered:
        fields["uncovered_measurements"] = list(verdict.uncovered)
    return fields | ({"error": verdict.detail} if verdict.accepted is None else {})


def _table(verdicts: "list[CaseVerdict]") -> Table:
    accepted = sum(verdict.accepted is True for verdict in verdicts)
    unexpected = sum(verdict.as_expected is False for verdict in verdicts)
    title = f"{accepted} of {len(verdicts)} cases accepted, {unexpected} not as the index expects"
    rows = [
        (
            each.case.fields.id,
            (_WORDS[each.accepted] or "not appraised") + (" (SIMULATED)" if each.evidence_class == "simulated" else ""),
            each.refusal or "",
            each.step,
            f"{each.milliseconds:.1f}",
            {True: "yes", False: "NO", None: ""}[each.as_expected],
        )
        for each in verdicts
    ]
    return columns_table(title, ("case", "verdict", "refusal", "step", "ms", "expected"), rows)


@command(attest, "serve")
def serve_command(
    output: Output, config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the service.")]
) -> None:
    """Attest members over gRPC and give them their keys until SIGTERM or Ctrl-C; first prints where it listens."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # every refused handshake would be a line
    with quickly():  # a full collection is a pause for every member
        from raycloak.attestation.keys.run_secret import exposure
        from raycloak.coordinator.evidence.standalone_service import load_service, start_service

    with ended_by_signals() as ended:
        loaded = load_service(config)
        if (warning := exposure(config.parent / loaded.run_secret)) is not None:
            output.note(warning)
        server, session, facts = start_service(loaded, config.parent)
        output.show(f"Evidence service ({facts.evidence} evidence)", asdict(facts))
        while not ended.wait(LOOK_S) and server.failure is None:
            pass
        server.stop()
        session.run.close()
    if server.failure is not None:
        cause = type(server.failure).__name__
        raise RunFailedError("service_failed", f"the service could not write its record ({cause}).", "Free the disk.")
