"""The contribution of an example to a measurement, and the content of a release."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from raycloak.attestation.core.keys import Purpose, derive
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.workers.gradients.sum_engines import (
    ClassCountEngine,
    PrivateEvaluationEngine,
    SumEngine,
    check_measurable,
)
from raycloak.workers.inputs.datasets import ArrayDataset, dataset_form
from raycloak.workers.models.losses import binary_cross_entropy, cross_entropy, mse
from raycloak.workers.models.models import ModelSource, build_model
from raycloak.workers.terms.measurement import LARGEST_NORM, Measurement, released
from raycloak.workers.vectors.ring import decode
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.coordinator.checkpoints.tssp_cases import run_manifest
from tests.drawn import spare_of
from tests.models import small_model
from tests.protocol import DATA_ROOT, computer, examples, initial_parameters, keys_of, mechanism

COMPUTATION, MODEL = b"c" * 32, b"p" * 32
PARAMETERS = initial_parameters()


def measurement(query: str, dimension: int, count: int = 40, **changes: Any) -> Measurement:
    """Return a measurement of ``count`` examples by eight virtual workers; noise multiplier 2, ring step 2^-20."""
    sigma = 2.0 * (1 + 2.0**-20 * math.sqrt(dimension)) * 2**20 / math.sqrt(8) * 1.0001
    own = {
        "query": query, "dimension": dimension, "sample_rate": 1.0, "steps": 3, "max_grad_norm": 1.0,
        "noise_multiplier": 2.0, "sigma": sigma, "gamma_log2": -20, "ring_bits": 64, "num_examples": count,
        "expected_batch_size": 1.0 if query == "class_counts" else float(count), "clamp": float(count),
        "micro_batch_size": 4, "micro_batches": -(-count // 32), "overflow_probability": 0.0,
    }  # fmt: skip
    every, bound = (0, 0.0) if query == "class_counts" else (2, 5.0)
    return Measurement(
        mechanism=mechanism(**own), every=changes.pop("every", every), loss_bound=changes.pop("bound", bound)
    )


COUNTS = measurement("class_counts", 3)
EVALUATION = measurement("evaluation", 2)
PAIRS = measurement("evaluation", 2 + 3**2)
KINDS = pytest.mark.parametrize("of", [COUNTS, EVALUATION, PAIRS], ids=["class_counts", "evaluation", "pairs"])


def engine(of: Measurement, loss=cross_entropy) -> SumEngine:
    if of.query == "class_counts":
        return ClassCountEngine(of)
    return PrivateEvaluationEngine(of, build_model(ModelSource.of("tests.models:small_model"), ".", 0), loss)


def clear_sum(of: Measurement, data, without: int | None = None) -> np.ndarray:
    """Return the sum over all examples, in the clear, with one of them zeroed out."""
    return clear_sums(of, data, [without])[0]


def clear_sums(of: Measurement, data, each_without) -> list[np.ndarray]:
    """Return the same for several, by one engine."""
    measuring = engine(of)
    ids = np.arange(40).reshape(2, 20)
    return [
        torch.cat(
            measuring.clipped_sum(PARAMETERS, [(data[0][part], data[1][part], part != without) for part in ids])
        ).numpy()
        for without in each_without
    ]


def clear_rows(of: Measurement, data) -> np.ndarray:
    """Return what each example adds alone, float64 [40, d]."""
    whole = clear_sum(of, data)
    return np.stack([whole - clear_sum(of, data, row) for row in range(40)])


def clear_sum_of_persons(of: Measurement, data, present: np.ndarray) -> np.ndarray:
    """Return the sum over twenty persons of two rows each, float64 [d]."""
    changes = {"num_examples": 20, "unit": "person", "rows_per_unit": 2, "micro_batch_size": 5, "micro_batches": 4}
    persons = of.model_copy(update={"mechanism": of.mechanism.model_copy(update=changes)})
    batches = [(data[0][some], data[1][some], present[some]) for some in np.split(np.arange(40), 4)]
    return torch.cat(engine(persons).clipped_sum(PARAMETERS, batches)).numpy()


def wild() -> tuple[np.ndarray, np.ndarray]:
    """Return examples of which some are huge, some not finite, and some of no class."""
    features, labels = (array.copy() for array in examples())
    features[3] *= 1e6
    features[5] = np.nan
    features[7, 2] = np.inf
    labels[9] = 17
    labels[11] = -1
    return features, labels


@KINDS
def test_zeroing_one_example_out_moves_the_clear_sum_by_at_most_the_norm(of: Measurement):
    data = wild()
    whole, *others = clear_sums(of, data, [None, *range(40)])
    moved = [np.linalg.norm(whole - other) for other in others]
    assert max(moved) <= of.mechanism.max_grad_norm
    assert max(moved) > 0.5
    assert np.isfinite(whole).all()


@KINDS
def test_a_unit_counts_the_mean_over_its_rows_and_moves_the_clear_sum_by_at_most_the_norm(of: Measurement):
    """Twenty persons of two rows; some have one, and the other place holds what is no number."""
    features, labels = examples()
    present = np.arange(40) % 6 != 1
    of_rows = clear_rows(of, (features, labels))
    features[~present] = np.nan
    whole = clear_sum_of_persons(of, (features, labels), present)
    there = present.reshape(20, 2, 1)
    means = (of_rows.reshape(20, 2, -1) * there).sum(1) / there.sum(1)
    np.testing.assert_allclose(whole, means.sum(0), rtol=1e-5, atol=1e-6)
    for person in range(20):
        without = clear_sum_of_persons(of, (features, labels), present & (np.arange(40) // 2 != person))
        assert np.linalg.norm(whole - without) <= 1
    wild_data = wild()
    moved = clear_sum_of_persons(of, wild_data, present)
    for person in range(20):
        without = clear_sum_of_persons(of, wild_data, present & (np.arange(40) // 2 != person))
        assert np.linalg.norm(moved - without) <= 1


@KINDS
def test_the_bound_does_not_rest_on_the_scale_of_the_coordinates(of: Measurement, monkeypatch: pytest.MonkeyPatch):
    """The code that clips gradients clips here too; coordinates that are scaled wrongly are cut, not released."""
    monkeypatch.setattr(Measurement, "unit", property(lambda self: 7.0))
    whole, *others = clear_sums(of, examples(), [None, *range(40)])
    assert max(np.linalg.norm(whole - other) for other in others) <= 1.0


def test_loss_and_accuracy_clipped_apart_would_cost_more_than_is_paid():
    """The counterexample: each coordinate within 1 is a vector of norm up to sqrt(2)."""
    tiny = {"loss_bound": 1e-3}
    data = examples()
    alone, alone_without = clear_sums(measurement("evaluation", 1).model_copy(update=tiny), data, [None, 0])
    of = EVALUATION.model_copy(update=tiny)
    whole, *others = clear_sums(of, data, [None, *range(40)])
    moved = [whole - other for other in others]
    loss, accuracy = alone[0] - alone_without[0], max(each[1] for each in moved) / of.unit * LARGEST_NORM
    assert math.hypot(loss, accuracy) > 1.4
    assert max(np.linalg.norm(each) for each in moved) <= 1


def test_what_is_not_finite_or_of_no_class_contributes_nothing():
    data = wild()
    counts = clear_sum(COUNTS, data) / COUNTS.unit
    assert counts.tolist() == [np.count_nonzero(data[1] == label) for label in range(3)]
    whole = clear_sum(EVALUATION, data)
    for each in (5, 9, 11):
        assert np.array_equal(whole, clear_sum(EVALUATION, data, without=each)), each


def test_an_infinite_loss_contributes_nothing():
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.where(labels == 0, torch.inf, output.square().mean(1))

    features, labels = examples()
    zeros = labels == 0
    batch = [(features[:20], labels[:20], np.ones(20, np.bool_))]
    without = [(features[:20], labels[:20], ~zeros[:20])]
    assert zeros[:20].any()
    sums = [torch.cat(engine(EVALUATION, loss).clipped_sum(PARAMETERS, each)).numpy() for each in (batch, without)]
    assert np.array_equal(*sums)
    assert sums[0][0] > 0


def test_counts_and_means_carry_no_bias():
    """Without noise, the decoded values are the truth: counts exactly, means to float32."""
    features, labels = examples()
    named = released(COUNTS, 0, 3, clear_sum(COUNTS, (features, labels)))
    assert list(named.values.values()) == [np.count_nonzero(labels == label) for label in range(3)]
    output = small_model_at(PARAMETERS)(torch.tensor(features))
    losses = cross_entropy(output, torch.tensor(labels)).clamp(-5, 5).detach()
    result = released(EVALUATION, 1, 3, clear_sum(EVALUATION, (features, labels)) / 40)
    assert result.values["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    assert result.values["accuracy"] == pytest.approx(float((output.argmax(1) == torch.tensor(labels)).float().mean()))


def test_the_shares_of_pairs_are_those_of_labels_and_predictions_and_give_f1():
    features, labels = examples()
    predicted = small_model_at(PARAMETERS)(torch.tensor(features)).argmax(1).numpy()
    named = released(PAIRS, 1, 3, clear_sum(PAIRS, (features, labels)) / 40)
    truth = np.zeros((3, 3))
    np.add.at(truth, (labels, predicted), 1 / 40)
    assert truth.max() < 1
    for (label, other), share in np.ndenumerate(truth):
        assert named.values[f"share_{label}_{other}"] == pytest.approx(share, abs=1e-7)
    assert named.values["accuracy"] == pytest.approx(np.trace(truth))
    assert named.f1 == pytest.approx(np.mean(2 * np.diag(truth) / (truth.sum(0) + truth.sum(1))))
    assert released(EVALUATION, 1, 3, np.zeros(2)).f1 is None
    few = measurement("evaluation", 2 + 2**2)
    assert clear_sum(few, (features, labels))[2:].sum() / few.unit == pytest.approx(40 * truth[:2, :2].sum())


def test_where_noise_leaves_no_class_there_is_no_f1():
    assert released(PAIRS, 1, 3, np.full(11, -0.1)).f1 is None


def small_model_at(parameters: np.ndarray) -> torch.nn.Module:
    module = small_model()
    torch.nn.utils.vector_to_parameters(torch.tensor(parameters), module.parameters())
    return module.eval()


def test_a_loss_without_classes_is_released_alone():
    of = measurement("evaluation", 1)
    batch = examples()[0][:4], np.zeros((4, 3), np.float32), np.ones(4, np.bool_)
    rows = torch.cat(engine(of, mse).clipped_sum(PARAMETERS, [batch])).numpy()
    expected = small_model_at(PARAMETERS)(torch.tensor(examples()[0][:4])).square().mean(1).clamp(max=5).sum() / 5
    assert rows.shape == (1,)
    assert rows[0] / of.unit == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_several_labels_an_example_have_an_accuracy_too(kind: type):
    labels = (np.arange(12).reshape(4, 3) % 2).astype(kind)
    batch = examples()[0][:4], labels, np.ones(4, np.bool_)
    rows = torch.cat(engine(EVALUATION, binary_cross_entropy).clipped_sum(PARAMETERS, [batch])).numpy()
    outputs = small_model_at(PARAMETERS)(torch.tensor(examples()[0][:4])).detach().numpy()
    assert rows[1] / EVALUATION.unit == pytest.approx(((outputs > 0) == labels).mean(1).sum(), rel=1e-6)


def test_the_noise_of_a_released_count_vector_is_what_the_ledger_charged_for():
    """Chi-square over 4,000 counts, and their mean; false-alarm rate 1e-6."""
    of = measurement("class_counts", 4000)
    data = ArrayDataset(*examples())
    vectors = VirtualWorkerComputer(of.mechanism, ClassCountEngine(of), data, spare_of(data))
    total = sum(vectors.vector(v, keys_of(COMPUTATION, v), 0, MODEL, DATA_ROOT, PARAMETERS).values for v in range(8))
    values = np.array(list(released(of, 0, 3, decode(total, of.mechanism.gamma_log2)).values.values()))
    truth = np.bincount(examples()[1], minlength=4000)
    deviation = released(of, 0, 3, np.zeros(4000)).deviation["count_0"]
    noise = (values - truth) / deviation
    low, high = chi2.ppf([2.5e-7, 1 - 2.5e-7], 4000)
    assert low < noise @ noise < high
    assert abs(noise.sum()) / math.sqrt(4000) < 5.03
    counted = deviation * of.unit
    assert 2.0 * of.mechanism.sensitivity <= counted < 2.0 * of.mechanism.sensitivity * 1.001


def test_queries_of_one_step_share_no_key(monkeypatch: pytest.MonkeyPatch):
    """The same virtual worker, step, parameters and examples; only the query differs."""
    keys: dict[str, set[bytes]] = {}

    def spy(secret, purpose, *fields, **rest):
        key = derive(secret, purpose, *fields, **rest)
        if purpose in (Purpose.NOISE, Purpose.SAMPLING, Purpose.VECTOR_TAG):
            keys.setdefault(asked, set()).add(key.reveal())
        return key

    monkeypatch.setattr("raycloak.workers.virtual_worker.derive", spy)
    gradients = computer(mechanism())
    each = {
        "gradient": gradients,
        "evaluation": gradients.beside(EVALUATION.mechanism, engine(EVALUATION)),
        "class_counts": gradients.beside(COUNTS.mechanism, engine(COUNTS)),
    }
    for query in each:
        asked = query
        each[query].vector(0, keys_of(COMPUTATION, 0), 0, MODEL, DATA_ROOT, PARAMETERS)
    assert [len(found) for found in keys.values()] == [3, 3, 3]
    assert len(set.union(*keys.values())) == 9


def test_a_measurement_reads_every_row_it_may_whatever_the_labels_are():
    """The shape of the work is that of the mechanism, also for a virtual worker with fewer examples."""

    class Counting(ArrayDataset):
        asked: list[int]

        def batch(self, ids):
            self.asked.append(len(ids))
            return super().batch(ids)

    for data in (examples(), wild(), examples(33)):
        dataset, spare = Counting(*data), spare_of(ArrayDataset(*data))
        of = measurement("evaluation", 2, len(dataset), every=1)
        vectors = VirtualWorkerComputer(of.mechanism, engine(of), dataset, spare)
        dataset.asked = []
        vectors.slice(7)
        dataset.asked = []
        vectors.vector(7, keys_of(COMPUTATION, 7), 0, MODEL, DATA_ROOT, PARAMETERS)
        assert dataset.asked == [4, 4]


@pytest.mark.parametrize(
    ("every", "planned", "expected"),
    [(0, 5, {0: 0}), (2, 5, {2: 0, 4: 1, 5: 2}), (5, 5, {5: 0}), (9, 5, {5: 0}), (1, 3, {1: 0, 2: 1, 3: 2})],
)
def test_releases_are_made_when_they_are_due_and_numbered_in_order(every: int, planned: int, expected: dict[int, int]):
    of = EVALUATION.model_copy(update={"every": every})
    found = {step: number for step in range(planned + 1) if (number := of.due(step, planned)) is not None}
    assert found == expected
    assert {of.after(number, planned): number for number in found.values()} == expected


def test_the_unit_stays_below_what_clipping_aims_at():
    for of, hot in ((COUNTS, 1), (EVALUATION, 2), (measurement("evaluation", 1), 1), (PAIRS, 3)):
        assert np.float32(of.unit) == of.unit
        assert of.unit * math.sqrt(hot) < 1 - 2.0**-16
        assert of.unit * math.sqrt(hot) == pytest.approx(LARGEST_NORM, rel=1e-6)


def test_labels_that_are_no_class_numbers_are_refused_by_name():
    features, labels = examples()
    check_measurable(COUNTS, dataset_form(ArrayDataset(features, labels)))
    for other in (labels.astype(np.float32), np.stack([labels, labels], 1)):
        form = dataset_form(ArrayDataset(features, other))
        with pytest.raises(ConfigError, match="measurement_labels"):
            check_measurable(COUNTS, form)
        with pytest.raises(ConfigError, match="measurement_labels"):
            check_measurable(PAIRS, form)
        check_measurable(EVALUATION, form)


def test_more_rows_than_the_sensitivity_is_proved_for_are_refused():
    form = dataset_form(ArrayDataset(*examples()))
    large = COUNTS.model_copy(update={"mechanism": COUNTS.mechanism.model_copy(update={"micro_batches": 2**15 + 1})})
    with pytest.raises(ConfigError, match=r"measurement_too_large.*more virtual workers"):
        check_measurable(large, form)


def test_the_epoch_of_a_measurement_is_that_of_the_step_it_comes_before():
    base = run_manifest().computation.model_copy(
        update={"measurements": (COUNTS, EVALUATION), "epoch_steps": 2, "mechanism": mechanism(steps=4)}
    )
    assert [base.epoch_of("gradient", step) for step in range(4)] == [0, 0, 1, 1]
    assert base.epoch_of("class_counts", 0) == 0
    assert [base.epoch_of("evaluation", number) for number in range(2)] == [1, 1], "the last step's, after it"
    assert [each.query for each in base.mechanisms] == ["gradient", "class_counts", "evaluation"]
    with pytest.raises(ProtocolError, match="query_unknown"):
        base.model_copy(update={"measurements": ()}).mechanism_of("evaluation")
