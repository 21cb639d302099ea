"""A hyper-parameter search by Ray Tune: every trial is a run on one account, which has paid for it before it starts.

A trial is charged for all that it plans when it is registered, and not registered if the account cannot pay. What the
scheduler sees is public or released: results on a declared split, values of measurements, and the account's epsilon.
"""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from raycloak.coordinator.cluster.tuning import trainable_class
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig, parse_config, require_config
from raycloak.coordinator.planning.first_look import first_look
from raycloak.coordinator.planning.references import require_at_hand
from raycloak.coordinator.record.folder import RunFolder, unfinished_run
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.measurement import Released

FIXED = ("name", "ledger", "dataset.public", "dp_config.enabled", "dp_config.target_delta", "secret_retention")
"""Fields that no trial may choose: they decide who is charged for it, and whether."""

_EVALUATED = ("evaluation_accuracy", "evaluation_loss")
_VERDICT = (
    *_EVALUATED,
    "evaluation_f1",
    "evaluation_perplexity",
    "privacy_epsilon_charged",
    "privacy_delta",
    "account",
    "ending",
)
"""The facts of a trial's verdict that its last result has. Its own epsilon is none: the search claims more."""


def tunable(config: RunConfig, *, config_dir: Path | str | None = None) -> type[Any]:
    """Return a `ray.tune.Trainable` whose trials are runs of ``config`` with the values that Tune chooses.

    Guarantee: a trial computes nothing before the account of ``config`` has been charged for the trial's whole plan; a
    trial that the account cannot pay for ends with ``cap_exceeded``. A trial that is stopped early, or fails, stays
    charged. A scheduler sees public and released values only.

    Its results have ``step``, ``evaluation_accuracy`` or ``evaluation_loss`` on a declared split,
    ``measured_QUERY_NAME`` for released measurements, ``privacy_epsilon_charged`` of all trials so far, and
    ``privacy_epsilon``: the account's cap, which all trials together claim. The last one also has ``run_dir``.

    Args:
        config: a private one that names its account. Keys of Tune's ``param_space`` are its fields, nested or with
            dots, such as ``optimizer.learning_rate``.
        config_dir: folder that relative paths and ``module:function`` names start from, the same on every node; the
            working directory if absent.

    Raises:
        ConfigError: ``tune_account`` without an account, ``not_private``, ``config``, or ``tune_missing``.
        ConfigError, BudgetError: what `raycloak run` would refuse at first look.
    """
    require_config(config)
    base = Path(config_dir or Path.cwd()).resolve()
    if config.dataset is None or config.model is None:
        raise ConfigError("config", "a search needs both dataset and model.", "Name them in the configuration.")
    if not config.dp_config.enabled:
        raise ConfigError(
            "not_private", "a search on public data costs no privacy.", "Set dp_config.enabled: true, or use Trainer."
        )
    if config.ledger.account is None:
        raise ConfigError(
            "tune_account",
            "the trials of a search are charged to one account, and the configuration names none.",
            "Open it: raycloak budget open NAME --epsilon-cap E; then name it: ledger.account.",
        )
    require_at_hand(config.dataset, "a search")
    first_look(config, base)
    # It holds no secret: Ray and Tune keep what a trial starts from in files and in the cluster's store.
    raw = config.model_dump(mode="json")

    def start(trial_id: str, chosen: Mapping[str, Any], placement_group: Any | None) -> Trial:
        return Trial(trial_config(raw, trial_id, chosen), base, placement_group)

    return trainable_class(start, partial(trial_config, raw, "trial"), home.home_path())


