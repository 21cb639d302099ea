"""`raycloak discard`: gives up an unfinished run, so that nobody can resume or replay it.

It needs no Ray and no execution: what it ends is on disk.
"""

import time
from contextlib import closing
from pathlib import Path

from raycloak.attestation.orchestrator.orchestrator import open_run
from raycloak.coordinator.config import home
from raycloak.coordinator.record.folder import RunFolder, run_lock
from raycloak.metrics.errors import ConfigError


def discard(run_dir: Path) -> RunFolder:
    """Destroy the generated secret of the run in ``run_dir`` and end its evidence log.

    What was charged stays charged. A secret file of the user's own stays as it is.

    Raises:
        ConfigError: ``not_a_run``, ``run_done`` or ``secret_destroyed``.
        RefusedError: ``run_in_progress``.
    """
    with run_lock(RunFolder.open(run_dir).record.run_id):
        # Read under the lock: an execution may have ended just now.
        folder = RunFolder.open(run_dir)
        record = folder.record
        if record.status in ("done", "void"):
            raise ConfigError(
                "run_done", f"the run in {run_dir} is over; there is nothing to discard.", "Nothing needs to be done."
            )
        with closing(open_run(str(home.home() / "orchestrator"), time.time, record.secret_file, record.run_id)) as run:
            run.finish(str(folder.path / "evidence.jsonl"), destroy=True)
        (folder.path / "examples.npz").unlink(missing_ok=True)
        folder.mark("void")
    return folder
