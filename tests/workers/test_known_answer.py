"""The known answer: equal on machines of one numerics class, different as soon as one encoded bit is."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.metrics.errors import ConfigError, ModelError
from raycloak.workers.device.words import CpuWords
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.known_answer import check_classes, found_classes, known_answer
from raycloak.workers.models.losses import binary_cross_entropy, cross_entropy, mse
from raycloak.workers.models.models import ModelSource, build_model, read_flat
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.workload import PlannedWorkload
from tests.protocol import Arrays, config, examples, initial_parameters, mechanism, open_workload, worker_setup

PARAMETERS = initial_parameters()


def answer(chosen=None, data: Arrays | None = None, parameters=PARAMETERS, engine_of=GradientEngine) -> bytes:
    chosen = chosen or mechanism()
    module = build_model(ModelSource.of("tests.models:small_model"), ".", 0)
    loss = cross_entropy if data is None or data[1].dtype.kind == "i" else mse
    dataset = ArrayDataset(*(data or examples()))
    return known_answer(chosen, engine_of(module, loss, chosen), dataset, parameters, words=CpuWords(), classes=3)


class OtherNumerics(GradientEngine):
    """A numerics that differs by one grid step in one coordinate, as another instruction set would."""

    def clipped_sum(self, parameters, batches):
        total = super().clipped_sum(parameters, batches)
        total[0][40] += self._mechanism.gamma
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


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (RuntimeError("tensors on cuda:0 and cpu\nmore"), ModelError, r"known_answer.*RuntimeError: tensors on cuda:0"),
        (torch.AcceleratorError("CUDA error: device-side assert"), torch.AcceleratorError, "assert"),
        (torch.OutOfMemoryError("2 GiB"), torch.OutOfMemoryError, "2 GiB"),
        (ModelError("nondeterministic_op", "cumsum"), ModelError, "nondeterministic_op"),
    ],
    ids=["text", "gpu", "memory", "own"],
)
def test_the_text_of_a_failure_on_public_data_is_told_and_what_has_a_code_keeps_it(error, raised, says):
    class Failing(GradientEngine):
        def clipped_sum(self, parameters, batches):
            raise error

    with pytest.raises(raised, match=says) as caught:
        answer(engine_of=Failing)
    assert "more" not in str(caught.value)


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
    return known_answer(
        chosen,
        GradientEngine(module, cross_entropy, chosen),
        data,
        read_flat(module),
        vocabulary,
        words=CpuWords(),
        classes=3,
    )


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


@pytest.mark.parametrize("heavy", range(5))
def test_integer_labels_are_drawn_over_all_classes(heavy: int):
    """The public draw of 24 labels misses none of five classes. A loss that weights one of them is told apart."""
    chosen, data = mechanism(35, micro_batches=6), examples()

    def answer_with(weight: float, classes: int) -> bytes:
        weights = torch.ones(5)
        weights[heavy] = weight
        torch.manual_seed(0)
        module = nn.Linear(6, 5)
        engine = GradientEngine(module, lambda out, y: cross_entropy(out, y) * weights[y], chosen)
        return known_answer(chosen, engine, ArrayDataset(*data), read_flat(module), words=CpuWords(), classes=classes)

    assert answer_with(0.5, 5) != answer_with(1.0, 5)
    assert (answer_with(0.5, 2) == answer_with(1.0, 2)) == (heavy >= 2), "what a draw of two classes shows"


class Tokens(nn.Module):
    """Ids [n, T] to logits [n, T, classes] or [n, classes, T]."""

    def __init__(self, classes_last: bool) -> None:
        super().__init__()
        self.words, self.classes_last = nn.Embedding(20, 5), classes_last

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) if self.classes_last else self.words(ids).transpose(1, 2)


def first_two(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Knows two classes only."""
    return output.square().mean(1) * torch.ones(2)[labels]


VALUES, IDS = np.zeros((9, 6), np.float32), np.zeros((9, 6), np.int64)


@pytest.mark.parametrize(
    ("module", "loss", "data", "classes"),
    [
        (nn.Linear(6, 5), cross_entropy, (VALUES, IDS[:, 0]), 5),
        (nn.Linear(6, 5), mse, (VALUES, VALUES[:, :5]), 2),
        (nn.Linear(6, 5), first_two, (VALUES, IDS[:, 0]), 2),
        (nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), lambda out, y: (out - y).abs(), (VALUES, IDS[:, 0]), 2),
        (nn.Linear(6, 1), lambda out, y: (out[:, 0] - y).abs(), (VALUES, IDS[:, 0]), 2),
        (Tokens(True), lambda out, y: cross_entropy(out.transpose(1, 2), y), (IDS, IDS), 5),
        (Tokens(False), cross_entropy, (IDS, IDS), 5),
    ],
)  # fmt: skip
def test_the_classes_are_those_of_the_model_s_output(module, loss, data, classes: int):
    assert found_classes(module, RowLoss(loss), ArrayDataset(*data), 20) == classes


@pytest.mark.parametrize(
    ("loss", "labels", "outputs", "classes", "refusal"),
    [
        ("cross_entropy", IDS[:, 0], 5, 6, "the data has 6 classes, and the model outputs for 5"),
        ("cross_entropy", IDS[:, 0], 5, 5, None),
        ("cross_entropy", IDS[:, 0], 5, None, None),
        ("cross_entropy", IDS[:, 0], 1, 2, "the model has one output, and cross_entropy needs one for each class"),
        ("cross_entropy", IDS[:, 0], 1, None, "the model has one output, and cross_entropy needs one for each class"),
        ("cross_entropy", VALUES[:, :5], 5, 6, None),
        ("models:own", IDS[:, 0], 5, 6, None),
        ("models:own", IDS[:, 0], 1, 2, None),
    ],
)
def test_fewer_outputs_than_classes_are_refused(loss, labels, outputs, classes, refusal):
    """Labels beyond them would give no gradient in any step, and a single output none for any label."""
    with pytest.raises(ConfigError, match=f"labels_beyond_head: {refusal}") if refusal else nullcontext():
        check_classes(nn.Linear(6, outputs), loss, ArrayDataset(VALUES, labels), classes)


