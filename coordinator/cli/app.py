"""The command ``raycloak``.

Exit codes: 0 done, 2 bad input, 3 refused (budget, evidence, policy), 4 failed. Every error is one line,
``error: <code>: <message> <remedy>``. Heavy libraries are imported inside the commands, so that help is instant.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.text import Text

from raycloak.coordinator.cli.attest.attest import attest
from raycloak.coordinator.cli.audit import audit_command
from raycloak.coordinator.cli.budget import budget
from raycloak.coordinator.cli.data import data
from raycloak.coordinator.cli.init import init_command
from raycloak.coordinator.cli.model import model
from raycloak.coordinator.cli.options import RUN_OR_OTHER, ConfigFile, Overrides, RunName, SmallEpsilon, command, invoke
from raycloak.coordinator.cli.package import package
from raycloak.coordinator.cli.runs import report_command, runs, top_command
from raycloak.coordinator.cli.serve import serve_command
from raycloak.coordinator.cli.vault import vault_command
from raycloak.coordinator.cli.verify import bundle_command, trust_command, verify_command
from raycloak.coordinator.config.run import RunConfig, load_config, parse_config
from raycloak.coordinator.console.output import Output, leave_stdout
from raycloak.coordinator.console.streams import open_missing_streams
from raycloak.coordinator.console.tables import columns_table
from raycloak.coordinator.quick_imports import quickly
from raycloak.coordinator.runs.progress import EVERY_S, ProgressDisplay, waiting
from raycloak.metrics.errors import ConfigError, RaycloakError
from raycloak.metrics.file_errors import require_absent
from raycloak.version import VERSION

if TYPE_CHECKING:
    from raycloak.coordinator.record.folder import RunFolder

app = typer.Typer(
    name="raycloak",
    help="Train a PyTorch model on private data: masked, accounted, attested, exact.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(budget, name="budget")
app.add_typer(package, name="package")
app.add_typer(attest, name="attest")
app.add_typer(data, name="data")
app.add_typer(model, name="model")
app.add_typer(runs, name="runs")


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"raycloak {VERSION}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


RunSecret = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File of 64 hex digits, mode 0600; the same secret repeats the same run."),
]
ProgressEvery = Annotated[
    float, typer.Option(metavar="SECONDS", help="Time between two lines of progress in a log.", min=0.1)
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the newest unfinished run of CONFIG's name.")]
Once = Annotated[
    bool, typer.Option("--once", help="Have one run of CONFIG's name: start it, resume it, or say that it is done.")
]


@command(app)
def run(
    output: Output,
    config: ConfigFile,
    overrides: Overrides = None,
    run_secret: RunSecret = None,
    resume: Resume = False,
    once: Once = False,
    yes: SmallEpsilon = False,
    progress: ProgressEvery = EVERY_S,
) -> int:
    """Train as CONFIG says; leaves a verdict and a run directory. Exit code 4 if it was stopped before its end."""
    if once and resume:
        raise ConfigError("usage", "give --resume or --once, not both.", "Leave one out.")
    loaded = load_config(config, overrides)
    train = partial(_train, output, loaded, config.parent, run_secret, every_s=progress, small_epsilon=yes)
    return _train_once(output, loaded, train) if once else train(resume=resume)


command(app, "init")(init_command)
command(app, "serve")(serve_command)
command(app, "vault")(vault_command)


@command(app)
def demo(
    output: Output, overrides: Overrides = None, run_secret: RunSecret = None, progress: ProgressEvery = EVERY_S
) -> int:
    """Train a small model on scikit-learn's digits with three local workers; evidence is SIMULATED."""
    from raycloak.coordinator.runs.demo import demo_config

    return _train(output, parse_config(demo_config(), overrides), None, run_secret, every_s=progress)


def _train(
    output: Output,
    config: RunConfig,
    config_dir: Path | None,
    run_secret: Path | None,
    *,
    resume: bool = False,
    every_s: float,
    small_epsilon: bool = False,
) -> int:
    from raycloak.coordinator.cluster.ray_checks import check_ray
    from raycloak.coordinator.planning.first_look import first_look
    from raycloak.coordinator.record.folder import require_idle, unfinished_run
    from raycloak.coordinator.record.same_run import require_same_config

    # Before Ray and the libraries of a run, which take seconds. The trainer checks again, under the run's lock.
    if resume:
        folder = unfinished_run(config.name)
        require_same_config(folder.config(), config)
        require_idle(folder)
    first_look(config, config_dir or Path.cwd(), run_secret, resume)
    check_ray()
    with ProgressDisplay(output.progress, config.name, every_s) as display:
        with quickly():
            from raycloak.coordinator.runs.ray_start import ray_ahead
        with ray_ahead(config, display.phase):
            # While Ray starts processes ahead, which import as long.
            display.phase("loading libraries")
            with quickly():
                from raycloak.coordinator.cli.views.verdict import verdict_table, verdict_text
                from raycloak.coordinator.record.verdict import Verdict
                from raycloak.coordinator.runs.trainer import Trainer

            trainer = Trainer(
                config,
                config_dir=config_dir,
                run_secret=run_secret,
                resume=resume,
                progress=display,
                phase=display.phase,
                notice=output.announce,
                handle_signals=True,
                small_epsilon=small_epsilon,
            )
            try:
                result = trainer.train()
            except RaycloakError as error:
                if error.result is not None:
                    output.preview(verdict_table(Verdict.of(error.result)))
                raise
    verdict = Verdict.of(result)
    print(verdict_text(verdict))  # noqa: T201 - standard output is the run's log here
    output.result({**result["metrics"], "run_dir": verdict.run_dir}, verdict_table(verdict))
    return RaycloakError.exit_code if verdict.ending == "stopped" else 0


