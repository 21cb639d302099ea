"""One virtual worker's vector: what it depends on, and how far one example can move it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from raycloak.attestation.core.keys import Purpose, derive
from raycloak.metrics.errors import RefusedError
from raycloak.workers import virtual_worker
from raycloak.workers.device.words import CpuWords
from raycloak.workers.inputs.datasets import slice_ids
from raycloak.workers.inputs.units import Units
from raycloak.workers.vectors import noise, ring, vector_tag
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.threads import WordThreads
from raycloak.workers.vectors.vector_tag import TensorLeaves
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.models import small_model
from tests.protocol import DATA_ROOT, Arrays, SilentWords, computer, examples, initial_parameters, keys_of, mechanism

COMPUTATION, MODEL = b"c" * 32, b"p" * 32
KEYS = keys_of(COMPUTATION, 0)
PARAMETERS = initial_parameters()


def silent(chosen, data: Arrays | None = None, units: Units | None = None) -> VirtualWorkerComputer:
    """Return a computer without noise; the test's alone, since no option of the product switches it off."""
    return computer(chosen, data, words=SilentWords(), units=units)


def vector(
    each: VirtualWorkerComputer, *, v=0, keys=KEYS, step=0, model=MODEL, root=DATA_ROOT, parameters=PARAMETERS
) -> np.ndarray:
    return each.vector(v, keys, step, model, root, parameters).values


def real(difference: np.ndarray, chosen) -> np.ndarray:
    """Return a difference of two ring vectors as real numbers."""
    return difference.view(f"<i{difference.itemsize}").astype(np.float64) * chosen.gamma


def with_example(features, label=None, position=0) -> Arrays:
    """Return the small run's data with one example replaced."""
    all_features, labels = (array.copy() for array in examples())
    all_features[position] = features
    if label is not None:
        labels[position] = label
    return all_features, labels


# --- what it depends on


def test_equal_inputs_give_equal_bytes_in_any_process_host_or_order():
    chosen = mechanism()
    first, second = computer(chosen), computer(chosen)
    vector(second, v=3, keys=keys_of(COMPUTATION, 3))
    vector(second, step=5)
    assert vector(first).tobytes() == vector(second).tobytes()
    assert (
        first.vector(0, KEYS, 0, MODEL, DATA_ROOT, PARAMETERS).tag
        == second.vector(0, KEYS, 0, MODEL, DATA_ROOT, PARAMETERS).tag
    )


def test_guarantee_the_vector_and_its_tag_are_the_same_on_any_number_of_threads(monkeypatch):
    alone = computer(mechanism()).vector(0, KEYS, 0, MODEL, DATA_ROOT, PARAMETERS)
    monkeypatch.setattr(ring, "PIECE_WORDS", 16)
    monkeypatch.setattr(noise, "_TOGETHER", 1)
    monkeypatch.setattr(vector_tag, "_PIECE", 1)
    for count in (2, 3, 7):
        words = CpuWords(WordThreads(count))
        found = computer(mechanism(), words=words).vector(0, KEYS, 0, MODEL, DATA_ROOT, PARAMETERS)
        assert (found.values.tobytes(), found.tag) == (alone.values.tobytes(), alone.tag)


def test_the_tag_is_of_the_models_tensors_in_canonical_order(monkeypatch):
    """Other hosts cut the vector at the same places: at the borders of the tensors that the manifest states."""
    seen = []
    monkeypatch.setattr(
        "raycloak.workers.virtual_worker.vector_tag", lambda key, bits, tensors: seen.append((bits, tensors)) or b"tag"
    )
    chosen = mechanism()
    made = computer(chosen).vector(0, KEYS, 0, MODEL, DATA_ROOT, PARAMETERS)
    sizes = [tensor.numel() for tensor in small_model().parameters()]
    assert len(sizes) > 1
    assert made.tag == b"tag"
    assert seen == [
        (chosen.ring_bits, [TensorLeaves.of(part) for part in np.split(made.values, np.cumsum(sizes)[:-1])])
    ]


def test_places_sampling_noise_and_tag_share_no_key(monkeypatch):
    """Each of the four keys of a vector has a purpose of its own, so none says anything of another's stream."""
    derived: list[Purpose] = []

    def spy(secret, purpose, *fields):
        derived.append(purpose)
        return derive(secret, purpose, *fields)

    monkeypatch.setattr("raycloak.workers.virtual_worker.derive", spy)
    vector(computer(mechanism()))
    assert sorted(derived) == sorted([Purpose.PLACES, Purpose.SAMPLING, Purpose.NOISE, Purpose.VECTOR_TAG])


