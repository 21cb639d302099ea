"""The engine names the device of every tensor that it makes: on a GPU, one that names none would be on the CPU."""

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.attestation.core.roster import Query
from raycloak.workers.gradients.clipping import GradientEngine, MicroBatch
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.sum_engines import ClassCountEngine, PrivateEvaluationEngine
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import read_flat
from raycloak.workers.terms.measurement import Measurement
from tests.protocol import mechanism as protocol_mechanism
from tests.workers.gradients.model_zoo import ZOO, Case
from tests.workers.gradients.test_clipping import mechanism

ROWS = 4
WHOLE_SLICE = 16


def batch_of(case: Case, rows: int = ROWS) -> MicroBatch:
    features, labels = case.batch(rows)
    return features.numpy(), labels.numpy(), np.arange(rows) < rows - 1


@pytest.mark.parametrize("name", ZOO)
def test_a_sum_is_the_same_where_a_tensor_without_a_device_has_no_values(name: str) -> None:
    pin_numerics()
    torch.manual_seed(1)
    case = ZOO[name]()
    parameters = read_flat(case.module)
    engine = GradientEngine(case.module, cross_entropy, mechanism(len(parameters), rows=ROWS, batches=1))
    batches = [batch_of(case)]
    usual = torch.cat(engine.clipped_sum(parameters, batches)).numpy()
    with torch.device("meta"):
        assert np.array_equal(torch.cat(engine.clipped_sum(parameters, batches)).numpy(), usual)


@pytest.mark.parametrize("query", ["class_counts", "evaluation"])
def test_so_is_a_measurement(query: Query) -> None:
    pin_numerics()
    case = ZOO["mlp"]()
    sizes = {"sample_rate": 1.0, "max_grad_norm": 1.0, "micro_batch_size": WHOLE_SLICE, "micro_batches": 1}
    counted = protocol_mechanism(query=query, dimension=3 if query == "class_counts" else 2, **sizes)
    bound = 0.0 if query == "class_counts" else 10.0
    measurement = Measurement(mechanism=counted, every=1, loss_bound=bound)
    engine = (
        ClassCountEngine(measurement)
        if query == "class_counts"
        else PrivateEvaluationEngine(measurement, case.module, cross_entropy)
    )
    parameters, batches = read_flat(case.module), [batch_of(case, WHOLE_SLICE)]
    usual = torch.cat(engine.clipped_sum(parameters, batches)).numpy()
    assert usual.any()
    with torch.device("meta"):
        assert np.array_equal(torch.cat(engine.clipped_sum(parameters, batches)).numpy(), usual)


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
