"""The commands ``raycloak data``: building, checking and sealing examples before they leave their owner."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raycloak.coordinator.cli.options import ConfigFile, Overrides, command, hexadecimal
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.console.figures import size_text
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.runs.progress import waiting
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from raycloak.coordinator.planning.data_check import Checked, UnitReport

data = typer.Typer(help="Data: build a dataset, check it, and encrypt it so that only attested workers open it.")


@command(data, "build")
def build_command(
    output: Output,
    config: ConfigFile,
    part: Annotated[
        Literal["training", "evaluation"], typer.Option(help="Build CONFIG's dataset, or its evaluation.dataset.")
    ] = "training",
    overrides: Overrides = None,
) -> None:
    """Run the pipeline of CONFIG's dataset (kind ray_data) for its owner, and write its rows to the dataset's path.

    It starts a Ray of its own, on this machine, and holds the examples there in the clear.
    """
    from raycloak.coordinator.planning.references import part_of

    dataset = part_of(load_config(config, overrides), part)
    if dataset is None or dataset.kind != "ray_data":
        raise ConfigError(
            "not_built", f"the {part} dataset is none of kind ray_data.", "Only a pipeline of Ray Data is built."
        )
    assert dataset.function is not None, "kind ray_data comes with a function"
    assert dataset.path is not None, "kind ray_data comes with a path"
    from raycloak.coordinator.cluster.pipelines import build_folder
    from raycloak.workers.inputs.user_code import telling

    folder = (config.parent / dataset.path).resolve()
    # The owner runs the owner's own code.
    with telling():
        index = build_folder(dataset.function, config.parent.resolve(), folder)
    facts = {
        "path": str(folder),
        "rows": index.rows,
        "files": len(index.files),
        "function": index.function,
        "code_digest": index.code,
        "manifest_digest": index.made_by(),
    }
    rows = [
        ("folder", f"{folder}: in the clear, for its owner alone"),
        ("rows", f"{index.rows} in {len(index.files)} files, shuffled"),
        ("pipeline", f"{index.function}, code {index.code.hex()}"),
        ("in the manifest", index.made_by().hex()),
    ]
    output.show("Built data (PRIVATE)", facts, rows)


@command(data, "check")
def check_command(output: Output, config: ConfigFile, overrides: Overrides = None) -> int:
    """Read all examples of CONFIG for their owner: NaN, wrong labels, duplicates. What it prints is private.

    Exit code 2 if a run should not train on them. Otherwise the check is recorded for runs on this machine, if the
    dataset has a fingerprint_key.
    """
    from raycloak.coordinator.planning.data_check import check_data

    given = load_config(config, overrides)
    with waiting(output.progress, "reading all examples"):
        checked = check_data(given, config.parent)
    report = checked.report
    facts = {
        **asdict(report),
        "problems": report.problems,
        "cautions": report.cautions,
        "fingerprint": checked.fingerprint or None,
        "recorded": checked.digest or None,
    }
    output.show("Data check (PRIVATE: exact counts over the examples)", facts, _rows(checked))
    return ConfigError.exit_code if report.problems else 0


def _rows(checked: "Checked") -> Iterator[tuple[str, str]]:
    """Yield what the owner of data is told about it."""
    report = checked.report
    label_range = "none" if report.label_range is None else "{:g} to {:g}".format(*report.label_range)
    classes = f", of {report.classes} classes" if report.classes is not None else ""
    yield "examples", f"{report.examples:,}"
    yield "features", checked.features
    yield "labels", f"{list(report.label_shape)} {report.label_dtype}, {label_range}{classes}"
    yield "NaN or infinite", _counted(report.not_finite, "examples", report.not_finite_shown)
    known = _counted(report.labels_outside, "examples", report.labels_outside_shown)
    yield "labels outside", "no classes are known" if report.classes is None else known
    if report.vocabulary is not None or report.ids_outside:
        yield "ids outside", _counted(report.ids_outside, "examples", report.ids_outside_shown)
    yield "duplicates", f"{report.duplicates:,} examples equal an earlier one"
    overlap = report.evaluation_overlap
    yield "also evaluated on", "no evaluation split" if overlap is None else f"{overlap:,} examples"
    yield "constant features", _counted(report.constant_features, "positions", report.constant_shown)
    if report.units is not None:
        yield from _unit_rows(report.units, report.examples)
    if report.cut is not None:
        yield "cut texts", f"{report.cut:,} examples"
    yield from (("PROBLEM", problem) for problem in report.problems)
    yield from (("caution", caution) for caution in report.cautions)
    if report.problems:
        yield "recorded", "no: run it again when the problems are mended"
    elif checked.digest:
        yield "recorded", f"{checked.digest.hex()}, for data of the fingerprint {checked.fingerprint.hex()}"
    else:
        yield "recorded", "no: without a dataset.fingerprint_key no run knows that its data is this"


def _unit_rows(units: "UnitReport", examples: int) -> Iterator[tuple[str, str]]:
    """Yield what the owner is told about the rows of each unit."""
    least, median, most_have, nearly_all, most = units.rows
    yield "unit", f"{units.unit}: {units.count:,} of them are protected as a whole"
    spread = f"least {least:,}, median {median:,}, 90 % {most_have:,}, 99 % {nearly_all:,}, most {most:,}"
    yield f"rows of a {units.unit}", spread
    yield "cut away", f"{units.beyond:,} of {examples:,} rows in a step: {units.rows_per_unit} of one take part at most"
    unknown = "nobody says: set evaluation.dataset.unit"
    yield "in both splits", unknown if units.evaluated is None else f"{units.evaluated:,} of them"


def _counted(count: int, what: str, shown: tuple[int, ...]) -> str:
    """Return a count, and the first of the places that it counts."""
    more = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return f"{count:,} {what}" + (f": {', '.join(map(str, shown))}{more}" if shown else "")


@command(data, "seal")
def seal_command(
    output: Output,
    config: ConfigFile,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Key of the data owner; made if missing.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder.")],
    part: Annotated[
        Literal["training", "evaluation"], typer.Option(help="Seal CONFIG's dataset, or its evaluation.dataset.")
    ] = "training",
    ledger_key: Annotated[
        str | None, typer.Option(metavar="HEX", help="Ledger that a run must charge to: what `budget key` printed.")
    ] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Account of it that a run must pay from.")] = None,
    least_noise: Annotated[
        float | None, typer.Option(metavar="Z", help="Least noise multiplier of all that a run releases.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Encrypt examples of CONFIG, one slice per virtual worker, for CONFIG's policy.

    Training data needs --ledger-key, --account and --least-noise: only runs that state them get its keys.
    """
    from raycloak.coordinator.planning.sealing import SealTerms, seal_for

    terms = SealTerms.of(part, hexadecimal(ledger_key), account, least_noise)
    given = load_config(config, overrides)
    with waiting(output.progress, "encrypting all examples"):
        header, policy = seal_for(given, config.parent, key, out, terms)
    cipher_bytes = sum(each.cipher_bytes for each in header.slices)
    simulated = policy.accepts_simulated
    facts = {
        "path": str(out),
        "part": part,
        "key_file": str(key),
        "slices": header.virtual_workers,
        "bytes": cipher_bytes,
        "policy_digest": header.policy_digest,
        "simulated": simulated,
        "fingerprint": header.digest(),
        "demand": header.demand.model_dump(mode="json") if header.demand else None,
    }
    rows = [
        ("folder", f"{out}, for {part}"),
        ("slices", f"{header.virtual_workers}, {size_text(cipher_bytes)}"),
        ("opened by", "workers of a run under the policy " + header.policy_digest.hex()),
        ("fingerprint", header.digest().hex()),
        ("key", f"{key}: keep it; {'' if part == 'training' else 'evaluation.'}dataset.key_file of a run names it"),
    ]
    if header.demand is not None:
        demand = header.demand
        rows.append(("demands", f"account '{demand.account}' of ledger {demand.ledger_key.hex()}"))
        rows.append(("least noise", f"{demand.least_noise_multiplier:g} in every release"))
        # A name that is still free could be opened by anybody who sees this header, with any cap.
        opening = f"raycloak budget open {demand.account} --epsilon-cap E --fingerprint {header.digest().hex()}"
        rows.append(("open first", f"before anybody else gets the folder: {opening}"))
    output.show("Sealed data (SIMULATED evidence opens it)" if simulated else "Sealed data", facts, rows)
