"""The differences of runs: fields of their configurations, results, and whether they are the same bytes.

Hides which figures of two runs may be set beside each other: epsilons of different accounts, data or deltas are no
sums, and results on different splits are of different examples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from raycloak.coordinator.record.run_course import RunCourse, number
from raycloak.coordinator.record.run_list import RunSummary, summary_of
from raycloak.coordinator.record.run_reader import (
    EventTail,
    read_verdict,
    read_written_config,
    read_written_manifest,
)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run as a comparison needs it.

    Attributes:
        config: the leaves of its configuration by dotted name.
        data: fingerprint of its private data; None if it has none, as for public data.
        delta: of its epsilons; None if nothing is private.
        seconds_per_step: mean of the newest steps; None before the first one.
        step_digests: hexadecimal digest of the parameters after each step, by its number from 0.
    """

    summary: RunSummary
    course: RunCourse
    config: Mapping[str, Any]
    data: str | None
    delta: float | None
    seconds_per_step: float | None
    step_digests: Mapping[int, str]

    @property
    def label(self) -> str:
        """A short name that tells it from other runs."""
        return f"{self.summary.name} {self.summary.run_id[:8]}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs beside each other, in the order they were named.

    Attributes:
        differing: fields of the configuration that are not the same in all, each with one value a run; a field that a
            run does not have is None.
        same_bytes: whether all have the same newest parameters; None if a run has none yet.
        same_steps: how many first steps gave the same parameters in all; None if a run has no step.
        cautions: sentences about figures that must not be set beside each other.
    """

    runs: tuple[ComparedRun, ...]
    differing: Mapping[str, tuple[Any, ...]]
    same_bytes: bool | None
    same_steps: int | None
    cautions: tuple[str, ...]


def compare(paths: Sequence[Path]) -> Comparison:
    """Read two runs or more and set them beside each other.

    Raises:
        ConfigError: ``not_a_run``; ``run_file`` if a file of one cannot be read.
    """
    runs = tuple(_read(path) for path in paths)
    names = sorted({name for run in runs for name in run.config})
    values = {name: tuple(run.config.get(name) for run in runs) for name in names}
    # By their text: to Python 1 is True and 1.0.
    differing = {name: each for name, each in values.items() if len({repr(value) for value in each}) > 1}
    digests = [run.summary.model_digest for run in runs]
    first, *others = [run.step_digests for run in runs]
    same = takewhile(lambda step: step in first and all(first[step] == each.get(step) for each in others), count())
    return Comparison(
        runs=runs,
        differing=differing,
        same_bytes=None if None in digests else len(set(digests)) == 1,
        same_steps=len(list(same)) if all(run.step_digests for run in runs) else None,
        cautions=tuple(_cautions(runs, differing)),
    )


def leaves(tree: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested configuration with its dotted name; a list is a leaf."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree


def _read(path: Path) -> ComparedRun:
    course, digests = RunCourse(), {}
    for event in EventTail(path).read():
        course.take(event)
        if event["event"] == "step" and course.model_digest is not None:
            digests[course.steps - 1] = course.model_digest
    manifest, verdict = read_written_manifest(path) or {}, read_verdict(path)
    config = dict(leaves(read_written_config(path).values))
    summary, times = summary_of(path, course, verdict), course.times()
    delta = number(verdict or {}, "privacy_delta") or course.delta or number(config, "dp_config.target_delta")
    return ComparedRun(
        summary=summary,
        course=course,
        config=config,
        data=str(manifest["dataset_fingerprint"]) if manifest.get("dataset_fingerprint") else None,
        delta=delta if summary.private is not False else None,
        seconds_per_step=times.whole if times else None,
        step_digests=digests,
    )


def _cautions(runs: Sequence[ComparedRun], differing: Iterable[str]) -> Iterator[str]:
    private = [run for run in runs if run.summary.private is not False]
    for run in runs:
        if run.summary.private is False:
            yield f"{run.label} is NOT PRIVATE: it has no ε."
    if len(private) > 1:
        yield _about_accounts(private)
    if len({run.delta for run in private}) > 1:
        yield "δ differs: an ε at another δ is another claim, neither better nor worse."
    if any(name.startswith("evaluation.dataset") for name in differing):
        yield "The evaluation splits differ: results are of different examples."
    for run in runs:
        if run.summary.state in ("running", "killed", "unknown"):
            yield f"{run.label} is unfinished ({run.summary.state}): its figures are of now."


def _about_accounts(runs: Sequence[ComparedRun]) -> str:
    accounts, data = {run.summary.account for run in runs}, {run.data for run in runs}
    if len(accounts) == 1 and None not in accounts:
        return (
            f"One account pays for these runs, {accounts.pop()}: its ε charged is of all its runs together. Do not "
            "add them; what they claim together is the account's cap."
        )
    if None in data:
        return (
            "The accounts differ, and no fingerprint says whether the data is the same: neither add nor rank their ε."
        )
    if len(data) == 1:
        return "The data is the same and the accounts differ: together the runs claim the sum of the accounts' caps."
    return "Accounts and data differ: the ε of one run says nothing about the examples of another. Do not add them."