def _train_once(output: Output, config: RunConfig, train: Callable[..., int]) -> int:
    """Train as the newest run of the configuration's name asks for, which a scheduler may repeat at will.

    Guarantee: however often it is called, one run of that name is charged, unless the user discards it.
    """
    from raycloak.coordinator.record.folder import newest_run

    newest = newest_run(config.name)
    if newest is None or newest.record.status != "done":
        try:
            return train(resume=newest is not None)
        except ConfigError as error:
            # Its process had ended after the last step, and before it could mark the run as done.
            if error.code != "nothing_to_resume" or newest is None:
                raise
    _show_done(output, newest, config)
    return 0


def _show_done(output: Output, folder: "RunFolder", config: RunConfig) -> None:
    """Show the verdict of a run that is done; refuse if it was a run of another configuration."""
    from raycloak.coordinator.cli.views.verdict import verdict_table
    from raycloak.coordinator.record.outcome import Ending
    from raycloak.coordinator.record.run_reader import read_run
    from raycloak.coordinator.record.same_run import require_same_config
    from raycloak.coordinator.record.verdict import Verdict

    require_same_config(folder.config(), config)
    output.note(f"the run in {folder.path} is done; nothing was started")
    stored = read_run(folder.path).verdict
    if stored is None or stored["ending"] not in (Ending.COMPLETE.value, Ending.CAP.value, Ending.EARLY.value):
        # Its process ended before it wrote a verdict; an older one is of an execution that failed.
        output.result({"run_dir": str(folder.path)}, f"Run directory: {folder.path}")
        return
    metrics = {key: value for key, value in stored.items() if key != "run_dir"}
    output.result(stored, verdict_table(Verdict.of({"run_dir": stored["run_dir"], "metrics": metrics})))


@command(app, "replay")
def replay_command(
    output: Output,
    run: RunName,
    steps: Annotated[str, typer.Option(metavar="FIRST:END", help="Steps to compute again.")],
    workers: Annotated[int, typer.Option(help="Workers to compute them on.")] = 2,
) -> None:
    """Compute finished steps of a run again and compare their digests; charges nothing. Exit code 4 if one differs."""
    from raycloak.coordinator.record.run_list import find_run
    from raycloak.coordinator.runs.replay import parse_steps, replay

    # The steps first, which need no run to be wrong.
    wanted = parse_steps(steps)
    path = find_run(run)
    with ProgressDisplay(output.progress, "replay") as display:
        found = replay(path, wanted, workers, output.announce, display.phase)
    rows = [
        ("steps", f"{found.first} to {found.last - 1}, all digests as logged"),
        ("workers", str(found.workers)),
        ("keys", f"of {found.most_hosted} of {found.virtual_workers} virtual workers at most on one machine"),
        ("charged", f"nothing ({found.charged_steps} steps, as before)"),
        ("last digest", found.digests[-1]),
        ("run directory", str(found.run_dir)),
    ]
    title = "Replay (SIMULATED evidence)" if found.evidence_class == "simulated" else "Replay"
    output.show(title, asdict(found), rows)


@command(app, "export")
def export_command(
    output: Output,
    source: Annotated[str, typer.Argument(metavar="RUN|PACKAGE", help=f"A {RUN_OR_OTHER}; or a sealed package.")],
    form: Annotated[str, typer.Option("--format", help="safetensors, torch, hf or peft.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="New file, or folder of hf and peft.")],
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="YAML file that names the model; a run has its own.")
    ] = None,
    trust: Annotated[Path | None, typer.Option(metavar="STORE", help="Trust store, for a package.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of a recipient, for a package.")] = None,
    run_code: Annotated[bool, typer.Option("--run-code", help="Run Python that a run from elsewhere names.")] = False,
) -> None:
    """Write the trained model of a run for other libraries: hf opens with from_pretrained, peft with PeftModel."""
    # Before the libraries and the model, which take seconds to load.
    require_absent(out)
    from raycloak.coordinator.runs.export import export, known_format
    from raycloak.coordinator.runs.released_model import Keys, released_model

    wanted = known_format(form)
    model = released_model(source, None, config, Keys.of(trust, key), run_code)
    written = export(model, wanted, out)
    facts = {**asdict(written), "run_id": model.manifest.run_id, "model_digest": model.model_digest}
    output.show("Exported", facts)


