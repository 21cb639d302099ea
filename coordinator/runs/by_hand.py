"""A run whose step loop its caller writes, on the Ray cluster that is there or a local one.

Hides how its processes start and end, and how its run directory is left.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from raycloak.coordinator.config.run import RunConfig, require_config
from raycloak.coordinator.config.sections import MeasurementsConfig
from raycloak.coordinator.evidence.sources import configured_policy
from raycloak.coordinator.planning.first_look import first_look
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.planning.plan import check_public
from raycloak.coordinator.planning.references import require_at_hand
from raycloak.coordinator.runs.execution import Execution
from raycloak.coordinator.training.hand_loop import HandLoop
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.user_code import portable_base


@contextmanager
def by_hand(
    config: RunConfig,
    *,
    config_dir: Path | str | None = None,
    notice: Callable[[str], None] | None = None,
    small_epsilon: bool = False,
) -> Iterator[HandLoop]:
    """Start the members of a run for your own loop: vectors, aggregate, your update, and so on.

    The loop is charged to the account of the data, like any run. ``config.optimizer`` is not used. Call
    `HandLoop.finish` at the end; without it the run is void. Such a run cannot be resumed or replayed.

    Args:
        config: it names model and dataset, and neither measurements nor evaluation, callbacks or loggers.
        config_dir: folder that relative paths and ``module:function`` names start from; the working directory if
            absent.
        notice: called with one line for each thing that a watcher needs to know; standard error if absent.
        small_epsilon: whether an epsilon below 0.1 is meant, where the run opens the account of its data.

    Raises:
        RaycloakError: the reason why the run is refused; nothing was charged.
    """
    require_config(config)
    if config.dataset is None:
        raise ConfigError("config", "no dataset is named.", "Name one in the configuration.")
    called = config.callbacks or config.loggers.tools
    if config.measurements != MeasurementsConfig() or config.evaluation is not None or called:
        raise ConfigError(
            "config",
            "a loop by hand makes no measurements, evaluates nothing and calls nobody.",
            "Leave out measurements, evaluation, callbacks and loggers.",
        )
    if config.dp_config.noise.correlated != "off":
        raise ConfigError(
            "config",
            "a loop by hand makes its own updates, and correlated noise is solved where a run makes them.",
            "Set dp_config.noise.correlated: off.",
        )
    check_public(config)
    base = Path(config_dir or Path.cwd())
    require_at_hand(config.dataset, "a loop by hand")
    first_look(config, base)
    configured_policy(config.policy, config.collateral, base)
    tell = notice or (lambda line: print(line, file=sys.stderr))  # noqa: T201 - the default of a script
    model = model_source(config.model)
    execution = Execution(config, model, portable_base(base), notice=tell, small_epsilon=small_epsilon)

    def leave() -> None:
        # Nobody can resume it, so it is void unless its model is there.
        if execution.folder is not None:
            is_done = (execution.folder.path / "parameters.safetensors").exists()
            execution.folder.mark("done" if is_done else "void")

    with ExitStack() as stack:
        stack.callback(leave)
        loop = HandLoop(execution.by_hand(stack))
        # Registered last, so it comes before the processes that it asks are ended.
        stack.callback(loop.close)
        yield loop
