"""One charge pays for one release, whatever a second host brings: whole runs on Ray over a PostgreSQL ledger.

The second host has the run secret, the ledger's address and the vendor's root, and no state of its own. It is as good
as a host that lost its state.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import RefusedError
from raycloak.workers.inputs.models import ModelSource, build_model
from tests.protocol import RENYI
from tests.ray.watching import watched

TEXTS, WORDS, ROWS, WIDTH = 40, 5, 16, 64
CLIP_NORM, LEARNING_RATE = 1.0, 0.5
NOISE = RENYI["noise_multiplier"] * CLIP_NORM
PROBED = 2
"""Rows that stay: synthetic examples of zeros and ones look at no others."""
SECRET = "5e" * 32
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Inputs:
    """A folder with data, model and its frozen rows."""

    folder: Path

    @classmethod
    def write(cls, folder, *, altered=False, other_rows=False):
        """Write them; with one record altered, or other rows where no synthetic example looks."""
        folder.mkdir()
        generator = np.random.default_rng(3)
        ids, labels = generator.integers(0, ROWS, (TEXTS, WORDS)), generator.integers(0, 4, TEXTS)
        rows = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
        if altered:
            ids[0], labels[0] = (ids[0] + 1) % ROWS, (labels[0] + 1) % 4
        if other_rows:
            rows[PROBED:] = -rows[PROBED:]
        np.savez(folder / "texts.npz", ids=ids, labels=labels)
        np.save(folder / "rows.npy", rows)
        shutil.copy(HERE / "frozen.py", folder)
        (folder / "secret").write_text(SECRET)
        return cls(folder)

    def clear_sum(self):
        """Return the sum of clipped gradients at the start, without noise: every example is in every batch."""
        data = np.load(self.folder / "texts.npz")
        module, total = build_model(ModelSource.of("frozen:model"), self.folder, 0), 0.0
        for ids, label in zip(torch.from_numpy(data["ids"]), torch.from_numpy(data["labels"]), strict=True):
            loss = functional.cross_entropy(module(ids[None]), label[None])
            parts = torch.autograd.grad(loss, [module.head.bias, module.head.weight])
            gradient = torch.cat([part.reshape(-1) for part in parts]).double()
            total += gradient * min(1.0, CLIP_NORM / float(gradient.norm()))
        return total.numpy()


class Host:
    """A machine with a state folder of its own, and the one Ray cluster."""

    def __init__(self, home, vendor=None):
        self.home = home
        home.mkdir()
        if vendor is not None:
            shutil.copytree(vendor, home / "simulator")

    def train(self, inputs, url):
        """Train one step; returns run directory or refusal, and how many calls asked a worker for its vector."""
        raw = {
            "num_workers": 2,
            "virtual_workers": 8,
            "steps": 1,
            "expected_batch_size": TEXTS,
            "model": "frozen:model",
            "dataset": {"kind": "npz", "path": "texts.npz", "features": "ids", "vocabulary": ROWS},
            "optimizer": {"learning_rate": LEARNING_RATE},
            "dp_config": RENYI | {"max_grad_norm": CLIP_NORM},
            "ledger": {"url": url},
        }
        options = {"config_dir": inputs.folder, "run_secret": inputs.folder / "secret", "notice": lambda line: None}
        with pytest.MonkeyPatch.context() as patch, watched() as watching:
            patch.setenv("RAYCLOAK_HOME", str(self.home))
            try:
                result = Trainer(parse_config(raw), **options).train()
            except RefusedError as refusal:
                return refusal, len(watching.asked)
            return Path(result["run_dir"]), len(watching.asked)


def released(run_dir):
    """Return the noised sum of the run's one step, but for a constant that all runs share."""
    saved = load_file(run_dir / "parameters.safetensors")
    flat = np.concatenate([saved[name].ravel() for name in ("head.bias", "head.weight")])
    return -flat.astype(np.float64) * TEXTS / LEARNING_RATE


def charges(url):
    """Return the number of charges of all runs, and what every account has spent."""
    ledger = PrivacyLedger(url, create=False)
    try:
        accounts = ledger.view().accounts
    finally:
        ledger.close()
    charged = sum(query.charged for account in accounts for run in account.runs for query in run.queries)
    return charged, [account.spent_epsilon for account in accounts]


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


@dataclass(frozen=True)
class Paid:
    """The release that was paid for, and where."""

    run_dir: Path
    inputs: Inputs
    url: str
    vendor: Path


@pytest.fixture(scope="module")
def paid(ray_cluster, postgres, tmp_path_factory):
    """Return the first host's run."""
    folder, url = tmp_path_factory.mktemp("first"), postgres.url()
    inputs, host = Inputs.write(folder / "inputs"), Host(folder / "home")
    run_dir, asked = host.train(inputs, url)
    assert isinstance(run_dir, Path), run_dir
    assert asked == 2
    assert charges(url)[0] == 1
    return Paid(run_dir, inputs, url, host.home / "simulator")


@pytest.fixture
def second_host(paid, tmp_path):
    """Return another machine of the same site."""
    return Host(tmp_path / "second", paid.vendor)


def test_a_second_host_with_a_record_altered_gets_no_second_release_for_an_old_charge(paid, second_host, tmp_path):
    before = charges(paid.url)
    ended, asked = second_host.train(Inputs.write(tmp_path / "altered", altered=True), paid.url)
    assert charges(paid.url) == before
    if isinstance(ended, Path):
        noise = rms(released(ended) - released(paid.run_dir))
        pytest.fail(
            f"{before[0]} charge, two releases of step 0: their difference has noise {noise:.2f}, where that of two "
            f"that were paid for has {np.sqrt(2) * NOISE:.2f}"
        )
    assert ended.code == "data_changed"
    assert asked == 0, "nothing is computed before the refusal"


def test_a_second_host_with_the_same_data_gets_the_same_bytes_and_charges_nothing(paid, second_host, tmp_path):
    before = charges(paid.url)
    ended, _ = second_host.train(Inputs.write(tmp_path / "same"), paid.url)
    assert isinstance(ended, Path), ended
    assert released(ended).tobytes() == released(paid.run_dir).tobytes()
    assert charges(paid.url) == before


@pytest.mark.parametrize("ledger", ["same", "another"])
def test_a_second_host_with_other_frozen_rows_is_refused_or_has_other_noise(
    paid, second_host, tmp_path, postgres, ledger
):
    """The difference of two releases less the clear one is normal in 260 coordinates. That it is below three quarters
    of its deviation has probability below 1e-8; where one of eight virtual workers has fresh noise it is a third."""
    url, inputs = paid.url if ledger == "same" else postgres.url(), Inputs.write(tmp_path / "rows", other_rows=True)
    before = charges(paid.url)
    ended, asked = second_host.train(inputs, url)
    assert charges(paid.url) == before
    if not isinstance(ended, Path):
        assert (ledger, ended.code, asked) == ("same", "run_mismatch", 0)
        return
    clear = inputs.clear_sum() - paid.inputs.clear_sum()
    left = rms(released(ended) - released(paid.run_dir) - clear)
    assert left > 0.75 * np.sqrt(2) * NOISE, (
        f"two releases differ by {rms(clear):.2f}, as their clear sums do up to {left:.0e}: no noise is left"
    )
