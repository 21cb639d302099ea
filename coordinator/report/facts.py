"""The facts of a run that are not in its verdict: data, sampling, environment, commands, and what limits all of it."""

import re
import shlex
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from raycloak.attestation.files.whole import write_whole
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.record.run_reader import RunData
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.members import Evidence, utc
from raycloak.coordinator.report.words import delta_text, participation_rows, unit_text, units_word
from raycloak.metrics.file_errors import file_error
from raycloak.workers.terms.mechanism import Mechanism

Rows = list[tuple[str, str]]

TEMPLATES: Final = Path(__file__).parent / "templates"
_KEPT = {"sealed": "sealed", "sent": "encrypted for attested workers"}


def filled(template: str, **facts: Any) -> str:
    """Return a template with its facts; in HTML they are escaped, in Markdown the filter ``plain`` escapes them."""
    files = FileSystemLoader(TEMPLATES)
    pages = Environment(loader=files, autoescape=select_autoescape(["html"]), undefined=StrictUndefined)
    pages.filters |= {"epsilon": epsilon_text, "delta": delta_text, "plain": plain, "utc": utc}
    return pages.get_template(template).render(**facts)


def written(path: Path, document: str) -> Path:
    """Write a document to ``path``, whole or not at all; ConfigError ``report_file`` if that cannot be."""
    try:
        write_whole(path, document.encode())
    except OSError as error:
        raise file_error("report_file", "write", path, error) from None
    return path


def plain(text: str) -> str:
    """Return ``text`` so that Markdown shows it as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#!&])", r"\\\1", " ".join(text.split()))


def budget_of(run: RunData) -> tuple[float | None, float]:
    """Return the account's cap, and its delta: as the verdict has them, else as the configuration asked for them."""
    asked, verdict = run.config.dp_config, run.verdict or {}
    cap, delta = verdict.get("epsilon_cap"), verdict.get("privacy_delta")
    if cap is None:
        cap = asked.epsilon_cap if asked.epsilon_cap is not None else asked.target_epsilon
    return cap, asked.target_delta if delta is None else delta


def data_rows(run: RunData) -> Rows:
    """Return what the examples are, by configuration and manifest; never what they contain."""
    dataset, evaluation = run.config.dataset, run.config.evaluation
    if dataset is None:
        rows = [("examples", "given in memory: the driver has seen them")]
    else:
        place = " · ".join(part for part in (dataset.path, dataset.function) if part)
        built_in = "none: a client sends it" if dataset.kind == "sent" else f"built in, split {dataset.split}"
        rows = [("kind", dataset.kind), ("place", place or built_in)]
        rows.append(("declared", "public: needs no protection" if dataset.public else "private"))
        rows.append(("kept", _KEPT.get(dataset.kind, "in the clear, on the workers' machines")))
    if run.manifest is not None:
        mechanism = run.manifest.computation.mechanism
        most = "examples, N" if mechanism.max_participations is None else "examples of a step, at most"
        rows.append((most, f"{mechanism.num_examples:,}, a public number"))
        rows.append(("identity", run.manifest.computation.dataset.hex()))
        fingerprint = run.manifest.dataset_fingerprint.hex()
        rows.append(("fingerprint", fingerprint or "none: without a key, nothing ties the account to these very bytes"))
    if evaluation is not None:
        place = evaluation.dataset.path or f"built in, split {evaluation.dataset.split}"
        rows.append(("evaluated on", f"{evaluation.dataset.kind}, {place}; every {evaluation.every} steps, public"))
    return rows


def _correlated(mechanism: Mechanism) -> str:
    if mechanism.bands == 1:
        return ""
    return f", of all {mechanism.bands} releases together that one {mechanism.unit} is mixed into"