@pytest.mark.parametrize(
    "changed", ["step", "input digest", "virtual worker", "epoch", "computation", "data", "data root"]
)
def test_whatever_may_change_a_gradient_changes_the_noise(changed):
    """Two vectors differ by two independent noises, of standard deviation sqrt(2) sigma.

    The deviation of 83 normal values is off by half with probability below 1e-8.
    """
    chosen = mechanism()
    feature = examples()[0][0].copy()
    feature[0] = np.nextafter(feature[0], np.float32(9))
    others = {
        "step": lambda: vector(computer(chosen), step=1),
        "input digest": lambda: vector(computer(chosen), model=b"q" * 32),
        "virtual worker": lambda: vector(computer(chosen), keys=keys_of(COMPUTATION, 1)),
        "epoch": lambda: vector(computer(chosen), keys=keys_of(COMPUTATION, 0, 1)),
        "computation": lambda: vector(computer(chosen), keys=keys_of(b"d" * 32, 0)),
        "data": lambda: vector(computer(chosen, with_example(feature))),
        "data root": lambda: vector(computer(chosen), root=b"s" * 32),
    }
    difference = real(vector(computer(chosen)) - others[changed](), chosen) / chosen.gamma
    assert 0.5 < np.std(difference) / (math.sqrt(2) * chosen.sigma) < 1.5


def test_other_slices_change_nothing():
    chosen = mechanism()
    other = computer(chosen, with_example(np.full(6, 9.0), position=1))
    assert np.array_equal(vector(computer(chosen)), vector(other))


def test_the_slice_is_every_vth_example_and_its_digest_covers_their_bytes():
    own = computer(mechanism()).slice(3)
    assert np.array_equal(own.ids, slice_ids(3, 8, 40))
    changed = with_example(np.zeros(6), position=11)
    assert computer(mechanism(), changed).slice(3).digest != own.digest
    assert computer(mechanism(), changed).slice(4).digest == computer(mechanism()).slice(4).digest


def test_sampling_is_keyed_like_the_noise(monkeypatch):
    """All of 20 pairs of draws of 5 examples at rate 1/2 are equal with probability 2^-100."""
    drawn = []
    genuine = VirtualWorkerComputer.vector.__globals__["draw_ids"]
    monkeypatch.setattr(
        "raycloak.workers.virtual_worker.draw_ids", lambda *arguments: drawn.append(genuine(*arguments)) or drawn[-1]
    )
    each = computer(mechanism())
    for step in range(20):
        vector(each, step=step)
        vector(each, step=step, model=b"q" * 32)
    pairs = zip(drawn[::2], drawn[1::2], strict=True)
    assert not all(np.array_equal(first, second) for first, second in pairs)


def test_an_empty_draw_is_pure_noise():
    chosen = mechanism(sample_rate=0.0)
    each = computer(chosen)
    expected = np.zeros(chosen.dimension, np.uint32)
    noise_key = derive(KEYS.stream, Purpose.NOISE, "gradient", 0, MODEL, each.slice(0).digest, DATA_ROOT)
    NoiseSampler(chosen.sigma, 32).add_to(expected, noise_key)
    assert np.array_equal(vector(each), expected)


def test_public_data_is_neither_noised_nor_clipped():
    chosen = mechanism(private=False, sample_rate=1.0, max_grad_norm=1e-6)
    clipped = silent(mechanism(sample_rate=1.0, max_grad_norm=1e-6))
    assert np.array_equal(vector(computer(chosen)), vector(silent(chosen)))
    assert np.linalg.norm(real(vector(computer(chosen)), chosen)) > 1
    assert np.linalg.norm(real(vector(clipped), chosen)) < 1e-4


def test_a_tag_is_keyed_and_tells_vectors_apart():
    each = computer(mechanism())
    tags = {
        each.vector(0, KEYS, step, model, DATA_ROOT, PARAMETERS).tag for step in (0, 1) for model in (MODEL, b"q" * 32)
    }
    tags.add(each.vector(0, keys_of(COMPUTATION, 1), 0, MODEL, DATA_ROOT, PARAMETERS).tag)
    assert len(tags) == 5
    assert {len(tag) for tag in tags} == {16}


