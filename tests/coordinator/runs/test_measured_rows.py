"""The rows of a micro-batch that follow from its memory: one number for plan, manifest and every worker."""

from pathlib import Path

from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.workers.gradients.row_memory import MOST_ROWS
from tests.protocol import config, whole_run, worker_setup


def test_the_memory_of_a_micro_batch_gives_its_rows_to_plan_and_run(tmp_path: Path) -> None:
    found = set()
    for given in (2**13, "auto"):
        fields = {"micro_batch_size": None, "micro_batch_bytes": given, "steps": 1}
        run = whole_run(tmp_path / str(given), **fields)
        run.train()
        assert run.finished is not None
        computation = run.finished.manifest.computation
        settings = config(**fields)
        assert plan_of(settings, Path(worker_setup(settings, tmp_path).base)).mechanism == computation.mechanism
        found.add(computation.largest_rows)
    assert len(found) == 2
    assert max(found) == MOST_ROWS
