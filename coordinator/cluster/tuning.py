"""The wiring on Ray Tune: a run as a `ray.tune.Trainable`, and the places that Tune reserves for it.

Ray Tune is loaded only here, and needs pandas: ``pip install 'raycloak[tune]'``.

Tune reserves a trial's places as a whole: one for the trial's own process, on the node of the search's driver, where
the state folder is, and one for each worker. So as many trials run at once as the cluster has room for, and none waits
for places that another one half holds.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ray

from raycloak.coordinator.cluster.placement import Placement
from raycloak.coordinator.config.run import RunConfig
from raycloak.metrics.errors import ConfigError


class TrialRun(Protocol):
    """One trial: a run that gives its results one by one."""

    def next_result(self) -> Mapping[str, Any]:
        """Return the next result, when there is one; the last has ``done``."""
        ...

    def close(self) -> None:
        """End the run after the step it is in, if it has not ended."""
        ...


def trainable_class(
    start: Callable[[str, Mapping[str, Any], Any | None], TrialRun],
    configured: Callable[[Mapping[str, Any]], RunConfig],
    home: Path,
) -> type[Any]:
    """Return the `ray.tune.Trainable` whose trials ``start`` begins.

    A checkpoint says which trial it is of, and has no model: a trial that starts again resumes its own run. A scheduler
    that continues one trial from another's model, such as PBT, is refused (``tune_copy``).

    Args:
        start: begins a trial: by its id, the values that Tune has chosen, and its placement group.
        configured: gives the configuration of a trial.
        home: the state folder of the search, which is that of every trial.

    Raises:
        ConfigError: ``tune_missing``.
    """
    try:
        from ray import tune
    except ImportError:
        raise ConfigError(
            "tune_missing", "Ray Tune cannot be imported: it needs pandas.", "Install it: pip install 'raycloak[tune]'."
        ) from None

    class RaycloakTrial(tune.Trainable):
        """A trial: a run of its own, in a process of its own."""

        def setup(self, config: dict[str, Any]) -> None:
            # This process was started by the cluster, with the cluster's environment.
            os.environ["RAYCLOAK_HOME"] = str(home)
            self._run = start(self.trial_id, config, ray.util.get_current_placement_group())

        def step(self) -> dict[str, Any]:
            return dict(self._run.next_result())

        def cleanup(self) -> None:
            self._run.close()

        def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
            return {"trial_id": self.trial_id}

        def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
            if checkpoint and checkpoint["trial_id"] != self.trial_id:
                raise ConfigError(
                    "tune_copy",
                    "a trial cannot start from the model of another one.",
                    "Choose a scheduler that only stops trials, such as ASHA.",
                )

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            trial = configured(config)
            workers = [Placement(trial.placement, trial.num_workers, trial.use_gpu).bundle] * trial.num_workers
            # The amount is Ray's smallest, so that any number of trials has its process on this node.
            own = {f"node:{ray.util.get_node_ip_address()}": 0.0001}  # type: ignore[no-untyped-call]
            labels = dict(trial.placement.labels)
            selector = {"bundle_label_selector": [{}, *([labels] * trial.num_workers)]} if labels else {}
            return tune.PlacementGroupFactory([own, *workers], strategy=trial.placement.strategy, **selector)

    return RaycloakTrial