def trial_config(raw: Mapping[str, Any], trial_id: str, chosen: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of one trial: prepaid, and named after it.

    Args:
        raw: of the search.
        chosen: by Tune, nested or by dotted names. A section as an object counts as the fields that it was given.

    Raises:
        ConfigError: ``tune_param`` for a field of `FIXED`, or a value that is no plain one; or ``config``.
    """
    # Parsed first, so that a section that a trial changes is its own copy.
    changed: dict[str, Any] = parse_config(dict(raw)).model_dump(mode="json")
    for name, value in _flat(chosen):
        if any(name == fixed or name.startswith(f"{fixed}.") for fixed in FIXED):
            raise ConfigError(
                "tune_param",
                f"param_space: no trial may choose {name}, because all are charged to one account on the same terms.",
                "Set it in the configuration of the search.",
            )
        _set(changed, name, value)
    changed["name"] = f"{changed['name']}-{trial_id}"
    changed["ledger"]["prepaid"] = True
    return parse_config(changed)


def _flat(chosen: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field by its dotted name, with a plain value: an object would hide fields from the rules."""
    for name, given in chosen.items():
        # Samplers may give scalars of NumPy.
        value = given.item() if hasattr(given, "item") else given
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_unset=True)
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif _is_plain(value):
            yield f"{prefix}{name}", value
        else:
            raise ConfigError(
                "tune_param",
                f"param_space: {prefix}{name} is a {type(value).__name__}, and no number, text or list of them.",
                "Name each field that the trials choose, such as optimizer.learning_rate.",
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _set(raw: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if raw.get(parent) is None:
            raw[parent] = {}
        raw = raw[parent]
        if not isinstance(raw, dict):
            raise ConfigError("config", f"param_space: {parent} is not a section.", "See docs/configuration.md.")
    raw[last] = value


class Trial:
    """One trial: a run in a thread, which waits after each result until the scheduler has asked for the next one.

    A trial that Tune starts again resumes its unfinished run, which is not charged again.
    """

    def __init__(self, config: RunConfig, base: Path, placement_group: Any | None) -> None:
        self._name = config.name
        self._trainer = Trainer(
            config,
            config_dir=base,
            resume=_unfinished(config.name) is not None,
            progress=self._progress,
            placement_group=placement_group,
        )
        self._results: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
        self._asked = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._train, name=config.name, daemon=True)
        self._known: dict[str, Any] = {}
        self._released = 0

    def next_result(self) -> Mapping[str, Any]:
        """Return the next result; raises what ended the run, if it failed."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._asked.release()
        # Every wait within a run has a deadline, so the run ends or reports.
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """End the run after the step it is in; it is charged for its plan all the same."""
        self._trainer.stop()
        self._asked.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _train(self) -> None:
        try:
            result = self._trainer.train()
        except BaseException as error:  # noqa: BLE001 - raised where the scheduler asks
            self._results.put(error)
            return
        verdict = Verdict.of(result)
        self._known |= {name: value for name in _VERDICT if (value := getattr(verdict, name)) is not None}
        self._known |= {"step": verdict.steps, "privacy_epsilon": verdict.epsilon_cap, **_values(verdict.measurements)}
        self._results.put({**self._known, "run_dir": str(verdict.run_dir), "done": True})

    def _progress(self, report: StepReport) -> None:
        folder = _unfinished(self._name)
        released = folder.released() if folder else ()
        evaluated = {name: value for name in _EVALUATED if (value := getattr(report, name)) is not None}
        is_new, self._released = bool(evaluated) or len(released) > self._released, len(released)
        self._known |= {**evaluated, **_values(released), "step": report.step}
        self._known |= {"privacy_epsilon": report.epsilon_cap, "privacy_epsilon_charged": report.epsilon}
        # The result of the last step comes with the verdict.
        if is_new and report.step < report.steps:
            self._results.put(dict(self._known))
            # Without a deadline: this process ends with the search that is to ask.
            self._asked.acquire()


def _values(releases: Sequence[Released]) -> dict[str, float]:
    """Return the newest values of each measurement, which come last."""
    return {f"measured_{each.query}_{name}": value for each in releases for name, value in each.values.items()}


def _unfinished(name: str) -> RunFolder | None:
    try:
        return unfinished_run(name)
    except ConfigError as error:
        if error.code != "nothing_to_resume":
            raise
        return None
