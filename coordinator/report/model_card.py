"""A model card in the format of the Hugging Face hub, from a run's record.

A card is published with the model. So it has no path of the site, and what it claims about privacy is the verdict's.
What no record of a training can say is left as the hub's own mark for missing information.
"""

import re
from pathlib import Path
from typing import Any, Final

import yaml

from raycloak.coordinator.config.sections import ModelConfig
from raycloak.coordinator.record.run_reader import RunData, read_run
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.facts import filled, is_old, limits_of, sampling_rows, written
from raycloak.coordinator.report.words import units_word, verdict_rows
from raycloak.version import VERSION

OF_THE_SITE: Final = frozenset({"run directory", "its model", "warning"})
"""Rows of a verdict that name paths or machines."""
TASKS: Final = {"digits": "image-classification", "imagefolder": "image-classification", "text": "text-classification"}
HUB_TASKS: Final = {
    "causal_lm": "text-generation",
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
}
HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def write_card(run_dir: Path, path: Path) -> Path:
    """Write the model card of a run to ``path``.

    Raises:
        ConfigError: ``not_a_run``, ``run_file``, or ``report_file`` if the card cannot be written.
    """
    return written(path, model_card(read_run(run_dir)))


def model_card(run: RunData) -> str:
    """Return the card: a front matter of YAML, then Markdown."""
    verdict, dataset = run.opened_verdict(), run.config.dataset
    results = _results(verdict)
    computation = run.manifest.computation if run.manifest is not None else None
    card = filled(
        "model_card.md",
        version=VERSION,
        front=yaml.safe_dump(_front_matter(run, verdict, results), sort_keys=False, allow_unicode=True),
        record=run.record,
        verdict=verdict,
        is_old=verdict is not None and is_old(run, verdict),
        computation=computation,
        mechanism=computation.mechanism if computation else None,
        units=units_word(computation.mechanism) if computation else None,
        verdict_rows=[row for row in verdict_rows(verdict) if row[0] not in OF_THE_SITE] if verdict else [],
        sampling=sampling_rows(run),
        kind=dataset.kind if dataset is not None else "given in memory",
        results=[(name, f"{value:.6g}") for name, value in results.items()],
        limits=limits_of(run, verdict),
    )
    return f"{card}\n"


def _front_matter(run: RunData, verdict: Verdict | None, results: dict[str, float]) -> dict[str, Any]:
    private = verdict is not None and verdict.private
    front: dict[str, Any] = {"library_name": "raycloak", "tags": ["raycloak", *["differential-privacy"] * private]}
    model, base = run.config.model, Path(run.record.driver_base)
    # A folder of the site is no name on the hub, though it may look like one.
    if isinstance(model, ModelConfig) and HUB_NAME.fullmatch(model.hf) and not (base / model.hf).exists():
        front["base_model"] = model.hf
    task = _task(run)
    if task is not None:
        front["pipeline_tag"] = task
    if results:
        kind = run.config.evaluation.dataset.kind if run.config.evaluation is not None else "unknown"
        entry = {
            "task": {"type": task or "other"},
            "dataset": {"type": kind, "name": f"{kind}, evaluation split"},
            "metrics": [{"type": name, "value": value} for name, value in results.items()],
        }
        front["metrics"] = list(results)
        front["model-index"] = [{"name": run.record.name, "results": [entry]}]
    return front


def _task(run: RunData) -> str | None:
    dataset, model = run.config.dataset, run.config.model
    if isinstance(model, ModelConfig):
        return HUB_TASKS[model.task]
    if dataset is None:
        return None
    if dataset.kind in ("csv", "parquet"):
        return "tabular-regression" if run.config.loss_name in ("mse", "huber") else "tabular-classification"
    return TASKS.get(dataset.kind)


def _results(verdict: Verdict | None) -> dict[str, float]:
    """Return what was measured on the evaluation split, in the hub's names; noised measurements are in the text."""
    names = ("accuracy", "f1", "loss", "perplexity")
    found = {name: getattr(verdict, f"evaluation_{name}", None) for name in names}
    return {name: value for name, value in found.items() if value is not None}