@pytest.mark.parametrize("labels", [IDS[:, 0], IDS[:, :1], VALUES[:, 0]])
def test_yes_or_no_needs_one_output_and_knows_two_classes(labels):
    data, loss = ArrayDataset(VALUES, labels), "binary_cross_entropy"
    for classes in (None, 1, 2):
        check_classes(nn.Linear(6, 1), loss, data, classes)
    with pytest.raises(ConfigError, match="labels_beyond_head: the data has 3 classes, and binary_cross_entropy knows"):
        check_classes(nn.Linear(6, 1), loss, data, 3)
    assert found_classes(nn.Linear(6, 1), RowLoss(binary_cross_entropy), data) == 2


def test_several_losses_are_tried_on_labels_that_each_of_them_knows(tmp_path, monkeypatch):
    """Drawn over many classes, most would be none for yes or no, and a row without a gradient tells of no machine."""
    drawn: list[int] = []

    def noted(*arguments, classes: int, **more: Any) -> bytes:
        drawn.append(classes)
        return known_answer(*arguments, classes=classes, **more)

    monkeypatch.setattr("raycloak.workers.workload.known_answer", noted)
    loss = [{"name": "cross_entropy", "outputs": 2}, {"name": "binary_cross_entropy", "outputs": 1}]
    dataset = {"kind": "npz", "path": "examples.npz", "features": "features", "classes": 9}
    labels = np.stack([examples()[1] % 2, examples()[1] % 2], 1)
    for kind in (np.int64, np.float32):
        data = examples()[0], labels.astype(kind)
        setup = worker_setup(config(loss=loss, dataset=dataset), tmp_path, data)
        PlannedWorkload(open_workload(setup), mechanism(), ())
    assert drawn == [2, 2]


def test_a_worker_and_a_plan_refuse_them(tmp_path):
    np.savez(tmp_path / "examples.npz", features=examples()[0], labels=examples()[1])
    four = config(dataset={"kind": "npz", "path": "examples.npz", "features": "features", "classes": 4})
    with pytest.raises(ConfigError, match="labels_beyond_head"):
        open_workload(worker_setup(four, tmp_path))
    with pytest.raises(ConfigError, match="labels_beyond_head"):
        plan_of(four, tmp_path)


def test_classes_that_a_run_declares_come_before_those_that_are_found(tmp_path, monkeypatch):
    drawn: list[int] = []

    def noted(*arguments, classes: int, **more: Any) -> bytes:
        drawn.append(classes)
        return known_answer(*arguments, classes=classes, **more)

    monkeypatch.setattr("raycloak.workers.workload.known_answer", noted)
    plan = mechanism(8, query="class_counts", sample_rate=1.0, max_grad_norm=1.0, steps=1)
    counts = Measurement(mechanism=plan, every=0, loss_bound=0)
    for measurements in ((), (counts,)):
        PlannedWorkload(open_workload(worker_setup(config(), tmp_path)), mechanism(), measurements)
    assert drawn == [3, 8, 8]


def test_mechanism_and_parameters_are_part_of_it():
    chosen = mechanism()
    assert answer(chosen.model_copy(update={"sigma": chosen.sigma * 2})) != answer()
    assert answer(chosen.model_copy(update={"max_grad_norm": 0.5})) != answer()
    assert answer(parameters=PARAMETERS * np.float32(1.5)) != answer()


def test_of_units_all_rows_of_all_units_are_in_it():
    """The choice of a unit's rows, which takes each of the k, their order and their mean are computed."""
    units = mechanism(unit="person", rows_per_unit=3)
    assert answer(units) == answer(units.model_copy(update={"unit": "patient"})) != answer()
    assert answer(units) != answer(mechanism(unit="person", rows_per_unit=2))


def test_it_does_not_depend_on_how_many_share_the_work_or_how_much_is_sampled():
    chosen = mechanism()
    assert answer(chosen.model_copy(update={"num_examples": 4000, "sample_rate": 0.1})) == answer()


def test_a_loss_that_is_evaluated_row_by_row_is_told_apart_although_no_bit_differs(tmp_path, monkeypatch):
    """On private examples a bit may differ, so two such workers must not share a run."""
    chosen = mechanism()

    def planned() -> PlannedWorkload:
        return PlannedWorkload(open_workload(worker_setup(config(loss="tests.models:user_loss"), tmp_path)), chosen, ())

    under_vmap = planned()
    monkeypatch.setattr(RowLoss, "_runs_under_vmap", lambda *_: False)
    row_by_row = planned()
    assert under_vmap.known_answer != row_by_row.known_answer
    engines = [each.computers["gradient"]._engine for each in (under_vmap, row_by_row)]
    data = ArrayDataset(*examples())
    assert len({known_answer(chosen, engine, data, PARAMETERS, words=CpuWords(), classes=3) for engine in engines}) == 1
    assert under_vmap.known_answer in {
        known_answer(chosen, engine, data, PARAMETERS, words=CpuWords(), classes=3) for engine in engines
    }
