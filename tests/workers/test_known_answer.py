"""The known answer: equal on machines of one numerics class, different as soon as one encoded bit is."""

import numpy as np
import torch
from torch import nn

from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.inputs.models import ModelSource, build_model, cross_entropy, mse, read_flat
from raycloak.workers.known_answer import known_answer
from raycloak.workers.workload import PlannedWorkload, Workload
from tests.protocol import Arrays, config, examples, initial_parameters, mechanism, worker_setup

PARAMETERS = initial_parameters()


def answer(chosen=None, data: Arrays | None = None, parameters=PARAMETERS, engine_of=GradientEngine) -> bytes:
    chosen = chosen or mechanism()
    module = build_model(ModelSource.of("tests.models:small_model"), ".", 0)
    loss = cross_entropy if data is None or data[1].dtype.kind == "i" else mse
    dataset = ArrayDataset(*(data or examples()))
    return known_answer(chosen, engine_of(module, loss, chosen), dataset, parameters)


class OtherNumerics(GradientEngine):
    """A numerics that differs by one grid step in one coordinate, as another instruction set would."""

    def clipped_sum(self, parameters, batches):
        total = super().clipped_sum(parameters, batches)
        total[40] += self._mechanism.gamma
        return total


def test_machines_of_one_class_agree():
    assert answer() == answer()
    assert len(answer()) == 32


def test_a_machine_whose_sum_differs_in_one_grid_step_of_one_coordinate_does_not():
    assert answer(engine_of=OtherNumerics) != answer()


def test_it_reads_shapes_and_dtypes_of_the_data_but_no_example():
    """So it may be shown: it is the same whatever the data hold."""
    features, labels = examples()
    assert answer(data=(np.full_like(features, np.nan), labels[::-1].copy())) == answer()
    assert answer(data=(features[:8], labels[:8])) == answer()


def test_float_labels_are_served():
    features, _ = examples()
    labels = np.zeros((40, 3), np.float32)
    assert answer(data=(features, labels)) != answer()


def answer_of_table(rows: torch.Tensor, vocabulary: int) -> bytes:
    """Return the answer of a frozen table of ``rows`` before a trained layer."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding.from_pretrained(rows, freeze=True), nn.Flatten(), nn.Linear(12, 3))
    chosen = mechanism(39)
    data = ArrayDataset(np.zeros((40, 6), np.int64), examples()[1])
    return known_answer(chosen, GradientEngine(module, cross_entropy, chosen), data, read_flat(module), vocabulary)


def test_integer_features_are_drawn_over_the_whole_vocabulary():
    """The public draw of 48 ids misses few of 20. Those that it has tell of a change of their row."""
    rows = torch.linspace(-1, 1, 40).reshape(20, 2)
    honest = answer_of_table(rows, 20)
    assert answer_of_table(rows, 20) == honest

    def is_seen(word: int) -> bool:
        other = rows.clone()
        other[word] += 1
        return answer_of_table(other, 20) != honest

    assert sum(map(is_seen, range(2, 20))) >= 16


def test_a_large_vocabulary_is_reached_to_its_end():
    """Ids above one octet: of 48 draws below 2^16, some are in the upper half, but for a chance of 2^-48."""
    rows = torch.zeros(2**16, 2)
    rows[2**15 :] = 1
    assert answer_of_table(rows, 2**16) != answer_of_table(torch.zeros(2**16, 2), 2**16)


def test_mechanism_and_parameters_are_part_of_it():
    chosen = mechanism()
    assert answer(chosen.model_copy(update={"sigma": chosen.sigma * 2})) != answer()
    assert answer(chosen.model_copy(update={"max_grad_norm": 0.5})) != answer()
    assert answer(parameters=PARAMETERS * np.float32(1.5)) != answer()


def test_it_does_not_depend_on_how_many_share_the_work_or_how_much_is_sampled():
    chosen = mechanism()
    assert answer(chosen.model_copy(update={"num_examples": 4000, "sample_rate": 0.1})) == answer()


def test_a_loss_that_is_evaluated_row_by_row_is_told_apart_although_no_bit_differs(tmp_path, monkeypatch):
    """On private examples a bit may differ, so two such workers must not share a run."""
    chosen = mechanism()

    def planned() -> PlannedWorkload:
        return PlannedWorkload(Workload(worker_setup(config(loss="tests.models:user_loss"), tmp_path)), chosen, ())

    under_vmap = planned()
    monkeypatch.setattr(RowLoss, "_runs_under_vmap", lambda *_: False)
    row_by_row = planned()
    assert under_vmap.known_answer != row_by_row.known_answer
    engines = [each.computers["gradient"]._engine for each in (under_vmap, row_by_row)]
    data = ArrayDataset(*examples())
    assert len({known_answer(chosen, engine, data, PARAMETERS) for engine in engines}) == 1
    assert under_vmap.known_answer in {known_answer(chosen, engine, data, PARAMETERS) for engine in engines}
