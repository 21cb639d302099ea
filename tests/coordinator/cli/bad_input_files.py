"""The folder that bad inputs are tried in: a configuration that is good, and files that are not."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CONFIG = """\
name: small
num_workers: 3
virtual_workers: 8
steps: 3
expected_batch_size: 20
micro_batch_size: 4
model: mine:small
dataset: {kind: npz, path: train.npz, features: features}
dp_config: {noise_multiplier: 2.0, epsilon_cap: 20.0, accountant: rdp}
"""

MINE = """\
import numpy as np
import raycloak
import torch
from torch import nn

small = lambda: nn.Linear(6, 3)
batchnorm = lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
lstm = lambda: nn.LSTM(6, 3)
frozen = lambda: nn.Linear(6, 3).requires_grad_(False)
double = lambda: nn.Linear(6, 3).double()
wrong_width = lambda: nn.Linear(7, 3)
model_number = lambda: 3


def model_raises():
    raise KeyError("row 17")


class Odd(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.linear, self.change, self.calls = nn.Linear(6, 3), forward, 0

    def forward(self, features):
        return self.change(self, self.linear(features))


def count(model, output):
    model.calls += 1
    return output


mixes = lambda: Odd(lambda model, output: output - output.mean(0))
random = lambda: Odd(lambda model, output: output + torch.rand(1))
counts = lambda: Odd(count)
two_outputs = lambda: Odd(lambda model, output: (output, output))
no_rows = lambda: Odd(lambda model, output: output.sum())


def loss_raises(output, labels):
    raise KeyError("row 17")


def loss_scalar(output, labels):
    return output.sum()


def loss_mixes(output, labels):
    return output.sum(1) - output.sum(1).mean()


def raises():
    raise KeyError("row 17")


def nothing():
    return None


number = 3

metric_words = lambda outputs, labels: "much"
metric_nan = lambda outputs, labels: float("nan")
metric_of_outputs = lambda outputs: 1.0


def metric_raises(outputs, labels):
    raise KeyError("class 17")


class Rule(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter)

    def update(self, parameter):
        parameter.sub_(parameter.grad)


class Draws(Rule):
    def update(self, parameter):
        parameter.add_(torch.randn_like(parameter))


class Counts(Rule):
    def update(self, parameter):
        self.state[parameter]["steps"] = 1


class Outside(Rule):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.steps = 0

    def update(self, parameter):
        self.steps += 1
        parameter.sub_(parameter.grad / self.steps)


class Explodes(Rule):
    def update(self, parameter):
        parameter.fill_(torch.inf)


class Raises(Rule):
    def update(self, parameter):
        raise KeyError("beta")


constant = lambda step, steps: 1.0
falls = lambda step, steps: 1.0 - step
of_one = lambda step: 1.0
in_words = lambda step, steps: "half"


class Told(raycloak.Callback):
    pass


class Misnamed(raycloak.Callback):
    def on_epoch(self, report):
        pass


class TakesNothing(raycloak.Callback):
    def on_step_end(self):
        pass


class NeedsSomething(raycloak.Callback):
    def __init__(self, place):
        pass


class Lying:
    def __len__(self):
        return 40

    def batch(self, ids):
        return np.zeros((len(ids), 6)), np.zeros(len(ids))


lying = Lying
"""


def make_folder(folder: Path) -> Path:
    """Fill an empty folder; returns the good configuration."""
    generator = np.random.default_rng(1)
    features = generator.normal(size=(40, 6)).astype(np.float32)
    labels = generator.integers(0, 3, 40)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "mine.py").write_text(MINE)
    (folder / "broken.py").write_text("raise KeyError('row 17')\n")
    (folder / "folder").mkdir()
    for name in ("train", "test"):
        np.savez(folder / f"{name}.npz", features=features, labels=labels)
    np.savez(folder / "ids.npz", features=labels[:, None] + np.zeros((1, 6), np.int64), labels=labels)
    (folder / "empty.npz").touch()
    (folder / "torn.npz").write_bytes((folder / "train.npz").read_bytes()[:300])
    (folder / "text.npz").write_text("a,b,c\n")
    np.save(folder / "one.npy", features)
    np.savez(folder / "objects.npz", features=np.array([{}] * 40), labels=labels)
    np.savez(folder / "strings.npz", features=features, labels=np.array(["cat"] * 40))
    np.savez(folder / "lengths.npz", features=features, labels=labels[:39])
    np.savez(folder / "norows.npz", features=features[:0], labels=labels[:0])
    np.savez(folder / "scalar.npz", features=np.float32(1), labels=labels)
    columns = {"a": features[:, 0], "b": features[:, 1], "y": labels}
    tables = {
        "table": columns,
        "missing": {**columns, "a": [None, *features[1:, 0].tolist()]},
        "ragged": {**columns, "a": [[1.0], *[[1.0, 2.0]] * 39]},
        "words": {**columns, "a": ["cat"] * 40},
    }
    for name, table in tables.items():
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    for name, text, mode in (("short", "ab", 0o600), ("open", "ab" * 32, 0o644)):
        (folder / f"{name}.key").write_text(text)
        (folder / f"{name}.key").chmod(mode)
    return folder / "config.yaml"
