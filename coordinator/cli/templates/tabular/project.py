"""A model for a table, and the tiny public table that it is tried on: 569 biopsies, of scikit-learn."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

# YOURS: lowest and highest value of each column. Take public bounds, such as what a device can measure. Bounds that are
# read off private rows would be a release that nothing covers. These are of the dataset's public documentation.
COLUMNS = {
    "radius": (6.981, 28.11),
    "texture": (9.71, 39.28),
    "perimeter": (43.79, 188.5),
    "area": (143.5, 2501.0),
    "smoothness": (0.053, 0.163),
    "compactness": (0.019, 0.345),
    "concavity": (0.0, 0.427),
    "concave points": (0.0, 0.201),
    "symmetry": (0.106, 0.304),
    "fractal dimension": (0.05, 0.097),
}
CLASSES = 2  # YOURS


class ToUnit(nn.Module):
    """Brings each column to [-1, 1] by its public bounds."""

    def __init__(self) -> None:
        super().__init__()
        low, high = torch.tensor(list(COLUMNS.values())).T
        self.register_buffer("middle", (low + high) / 2)
        self.register_buffer("reach", (high - low) / 2)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows [n, columns], scaled."""
        middle, reach = self.get_buffer("middle"), self.get_buffer("reach")
        return (rows - middle) / reach


def model() -> nn.Module:
    """Return the network. Any torch module will do, but BatchNorm: it mixes the rows of a batch."""
    return nn.Sequential(ToUnit(), nn.Linear(len(COLUMNS), 32), nn.Tanh(), nn.Linear(32, CLASSES))


def prepare() -> None:
    """Write the tiny table, split into private and public rows. Delete this once you have a table of your own."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    folder = Path(__file__).parent
    # The dataset's first columns are the means that COLUMNS names, in that order.
    features = features[:, : len(COLUMNS)].astype(np.float32)
    is_public = np.arange(len(labels)) % 5 == 0
    for name, rows in (("train", ~is_public), ("public", is_public)):
        np.savez(folder / f"{name}.npz", features=features[rows], labels=labels[rows].astype(np.int64))


if __name__ == "__main__":
    prepare()
