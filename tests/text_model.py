"""A small transformer that the protocol's tests train, in a file of its own as `tests/models.py` is."""

import numpy as np
import torch
from torch import nn

# With micro-batches of 32 rows the tied table is too large to be held for every row, so its rows are formed.
WORDS, WIDTH, LENGTH = 600, 64, 8


class Transformer(nn.Module):
    """Texts [n, 8] to the logits of three classes, which are words of its own tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.05)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.words(ids) + self.places(torch.arange(LENGTH))
        return self.head(self.layer(words)).mean(1)[:, :3]


def transformer() -> nn.Module:
    """The model, from torch's own generator."""
    return Transformer()


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Forty texts of ids below the vocabulary, and their classes."""
    draw = np.random.default_rng(5)
    return draw.integers(0, WORDS, (40, LENGTH)), draw.integers(0, 3, 40)


DATASET = {"kind": "npz", "path": "examples.npz", "features": "features", "vocabulary": WORDS}
