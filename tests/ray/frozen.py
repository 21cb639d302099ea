"""User code: a classifier of short texts on a frozen embedding, whose rows lie in ``rows.npy`` beside this file."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

ROWS = Path(__file__).with_name("rows.npy")


class Texts(nn.Module):
    """The mean of a text's rows, and one trained layer from it to four classes. Any integer names a row."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = nn.Embedding.from_pretrained(rows, freeze=True)
        self.head = nn.Linear(rows.shape[1], 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids % self.rows.num_embeddings).mean(1))


def model() -> nn.Module:
    """Build the classifier."""
    return Texts(torch.from_numpy(np.load(ROWS)))