@command(app, "discard")
def discard_command(output: Output, run: RunName) -> None:
    """Discard an unfinished run: destroy its generated secret. What was charged stays charged."""
    from raycloak.coordinator.record.run_list import find_run
    from raycloak.coordinator.runs.discard import discard

    folder = discard(find_run(run))
    rows = [("run", folder.record.run_id), ("run directory", str(folder.path))]
    output.show("Discarded", {"run_dir": folder.path, "run_id": folder.record.run_id}, rows)


@command(app)
def plan(
    output: Output,
    config: ConfigFile,
    overrides: Overrides = None,
    trials: Annotated[
        int | None, typer.Option(metavar="K", help="Also show the cost of a search of K such runs.", min=1)
    ] = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="Also show other batches that cost as much, with their steps and noise.")
    ] = False,
) -> None:
    """Show what CONFIG will spend and need, and refuse what cannot run; charges nothing."""
    from raycloak.coordinator.planning.first_look import first_look

    loaded, config_dir = load_config(config, overrides), config.parent
    # Before the libraries of a plan, which take seconds to import.
    first_look(loaded, config_dir)
    from raycloak.coordinator.cli.views.plan import adapter_cover, adapter_rows, choice_rows, plan_rows, search_rows
    from raycloak.coordinator.evidence.sources import configured_policy
    from raycloak.coordinator.planning.advice import batch_choices
    from raycloak.coordinator.planning.dry_run import plan_of
    from raycloak.coordinator.planning.search_cost import search_of
    from raycloak.coordinator.training.callbacks import own_callbacks
    from raycloak.workers.inputs.user_code import telling

    policy = configured_policy(loaded.policy, loaded.collateral, config_dir)
    classes = sorted(policy.accepted_classes) if policy is not None else ["simulated"]
    # Who asks for a plan may see what their own code says: it is not in a run.
    with telling(), waiting(output.progress, "opening the data and trying the model"):
        own_callbacks(loaded.callbacks, (), config_dir)
        plan = plan_of(loaded, config_dir)
    search = search_of(plan, trials) if trials is not None else None
    choices = batch_choices(plan, loaded) if advise else ()
    fields = plan.as_json() | {"evidence_classes": classes} | ({"search": search.as_json()} if search else {})
    if advise:
        fields["choices"] = [asdict(each) for each in choices]
    if cover := adapter_cover(loaded, plan):
        fields["adapter_leak"] = cover
    said = ("SIMULATED (proves nothing about a machine)" if each == "simulated" else each for each in classes)
    rows = [*plan_rows(plan), ("evidence", ", ".join(said)), *adapter_rows(loaded, plan)]
    rows += [*(search_rows(search) if search else []), *choice_rows(choices)]
    output.show("Plan (nothing is charged yet)", fields, rows)


@command(app)
def doctor(
    output: Output,
    boundary: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Instead check the machine's vaults, whose settings are there as ROLE.yaml."),
    ] = None,
) -> int:
    """Check that this machine can run raycloak. Exit code 4 if a check fails."""
    from raycloak.coordinator.cli.doctor import examine
    from raycloak.coordinator.cli.doctor_boundary import examine_boundary
    from raycloak.coordinator.cli.doctor_gpu import examine_gpus

    checks, styles = (
        [*examine(), *examine_gpus()] if boundary is None else examine_boundary(boundary),
        {"ok": "green", "warn": "yellow", "fail": "bold red"},
    )
    failed = any(check.status == "fail" for check in checks)
    rows = [(each.name, Text(each.status, style=styles[each.status]), each.finding, each.remedy) for each in checks]
    view = columns_table("raycloak doctor", ("check", "status", "finding", "remedy"), rows)
    output.result({"ok": not failed, "checks": [asdict(check) for check in checks]}, view)
    return RaycloakError.exit_code if failed else 0


command(app, "audit")(audit_command)
command(app, "top")(top_command)
command(app, "report")(report_command)
command(app, "verify")(verify_command)
command(app, "bundle")(bundle_command)
command(app, "trust")(trust_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the console script; exits with the command's code."""
    open_missing_streams()
    code = invoke(app, "raycloak", list(sys.argv[1:] if arguments is None else arguments))
    leave_stdout()
    sys.exit(code)