def sampling_rows(run: RunData) -> Rows:
    """Return how examples are drawn, clipped and noised; empty without a manifest."""
    if run.manifest is None:
        return []
    mechanism = run.manifest.computation.mechanism
    sent, passes = mechanism.max_participations is not None, mechanism.expected_passes()
    units = units_word(mechanism)
    turns = f"in every {mechanism.bands}th step, its own" if mechanism.bands > 1 else "in each step"
    drawn = f"each {mechanism.unit} by itself with probability {mechanism.sample_rate:.6g} {turns} (Poisson)"
    all_steps = "" if sent else f"; {passes:.3g} passes in {mechanism.steps} steps"
    rows = [
        ("unit of privacy", f"{unit_text(mechanism)}, replaced by a contribution of zero"),
        *([] if sent else [("sampling", drawn)]),
        *participation_rows(mechanism.max_participations, mechanism.steps),
        ("batch", f"{mechanism.expected_batch_size:g} {units} expected{all_steps}"),
        (
            "computed rows",
            f"{mechanism.virtual_workers} virtual workers x {mechanism.micro_batches} x {mechanism.micro_batch_rows}",
        ),
    ]
    if not mechanism.private:
        return [*rows, ("privacy", "NOT PRIVATE: nothing was clipped or noised")]
    cap, delta = budget_of(run)
    others = "the most examples that all steps could have" if sent else f"the number of {units}"
    most = mechanism.num_examples * (mechanism.steps if sent else 1)
    normalised = ", normalised" if mechanism.clipping == "normalised" else ""
    return [
        *rows,
        ("clipping norm", f"{mechanism.max_grad_norm:g}, of one {mechanism.unit}'s gradient{normalised}"),
        ("noise multiplier", f"{mechanism.noise_multiplier:.6g}{_correlated(mechanism)}"),
        ("noise counted on", f"{mechanism.honest_share:.0%} of the virtual workers"),
        ("δ", f"{delta:g}; one over {others} is {1 / most:.2g}"),
        ("cap of the account", "none given" if cap is None else f"ε {cap:g}"),
        ("accountant", mechanism.accountant),
        *(
            (f"measured: {each.query.replace('_', ' ')}", _releases(each.mechanism))
            for each in run.manifest.computation.measurements
        ),
    ]


def _releases(mechanism: Mechanism) -> str:
    times = "once" if mechanism.steps == 1 else f"{mechanism.steps} times"
    return f"{times} at noise multiplier {mechanism.noise_multiplier:.6g}"


def commands_of(run: RunData, evidence: Evidence) -> list[tuple[str, str, str]]:
    """Return what a reader can do with the run directory: purpose, command, and on what it depends."""
    folder = shlex.quote(str(run.path))
    made = []
    if not evidence.problem and run.record.status != "running":
        proof = f"raycloak trust {folder} --output trust.json\nraycloak verify {folder} --trust trust.json"
        needs = "Needs the site's ledger and packages. An auditor gets one file instead: raycloak bundle."
        made.append(("Prove every claim again", proof, needs))
    steps = len(run.steps)
    if steps:
        replay = _replay(run, evidence, f"raycloak replay {folder} --steps 0:{min(steps, 10)}")
        made.append(("Compute steps again", *replay))
    copied = shlex.quote(str(Path(run.record.driver_base) / f"{run.config.name}-again.yaml"))
    copy = f"cp {folder}/config.yaml {copied}\nraycloak run {copied}"
    if run.config.model is None or run.config.dataset is None:
        made.append(("Train it again", "", "The run was given its model or data in Python: start that program again."))
    else:
        needs = "This is a new run with a new secret: other noise, other bytes, and a charge of its own to the account."
        made.append(("Train it again", copy, needs))
        if run.record.status in ("running", "stopped", "failed") and steps:
            needs = "From its newest sealed package, with the secret that the site still has."
            made.append(("Resume it", f"{copy} --resume", needs))
    if (run.path / "parameters.safetensors").exists():
        export = f"raycloak export {folder} --format safetensors --out model.safetensors"
        made.append(("Take its model", export, "Any use of it is covered by what the verdict claims."))
    return made


def _replay(run: RunData, evidence: Evidence, command: str) -> tuple[str, str]:
    """Return the command, if it can be run, and what it needs."""
    if run.record.secret_file is not None:
        return command, f"Needs the run secret in {run.record.secret_file} and the data. It charges nothing."
    if evidence.secret_destroyed:
        needed = "its secret was destroyed at its end. secret_retention: keep would have kept it."
        return "", f"raycloak replay cannot do this for the run: {needed}"
    return command, "Needs the run secret, which the site has until the run is complete, and the data."


def is_old(run: RunData, verdict: Verdict) -> bool:
    """Return whether the run has gone on since its verdict: it was resumed, and has not ended since."""
    return run.record.status == "running" or verdict.steps < len(run.steps)


def limits_of(run: RunData, verdict: Verdict | None) -> tuple[str, ...]:
    """Return what this run does not show, in plain words; the first weigh most."""
    sealed = run.config.dataset is not None and run.config.dataset.kind in _KEPT
    paragraphs = re.split(r"\n\s*\n", filled("limits.txt", verdict=verdict, sealed=sealed).strip())
    return tuple(" ".join(each.split()) for each in paragraphs)
