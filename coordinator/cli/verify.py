"""The commands ``raycloak verify``, ``bundle`` and ``trust``, and the program ``raycloak-verify`` of auditors.

``raycloak-verify`` is ``raycloak verify`` for bundles alone, on a machine with neither torch nor Ray.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raycloak.coordinator.cli.options import RUN_OR_OTHER, RunName, command, run_or_path
from raycloak.coordinator.console.figures import size_text
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import RefusedError

if TYPE_CHECKING:
    from raycloak.coordinator.proof.claims import Report

TrustFile = Annotated[
    Path, typer.Option("--trust", metavar="FILE", help="Trust file, from another channel than the run.")
]
NewFile = Annotated[Path, typer.Option("--output", metavar="FILE", help="New file.")]


def verify_command(
    output: Output,
    run: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help=f"Bundle; or, on its site, a {RUN_OR_OTHER}.")],
    trust: TrustFile,
) -> int:
    """Derive every claim about a run again, from signed bytes and the trust file. Exit code 3 if one fails."""
    # The name of a run is read only here: an auditor's machine has none, and lacks the libraries for it.
    return auditor_command(output, run_or_path(run), trust)


def auditor_command(
    output: Output,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle of the run.")],
    trust: TrustFile,
) -> int:
    """Derive every claim about a run again, from signed bytes and the trust file. Exit code 3 if one fails."""
    from raycloak.coordinator.proof.trust import Trust
    from raycloak.coordinator.proof.verify import verify_bundle, verify_parts

    known = Trust.load(trust)
    if bundle.is_dir():
        # Only here: a site has these libraries, an auditor's machine need not.
        from raycloak.coordinator.proof.gather import gather

        report = verify_parts(gather(bundle)[1], known)
    else:
        report = verify_bundle(bundle, known)
    output.result(report.facts(), _view(report))
    return RefusedError.exit_code if report.failed else 0


def _view(report: "Report") -> RenderableType:
    # As text: in a string, a run's id could be markup.
    title = Text(f"Run {report.run_id}" if report.run_id else "Run", style="bold")
    table = Table(title=title, title_justify="left")
    table.add_column("claim", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("", overflow="fold")
    for claim in report.claims:
        where = f"{claim.record}: " if claim.record else ""
        table.add_row(claim.name, claim.outcome.value, Text(f"{where}{claim.says}"))
    limits = Text("\n".join(["Not covered:", *(f"- {each}" for each in report.limits)]))
    failed = len(report.failed)
    last = Text(f"{failed} claims FAILED." if failed else "No claim failed.", style="bold")
    return Group(table, limits, last)


def bundle_command(output: Output, run: RunName, out: NewFile) -> None:
    """Write the one file that an auditor of a run gets: its record and its account, signed by this site."""
    from raycloak.coordinator.proof.bundle import write_bundle
    from raycloak.coordinator.proof.gather import gather, site_signer
    from raycloak.coordinator.record.run_list import find_run

    manifest, parts = gather(find_run(run))
    signer = site_signer()
    index = write_bundle(out, manifest.run_id, parts, signer, int(time.time()))
    size, names = out.stat().st_size, [each.name for each in index.parts]
    facts = {"out": str(out), "run_id": index.run_id, "bytes": size, "signer": signer.public.key_id, "parts": names}
    rows = [
        ("file", str(out)),
        ("run", index.run_id),
        ("size", size_text(size)),
        ("signer", signer.public.key_id.hex()),
        ("parts", ", ".join(names)),
    ]
    output.show("Bundle", facts, rows)


def trust_command(output: Output, run: RunName, out: NewFile) -> None:
    """Write the trust file for auditors of a run. Hand it over on another channel than the bundle."""
    from raycloak.coordinator.proof.gather import trust_of
    from raycloak.coordinator.record.run_list import find_run

    trust = trust_of(find_run(run))
    trust.save(out)
    facts = {
        "out": str(out),
        "orchestrator": trust.orchestrators[0].key_id,
        "ledger": trust.ledger,
        "signer": trust.signers.signers[0].signer.key_id,
        "policy": trust.policy.digest(),
    }
    output.show("Trust file", facts)


def main() -> NoReturn:
    """Run ``raycloak-verify``; exits with the command's code."""
    app = typer.Typer(add_completion=False)
    command(app)(auditor_command)
    app(prog_name="raycloak-verify")
    raise AssertionError("unreachable: typer ends the process")
