"""The vector of a virtual worker whose examples a client sent."""

import numpy as np
import pytest

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.messages import Envelope
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.inputs.datasets import ArrayDataset, DatasetForm
from raycloak.workers.inputs.sent_rows import SentForm, SentRows, SentSlots
from raycloak.workers.messages import StepRequest
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import ModelSource, build_model
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.step_input import step_input
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.drawn import spare_of
from tests.protocol import (
    DATA_ROOT,
    VIRTUAL_WORKERS,
    HandRun,
    SilentWords,
    examples,
    initial_parameters,
    keys_of,
    mechanism,
)

PLACES = 40
FORM = DatasetForm(
    num_examples=PLACES, feature_shape=(6,), feature_dtype="float32", label_shape=(), label_dtype="int64"
)
SENT = SentForm(FORM, None, 3)
KEYS = keys_of(b"c" * 32, 3)
V = 3
INPUT = b"i" * 32


def of_sent() -> Mechanism:
    """Return the small run's mechanism for as many places as it has examples, of which all that are filled are used."""
    return mechanism(sample_rate=1.0, max_participations=2, micro_batch_size=4, micro_batches=2)


def computer(dataset, chosen: Mechanism, quiet: bool) -> VirtualWorkerComputer:
    module = build_model(ModelSource.of("tests.models:small_model"), ".", 0)
    engine, spare = GradientEngine(module, cross_entropy, chosen), spare_of(ArrayDataset(*examples()))
    return VirtualWorkerComputer(chosen, engine, dataset, spare, words=SilentWords() if quiet else None)


def rows(places: list[int]) -> dict[int, bytes]:
    """Return the small run's examples as encoded rows, by their places."""
    features, labels = examples(PLACES)
    return {p: features[p].tobytes() + labels[p].astype("<i8").tobytes() for p in places}


def sent_vector(encoded: dict[int, bytes], step_input: bytes = INPUT, quiet: bool = True) -> np.ndarray:
    each = computer(SentSlots(FORM), of_sent(), quiet)
    return each.vector(V, KEYS, 0, step_input, DATA_ROOT, initial_parameters(), SentRows(SENT, encoded)).values


OWN = list(range(V, PLACES, VIRTUAL_WORKERS))


def test_sent_examples_give_the_sum_that_registered_ones_give():
    """All examples of the slice are drawn at rate 1, so the two paths must meet in the clear sum."""
    registered = computer(ArrayDataset(*examples(PLACES)), of_sent(), True)
    expected = registered.vector(V, KEYS, 0, INPUT, DATA_ROOT, initial_parameters()).values
    assert expected.any()
    np.testing.assert_array_equal(sent_vector(rows(OWN)), expected)


@pytest.mark.parametrize("absent", OWN)
def test_an_absent_example_takes_away_its_own_contribution_and_nothing_else(absent):
    """In the integers of the ring, each example's part is its own up to the rounding of the sum."""
    whole, without = (sent_vector(rows([p for p in OWN if keep or p != absent])) for keep in (True, False))
    alone = sent_vector(rows([absent]))
    difference = (whole - without).view(f"<i{whole.itemsize}").astype(np.int64)
    expected = alone.view(f"<i{alone.itemsize}").astype(np.int64)
    assert np.abs(difference - expected).max() <= 2
    assert np.abs(expected).max() > 1000


def test_no_example_at_all_is_a_step_of_noise():
    assert not sent_vector({}).any()
    noise = sent_vector({}, quiet=False)
    assert noise.any()


def test_other_batches_for_the_step_have_other_noise():
    """Guarantee of `VirtualWorkerComputer.vector`: so no difference of two vectors is without noise."""
    one, other = (sent_vector(rows(OWN), of_step, quiet=False) for of_step in (b"i" * 32, b"j" * 32))
    assert np.mean(one == other) < 0.05
    again = sent_vector(rows(OWN), b"i" * 32, quiet=False)
    np.testing.assert_array_equal(one, again)


def test_a_worker_on_registered_data_takes_no_batches(tmp_path):
    """Not even for a receipt that was charged with them."""
    run = HandRun(tmp_path)
    batch = np.frombuffer(b"anything", np.uint8)
    name = digest(batch.tobytes())

    def code(receipt: Envelope) -> str:
        asked = run.request(run.roster())
        request = StepRequest(
            roster=asked.roster,
            presentations=asked.presentations,
            commitments=asked.commitments,
            ranges=asked.ranges,
            batches=(name,),
        )
        reply, *vectors = run.workers["worker-0"].step(receipt, request, *run.parameters, batch)
        assert not any(len(vector) for vector in vectors)
        return reply.code

    assert code(run.receipt()) == "receipt_mismatch"
    assert code(run.receipt(input_digest=step_input(run.digest, (name,)))) == "batch_unexpected"


def test_a_steps_input_is_another_for_any_other_batches():
    """Guarantee of `step_input`; without batches it is the model digest itself."""
    one, two = b"1" * 32, b"2" * 32
    sets = [(one,), (two,), (one, two), (two, one), (one, one)]
    found = {step_input(INPUT, each) for each in sets} | {step_input(one, sets[0])}
    assert len(found) == len(sets) + 1
    assert step_input(INPUT, ()) == INPUT
