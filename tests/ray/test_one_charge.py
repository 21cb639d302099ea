"""One charge pays for one release, whatever a second host brings: whole runs on Ray over a PostgreSQL ledger.

The second host has the run secret, the ledger's address and the vendor's root, and no state of its own. It is as good
as a host that lost its state. `test_one_release.py` and `test_frozen_models.py` have all that it may bring, on plain
objects.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import RefusedError
from tests.protocol import RENYI
from tests.ray.watching import watched

EXAMPLES = 40


def write_inputs(folder: Path, altered: bool = False) -> Path:
    """Write data and secret, perhaps with one record altered; returns the folder."""
    folder.mkdir()
    images, labels = np.random.default_rng(3).random((EXAMPLES, 64), np.float32), np.arange(EXAMPLES) % 10
    if altered:
        images[0], labels[0] = 1 - images[0], 9
    np.savez(folder / "data.npz", images=images, labels=labels)
    (folder / "secret").write_text("5e" * 32)
    return folder


def train(home: Path, inputs: Path, url: str):
    """Train one step on a host with that state; returns run directory or refusal, and how often workers were asked."""
    raw = demo_config() | {
        "num_workers": 2,
        "steps": 1,
        "expected_batch_size": EXAMPLES,
        "dataset": {"kind": "npz", "path": "data.npz"},
        "evaluation": None,
        "dp_config": RENYI,
        "ledger": {"url": url},
    }
    options = {"config_dir": inputs, "run_secret": inputs / "secret", "notice": lambda line: None}
    with pytest.MonkeyPatch.context() as patch, watched() as watching:
        patch.setenv("RAYCLOAK_HOME", str(home))
        try:
            result = Trainer(parse_config(raw), **options).train()
        except RefusedError as refusal:
            return refusal, len(watching.asked)
        return Path(result["run_dir"]), len(watching.asked)


def charges(url: str):
    """Return the number of charges of all runs, and what every account has spent."""
    ledger = PrivacyLedger(url, create=False)
    try:
        accounts = ledger.view().accounts
    finally:
        ledger.close()
    charged = sum(query.charged for account in accounts for run in account.runs for query in run.queries)
    return charged, [account.spent_epsilon for account in accounts]


def test_a_second_host_with_a_record_altered_gets_no_second_release_for_an_old_charge(ray_cluster, postgres, tmp_path):
    url, first, second = postgres.url(), tmp_path / "first", tmp_path / "second"
    first.mkdir()
    paid, asked = train(first, write_inputs(tmp_path / "inputs"), url)
    assert isinstance(paid, Path), paid
    assert asked == 2
    before = charges(url)
    assert before[0] == 1
    second.mkdir()
    shutil.copytree(first / "simulator", second / "simulator")
    refusal, asked = train(second, write_inputs(tmp_path / "altered", altered=True), url)
    assert charges(url) == before
    assert isinstance(refusal, RefusedError), f"one charge, two releases of step 0: {paid} and {refusal}"
    assert refusal.code == "data_changed"
    assert asked == 0, "nothing is computed before the refusal"
