"""The engine names the device of every tensor that it makes: on a GPU, one that names none would be on the CPU."""

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.workers.gradients.clipping import GradientEngine, MicroBatch
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import read_flat
from tests.workers.gradients.model_zoo import ZOO, Case
from tests.workers.gradients.test_clipping import mechanism

ROWS = 4


def batch_of(case: Case) -> MicroBatch:
    features, labels = case.batch(ROWS)
    return features.numpy(), labels.numpy(), np.arange(ROWS) < ROWS - 1


@pytest.mark.parametrize("name", ZOO)
def test_a_sum_is_the_same_where_a_tensor_without_a_device_has_no_values(name: str) -> None:
    pin_numerics()
    torch.manual_seed(1)
    case = ZOO[name]()
    parameters = read_flat(case.module)
    engine = GradientEngine(case.module, cross_entropy, mechanism(len(parameters), rows=ROWS, batches=1))
    batches = [batch_of(case)]
    usual = engine.clipped_sum(parameters, batches)
    with torch.device("meta"):
        assert np.array_equal(engine.clipped_sum(parameters, batches), usual)


def test_a_model_that_forgets_its_device_is_seen() -> None:
    class Forgetful(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.ones(3)

    pin_numerics()
    module = Forgetful(6, 3)
    parameters = read_flat(module)
    engine = GradientEngine(module, cross_entropy, mechanism(len(parameters), rows=ROWS, batches=1))
    with torch.device("meta"), pytest.raises(Exception, match="meta"):
        engine.clipped_sum(parameters, [batch_of(Case(module, (6,)))])
