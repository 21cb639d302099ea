"""The commands ``raycloak verify``, ``bundle`` and ``trust``, and the program ``raycloak-verify`` of auditors.

``raycloak-verify`` is ``raycloak verify`` for bundles alone, on a machine with neither torch nor Ray.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from raycloak.coordinator.cli.options import RUN_OR_OTHER, RunName, command, run_or_path
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import RefusedError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from raycloak.coordinator.proof.claims import Report

TrustFile = Annotated[
    Path,
    typer.Option("--trust", metavar="FILE", help="Trust file, from another channel than the run.", show_default=False),
]
NewFile = Annotated[Path, typer.Option("--output", metavar="FILE", help="New file.", show_default=False)]


@command
def verify_command(
    output: Output,
    run: Annotated[
        str,
        typer.Argument(metavar="RUN|BUNDLE", help=f"Bundle; or, on its site, a {RUN_OR_OTHER}.", show_default=False),
    ],
    trust: TrustFile,
) -> int:
    """Derive every claim about a run again, from signed bytes and the trust file. Exit code 3 if one fails."""
    return _verify(output, run_or_path(run), trust)


@command
def auditor_command(
    output: Output,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle of the run.", show_default=False)],
    trust: TrustFile,
) -> int:
    """Derive every claim about a run again, from signed bytes and the trust file. Exit code 3 if one fails."""
    # Without names of runs: an auditor's machine has none, and lacks the libraries that read them.
    return _verify(output, bundle, trust)


def _verify(output: Output, run: Path, trust: Path) -> int:
    from raycloak.coordinator.proof.trust import Trust
    from raycloak.coordinator.proof.verify import verify_bundle, verify_parts

    known = Trust.load(trust)
    if run.is_dir():
        # Only here: a site has these libraries, an auditor's machine need not.
        from raycloak.coordinator.proof.gather import gather

        report = verify_parts(gather(run)[1], known)
    else:
        report = verify_bundle(run, known)
    output.result(report.facts(), _view(report))
    return RefusedError.exit_code if report.failed else 0


def _view(report: "Report") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

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


@command
def bundle_command(output: Output, run: RunName, out: NewFile) -> int:
    """Write the one file that an auditor of a run gets: its record and its account, signed by this site."""
    import time

    from raycloak.coordinator.console.figures import size_text
    from raycloak.coordinator.console.tables import fields_table
    from raycloak.coordinator.proof.bundle import write_bundle
    from raycloak.coordinator.proof.gather import gather, site_signer
    from raycloak.coordinator.record.run_list import find_run

    manifest, parts = gather(find_run(run))
    signer = site_signer()
    index = write_bundle(out, manifest.run_id, parts, signer, int(time.time()))
    size = out.stat().st_size
    facts = {
        "out": str(out),
        "run_id": index.run_id,
        "bytes": size,
        "signer": signer.public.key_id.hex(),
        "parts": [each.name for each in index.parts],
    }
    rows = [("file", str(out)), ("run", index.run_id), ("size", size_text(size)), ("signer", str(facts["signer"]))]
    output.result(facts, fields_table("Bundle", [*rows, ("parts", ", ".join(each.name for each in index.parts))]))
    return 0


@command
def trust_command(output: Output, run: RunName, out: NewFile) -> int:
    """Write the trust file for auditors of a run. Hand it over on another channel than the bundle."""
    from raycloak.coordinator.console.tables import fields_table
    from raycloak.coordinator.proof.gather import trust_of
    from raycloak.coordinator.record.run_list import find_run

    trust = trust_of(find_run(run))
    trust.save(out)
    facts = {
        "out": str(out),
        "orchestrator": trust.orchestrators[0].key_id.hex(),
        "ledger": trust.ledger.hex(),
        "signer": trust.signers.signers[0].signer.key_id.hex(),
        "policy": trust.policy.digest().hex(),
    }
    output.result(facts, fields_table("Trust file", list(facts.items())))
    return 0


def main() -> NoReturn:
    """Run ``raycloak-verify``; exits with the command's code."""
    app = typer.Typer(add_completion=False)
    app.command()(auditor_command)
    app(prog_name="raycloak-verify")
    raise AssertionError("unreachable: typer ends the process")