def test_equal_vectors_of_two_steps_or_models_have_unrelated_tags():
    """Else a tag would tell that two vectors are equal; here all are zero."""
    each = silent(mechanism(sample_rate=0.0))
    answers = [
        each.vector(0, KEYS, step, model, DATA_ROOT, PARAMETERS) for step in (0, 1) for model in (MODEL, b"q" * 32)
    ]
    assert not any(answer.values.any() for answer in answers)
    assert len({answer.tag for answer in answers}) == 4


# --- how far one example moves it


ADVERSARIES = {
    "ordinary": (np.ones(6), 0),
    "huge": (np.full(6, 3e38), 1),
    "one huge feature": (np.array([1e30, 0, 0, 0, 0, 0]), 2),
    "tiny": (np.full(6, 1e-38), 0),
    "denormal": (np.full(6, 1e-45), 0),
    "opposite of the others": (-examples()[0][8:48:8].sum(0), 1),
    "label that is no class": (np.ones(6), 99),
    "negative label": (np.ones(6), -(2**40)),
    "infinite": (np.full(6, np.inf), 0),
}


def moved_by(features, label, chosen, parameters=PARAMETERS) -> float:
    """Return the distance, in real units, from the vector in which the example contributes zero."""
    present = vector(silent(chosen, with_example(features, label)), parameters=parameters)
    absent = vector(silent(chosen, with_example(np.nan, label)), parameters=parameters)
    return float(np.linalg.norm(real(present - absent, chosen)))


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize(("bits", "gamma_log2"), [(32, -20), (32, -5), (64, -40)])
def test_an_adversarial_example_never_moves_the_encoded_sum_by_more_than_the_sensitivity(adversary, bits, gamma_log2):
    """The bound C' = C + gamma sqrt(d) holds from features to ring words, even if rounding is as coarse as C."""
    chosen = mechanism(sample_rate=1.0, max_grad_norm=0.25, ring_bits=bits, gamma_log2=gamma_log2, clamp=8.0)
    for scale in (1, 30):
        moved = moved_by(*ADVERSARIES[adversary], chosen, PARAMETERS * np.float32(scale))
        assert moved <= chosen.sensitivity


@settings(max_examples=25)
@given(arrays(np.float32, 6, elements=st.floats(width=32, allow_nan=True)), st.integers(-1, 4))
def test_no_example_whatever_moves_the_encoded_sum_by_more_than_the_sensitivity(features, label):
    chosen = mechanism(sample_rate=1.0, max_grad_norm=0.25, gamma_log2=-6, clamp=8.0)
    assert moved_by(features, label, chosen) <= chosen.sensitivity


def test_the_bound_is_reached_so_it_is_the_clipping_that_keeps_it():
    chosen = mechanism(sample_rate=1.0, max_grad_norm=0.25, gamma_log2=-20, clamp=8.0)
    assert 0.24 < moved_by(np.ones(6), 0, chosen) <= chosen.sensitivity
    unclipped = chosen.model_copy(update={"max_grad_norm": 1e6})
    assert moved_by(np.ones(6), 0, unclipped) > chosen.sensitivity


def test_each_coordinate_of_the_sum_is_clamped():
    chosen = mechanism(sample_rate=1.0, clamp=2.0**-10, gamma_log2=-20)
    clamped = real(vector(silent(chosen)), chosen)
    assert np.abs(clamped).max() == 2.0**-10
    assert (np.abs(clamped) == 2.0**-10).mean() > 0.5


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_non_finite_example_contributes_zero_and_nothing_tells_of_it(poison, recwarn, capfd):
    """The encoded sum is that of the other examples; the real vector has the usual form, noise and tag."""
    chosen = mechanism(sample_rate=1.0)
    poisoned = with_example(np.array([poison, 1, 1, 1, 1, 1]))
    mislabelled = with_example(np.ones(6), 99)
    assert np.array_equal(vector(silent(chosen, poisoned)), vector(silent(chosen, mislabelled)))
    answer = computer(chosen, poisoned).vector(0, KEYS, 0, MODEL, DATA_ROOT, PARAMETERS)
    assert answer.values.shape == (chosen.dimension,)
    assert len(answer.tag) == 16
    assert not recwarn.list
    assert "".join(capfd.readouterr()) == ""


