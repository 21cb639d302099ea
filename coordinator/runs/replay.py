"""`raycloak replay`: computes finished steps of a run again and compares the digests.

A user who does not trust a result checks it so: the run's own policy admits the workers, the orchestrator alone
reads the run secret, and the ledger hands out the receipts it has. Nothing is charged, since nothing new is released.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raycloak.attestation.keys.run_secret import require_kept
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.runs.execution import Execution
from raycloak.coordinator.vaults.machine_ledger import ledger_to_read
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.inputs.user_code import portable_base

_STEPS = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of a replay in which every digest was the logged one.

    Attributes:
        first, last: the steps that were computed, ``last`` not included; they begin where a package ends.
        digests: hexadecimal model digest after each of them.
        most_hosted: most virtual workers whose keys of one epoch one machine has got by now, in any execution of the
            run; the epsilon against the aggregator with that machine rests on it.
        charged_steps: how many steps of the run the ledger has charged, the same before and after.
    """

    run_dir: Path
    first: int
    last: int
    workers: int
    digests: tuple[str, ...]
    most_hosted: int
    virtual_workers: int
    charged_steps: int
    evidence_class: str


def parse_steps(text: str) -> tuple[int, int]:
    """Read ``10:20`` as (10, 20); ConfigError ``steps`` for anything else."""
    match = _STEPS.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError("steps", f"'{text}' is not a range of steps.", "Write FIRST:END, for example 10:20.")
    return int(match[1]), int(match[2])


def replay(
    run_dir: Path,
    steps: tuple[int, int],
    workers: int,
    notice: Callable[[str], None],
    phase: Callable[[str], None] = lambda what: None,
) -> Replay:
    """Compute ``steps`` of the run in ``run_dir`` again on ``workers`` workers.

    Args:
        notice, phase: as of `raycloak.coordinator.runs.execution.Execution`.

    Guarantee: a step is computed only if the ledger charged it for exactly these parameters and the evidence log
    committed it; returns only if every digest is the logged one. The first that differs ends the replay before
    another receipt is asked for.

    Raises:
        ConfigError: ``not_a_run``, ``steps``, ``secret_destroyed``, ``run_secret``, or ``config`` (it cannot be hosted
            on so many workers).
        RefusedError: ``resume_differs`` if code, data or libraries are not the run's; ``not_charged``.
        RunFailedError: ``not_reproducible``, with the step and both digests.
    """
    folder = RunFolder.open(run_dir)
    manifest = folder.manifest()
    if manifest is None or steps[1] > manifest.computation.mechanism.steps:
        raise ConfigError(
            "steps",
            f"the run in {run_dir} has no steps {steps[0]} to {steps[1]}.",
            "Steps are FIRST:END, from 0 to those that it finished.",
        )
    config = _with_workers(folder.config(), workers)
    if config.model is None or config.dataset is None:
        raise ConfigError("config", "the run was given its model or data in Python.", "Name both in the configuration.")
    # Before any process is started for a run whose secret is gone.
    given = folder.record.secret_file
    if given is None:
        require_kept(home.home() / "orchestrator", folder.record.run_id)
    elif not Path(given).exists():
        raise ConfigError(
            "run_secret",
            f"the run began with the secret in {given}, which is not there.",
            "Put the file back; nothing else gives the run's keys.",
        )
    before = _charged_steps(config, folder)
    # A Ray job's working directory may be gone. Then it is the same place in the working directory of this process.
    base = portable_base(folder.base) if folder.base.is_dir() else folder.record.base
    execution = Execution(config, model_source(config.model), base, notice=notice, phase=phase)
    finished = execution.replay(folder, manifest, *steps)
    after = _charged_steps(config, folder)
    require_bound(after == before, "a replay charges nothing")
    outcomes = finished.outcomes
    return Replay(
        run_dir=run_dir,
        first=outcomes[0].commit.step,
        last=outcomes[-1].commit.step + 1,
        workers=finished.workers,
        digests=tuple(outcome.commit.released_digest.hex() for outcome in outcomes),
        most_hosted=finished.most_hosted,
        virtual_workers=manifest.computation.mechanism.virtual_workers,
        charged_steps=after,
        evidence_class=finished.evidence_class,
    )


def _with_workers(config: RunConfig, workers: int) -> RunConfig:
    """Return the run's configuration for another number of workers, with the same batch size."""
    raw = config.model_dump(mode="json")
    raw |= {"num_workers": workers, "max_workers": None, "batch_size_per_worker": None}
    # All pairs mask: that needs no number of workers, and withstands more.
    raw |= {"metrics": {}, "masks": {}}
    # One that the plan chose is in the manifest.
    if config.batch_size_per_worker is not None:
        raw |= {"expected_batch_size": config.batch_size}
    if workers == 1:
        raw |= {"secure_aggregation": False}
    if config.dp_config.colluding_workers == 0:
        # Otherwise the counted share of the noise depends on it.
        raw |= {"min_workers": None}
    return parse_config(raw)


def _charged_steps(config: RunConfig, folder: RunFolder) -> int:
    """Count the steps of the run that the ledger has charged."""
    with ledger_to_read(config) as ledger:
        runs = (run for account in ledger.view().accounts for run in account.runs)
        return next((run.charged_steps for run in runs if run.run_id == folder.record.run_id), 0)
