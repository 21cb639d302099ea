"""A model card in the format of the Hugging Face hub, from a run's record.

A card is published with the model. So it has no path of the site, and what it claims about privacy is the verdict's.
What no record of a training can say is left as the hub's own mark for missing information.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from raycloak.attestation.files.whole import write_whole
from raycloak.coordinator.config.sections import ModelConfig
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.record.run_reader import RunData, read_run
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.facts import is_old, limits_of, sampling_rows
from raycloak.coordinator.report.words import verdict_rows
from raycloak.metrics.file_errors import file_error
from raycloak.version import VERSION

MISSING: Final = "[More Information Needed]"
OF_THE_SITE: Final = frozenset({"run directory", "its model", "warning"})
"""Rows of a verdict that name paths or machines."""
TASKS: Final = {"digits": "image-classification", "imagefolder": "image-classification", "text": "text-classification"}
HUB_TASKS: Final = {
    "causal_lm": "text-generation",
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
}
HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
TABLES: Final = frozenset({"csv", "parquet"})


def write_card(run_dir: Path, path: Path) -> Path:
    """Write the model card of a run to ``path``.

    Raises:
        ConfigError: ``not_a_run``, ``run_file``, or ``report_file`` if the card cannot be written.
    """
    run = read_run(run_dir)
    try:
        write_whole(path, model_card(run).encode())
    except OSError as error:
        raise file_error("report_file", "write", path, error) from None
    return path


def model_card(run: RunData) -> str:
    """Return the card: a front matter of YAML, then Markdown."""
    verdict = run.opened_verdict()
    front = yaml.safe_dump(_front_matter(run, verdict), sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n" + "\n".join(_body(run, verdict))


def _front_matter(run: RunData, verdict: Verdict | None) -> dict[str, Any]:
    tags = ["raycloak"]
    if verdict is not None and verdict.private:
        tags.append("differential-privacy")
    front: dict[str, Any] = {"library_name": "raycloak", "tags": tags}
    model = run.config.model
    # A folder of the site is no name on the hub, though it may look like one.
    if isinstance(model, ModelConfig) and HUB_NAME.fullmatch(model.hf) and not (_base(run) / model.hf).exists():
        front["base_model"] = model.hf
    task = _task(run)
    if task is not None:
        front["pipeline_tag"] = task
    results = _results(verdict)
    if results:
        kind = run.config.evaluation.dataset.kind if run.config.evaluation is not None else "unknown"
        entry = {
            "task": {"type": task or "other"},
            "dataset": {"type": kind, "name": f"{kind}, evaluation split"},
            "metrics": results,
        }
        front["metrics"] = [each["type"] for each in results]
        front["model-index"] = [{"name": run.record.name, "results": [entry]}]
    return front


def _base(run: RunData) -> Path:
    return Path(run.record.driver_base)


def _task(run: RunData) -> str | None:
    dataset, model = run.config.dataset, run.config.model
    if isinstance(model, ModelConfig):
        return HUB_TASKS[model.task]
    if dataset is None:
        return None
    if dataset.kind in TABLES:
        return "tabular-regression" if run.config.loss_name in ("mse", "huber") else "tabular-classification"
    return TASKS.get(dataset.kind)


def _results(verdict: Verdict | None) -> list[dict[str, Any]]:
    """Return what was measured on the evaluation split, in the hub's names; noised measurements are in the text."""
    if verdict is None:
        return []
    found = {
        "accuracy": verdict.evaluation_accuracy,
        "f1": verdict.evaluation_f1,
        "loss": verdict.evaluation_loss,
        "perplexity": verdict.evaluation_perplexity,
    }
    return [{"type": name, "value": value} for name, value in found.items() if value is not None]


def _body(run: RunData, verdict: Verdict | None) -> Iterator[str]:
    yield f"# {plain(run.record.name)}\n"
    yield f"{plain(_headline(run, verdict))}\n"
    yield "## Model details\n"
    yield f"- **Trained with:** raycloak {VERSION}"
    yield f"- **Run:** {plain(run.record.run_id)}"
    if run.manifest is not None:
        computation = run.manifest.computation
        yield f"- **Model:** {plain(computation.model)}, {computation.mechanism.dimension:,} trained parameters"
        yield f"- **Loss:** {plain(computation.loss.text)}"
    for name in ("Developed by", "License", "Language"):
        yield f"- **{name}:** {MISSING}"
    yield f"\n## Uses\n\n{MISSING}\n"
    yield "## Privacy\n"
    if verdict is None:
        yield "Nothing is claimed: the run has no verdict.\n"
    else:
        yield "This is the run's verdict. It is the site's own statement until somebody verifies it.\n"
        yield from _table([row for row in verdict_rows(verdict) if row[0] not in OF_THE_SITE])
    yield "## Training\n"
    yield from _table(sampling_rows(run))
    yield f"Training data: {_data(run)} {MISSING}\n"
    yield "## Evaluation\n"
    rows = [(each["type"], f"{each['value']:.6g}") for each in _results(verdict)]
    if rows:
        yield from _table(rows)
    else:
        yield "Not measured on a public split.\n"
    yield "## Bias, risks and limitations\n"
    yield from (f"- {plain(limit)}" for limit in limits_of(run, verdict))
    yield f"\nBias of the data and of the model: {MISSING}\n"
    yield "## Model card contact\n"
    yield f"{MISSING}\n"


def _headline(run: RunData, verdict: Verdict | None) -> str:
    if verdict is None:
        return "NO VERDICT: nothing is claimed about the privacy of this model."
    said = f"Trained for {verdict.steps} of {verdict.planned_steps} steps"
    if verdict.private:
        delta = "unknown" if verdict.privacy_delta is None else f"{verdict.privacy_delta:g}"
        said += (
            f" with differential privacy: ε = {epsilon_text(verdict.privacy_epsilon)} at δ = {delta} for one example."
        )
    else:
        said += ". NOT PRIVATE: it may reveal any example that it was trained on."
    if verdict.simulated:
        said += " SIMULATED evidence: no hardware vouches for the training."
    if is_old(run, verdict):
        said += " The run has gone on since this verdict, so it may not be about these weights."
    return said


def _data(run: RunData) -> str:
    if run.manifest is None:
        return ""
    kind = run.config.dataset.kind if run.config.dataset is not None else "given in memory"
    mechanism = run.manifest.computation.mechanism
    if mechanism.max_participations is not None:
        return f"Up to {mechanism.num_examples:,} examples a step, which a client sent."
    return f"{mechanism.num_examples:,} examples ({kind})."


def _table(rows: list[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield "| | |\n|---|---|"
        yield from (f"| {plain(label)} | {plain(value)} |" for label, value in rows)
        yield ""


def plain(text: str) -> str:
    """Return ``text`` so that Markdown shows it as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#!&])", r"\\\1", " ".join(text.split()))
