"""A model too large for a plan to run: the plan says so, and the workers refuse it before anything is charged."""

from pathlib import Path

import pytest

from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.metrics.errors import ModelError
from raycloak.workers.models import models
from tests.protocol import config, whole_run, worker_setup

MIXING = {"model": "tests.models:with_centred_batches", "micro_batch_size": 8}


def test_a_large_model_that_mixes_rows_passes_a_plan_that_says_it_did_not_run_it_and_no_worker_charges_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(**MIXING)
    base = Path(worker_setup(settings, tmp_path).base)
    with pytest.raises(ModelError, match="mixing_layer"):
        plan_of(settings, base)
    monkeypatch.setattr(models, "LARGEST_IN_DRIVER", 0)
    (said,) = (each for each in plan_of(settings, base).warnings if "this plan did not run it" in each)
    assert "each worker checks it before anything is charged" in said
    run = whole_run(tmp_path, **MIXING)
    with pytest.raises(ModelError) as caught:
        run.train()
    assert caught.value.code == "mixing_layer"
    assert run.stage.calls("register_run") == run.stage.calls("charge") == []
