"""A model for visits of patients, and tiny public visits that it is tried on: biopsies of scikit-learn, repeated."""

import csv
from pathlib import Path

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
MOST_VISITS = 6


class ByBounds(nn.Module):
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
    return nn.Sequential(ByBounds(), nn.Linear(len(COLUMNS), 32), nn.Tanh(), nn.Linear(32, CLASSES))


def prepare() -> None:
    """Write tiny visits, those of every fifth patient as public ones. Delete this once you have a table of your own."""
    import numpy as np
    from sklearn.datasets import load_breast_cancer

    table, folder, draw = load_breast_cancer(), Path(__file__).parent, np.random.default_rng(0)
    low, high = np.array(list(COLUMNS.values())).T
    written: dict[str, list[list[str]]] = {"train": [], "public": []}
    # The dataset's first columns are the means that COLUMNS names, in that order.
    for patient, (values, label) in enumerate(zip(table.data[:, : len(COLUMNS)], table.target, strict=True)):
        for _ in range(draw.integers(1, MOST_VISITS, endpoint=True)):
            # Measured again, with an error of a fiftieth.
            measured = np.clip(values * (1 + draw.normal(0, 0.02, len(COLUMNS))), low, high)
            row = [f"p{patient:03}", *(f"{value:g}" for value in measured), table.target_names[label]]
            written["train" if patient % 5 else "public"].append(row)
    for name, rows in written.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["patient_id", *COLUMNS, "diagnosis"], *rows])


if __name__ == "__main__":
    prepare()