def test_all_examples_non_finite_still_give_a_normal_vector_of_noise():
    """Deviation of 83 normal values, off by half with probability below 1e-8."""
    chosen = mechanism(sample_rate=1.0)
    features, labels = examples()
    values = vector(computer(chosen, (np.full_like(features, np.nan), labels)))
    assert 0.5 < np.std(real(values, chosen)) / (chosen.sigma * chosen.gamma) < 1.5


def test_parameters_that_are_not_finite_zero_every_example_and_leave_noise():
    chosen = mechanism(sample_rate=1.0)
    assert not vector(silent(chosen), parameters=np.full_like(PARAMETERS, np.nan)).any()


# --- units of several rows

PERSONS = np.arange(40) % 16
PERSONS[32:] = 0
"""Of 16 persons, two are virtual worker 0's: person 0 has ten rows, and person 8 has two."""


def persons() -> Units:
    return Units(np.argsort(PERSONS, kind="stable"), np.cumsum(np.bincount(PERSONS)))


def of_persons(**changes):
    return mechanism(
        unit="person", rows_per_unit=3, num_examples=16, sample_rate=1.0, max_grad_norm=0.25, clamp=8.0, **changes
    )


def rows_of_step(monkeypatch, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that a step reads and whether each is present, of persons 0 and 8, [2, 3]."""
    seen, genuine = [], virtual_worker.micro_batches
    monkeypatch.setattr(
        virtual_worker, "micro_batches", lambda data, *rows: seen.append(rows[:3]) or genuine(data, *rows)
    )
    vector(silent(of_persons(), units=persons()), step=step)
    monkeypatch.undo()
    (rows, present, chosen), *_ = seen
    assert rows.shape == present.shape == (chosen.micro_batch_size * chosen.micro_batches, 3)
    assert not present[2:].any(), "no other person is in the slice"
    assert set(PERSONS[rows[2:]].flat) == {0}, "an own one is read in the place of those that are missing"
    return rows[:2], present[:2]


def test_guarantee_a_step_takes_at_most_k_rows_of_a_person_and_a_fresh_choice_of_them(monkeypatch):
    """Twelve choices of three of ten rows leave one out with a chance of 10 * 0.7^12, and these keys are fixed."""
    of_steps = [rows_of_step(monkeypatch, step) for step in range(12)]
    taken = [rows[0] for rows, present in of_steps if present[0].all()]
    assert len(taken) == 12
    assert all(len(set(rows)) == 3 for rows in taken)
    assert set(np.concatenate(taken)) == set(np.flatnonzero(PERSONS == 0))
    assert all(present[1].tolist() == [True, True, False] for _, present in of_steps)
    assert all(set(rows[1]) == {8, 24} for rows, _ in of_steps)


def test_a_step_s_choice_of_rows_has_a_key_of_its_own(monkeypatch):
    derived: list[Purpose] = []
    monkeypatch.setattr(
        virtual_worker,
        "derive",
        lambda secret, purpose, *rest: derived.append(purpose) or derive(secret, purpose, *rest),
    )
    vector(computer(of_persons(), units=persons()))
    wanted = [Purpose.PLACES, Purpose.SAMPLING, Purpose.UNIT_ROWS, Purpose.NOISE, Purpose.VECTOR_TAG]
    assert sorted(derived) == sorted(wanted)


def moved_by_person(features: np.ndarray, label: int, chosen) -> float:
    """Return the distance, in real units, from the vector in which person 0, all of whose rows are these, is zeroed."""
    given, labels = (array.copy() for array in examples())
    given[PERSONS == 0], labels[PERSONS == 0] = features, label
    zeroed = given.copy()
    zeroed[PERSONS == 0] = np.nan
    whole, without = (vector(silent(chosen, (each, labels), persons())) for each in (given, zeroed))
    assert without.any(), "the other person's rows that are missing are in nobody's way"
    return float(np.linalg.norm(real(whole - without, chosen)))


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_no_person_moves_the_encoded_sum_by_more_than_the_sensitivity(adversary):
    chosen = of_persons(gamma_log2=-20)
    assert moved_by_person(*ADVERSARIES[adversary], chosen) <= chosen.sensitivity
    assert moved_by_person(np.ones(6), 0, chosen) > 0.24


def test_several_rows_of_what_is_no_unit_are_refused():
    with pytest.raises(RefusedError, match="proof_bound"):
        computer(of_persons())
