"""A model with frozen parts whose content its source does not show, as if a file held them; tests exchange them."""

import torch
from torch import nn

WORDS = 400


class Frozen:
    """The content of the frozen parts."""

    rows = torch.linspace(-1, 1, WORDS * 4).reshape(WORDS, 4)
    shift = torch.zeros(4)


class Shifted(nn.Module):
    """Adds a buffer that no state dictionary holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", Frozen.shift.clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def with_table() -> nn.Module:
    """Six ids to three classes, through a frozen table of rows and a shift of each."""
    table = nn.Embedding.from_pretrained(Frozen.rows.clone(), freeze=True)
    return nn.Sequential(table, Shifted(), nn.Flatten(), nn.Linear(24, 3))
