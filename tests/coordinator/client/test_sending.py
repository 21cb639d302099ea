"""Batches that a client sends: each is sealed for the step and the place that it gets. test_sent_batches.py seals."""

import hashlib
import threading

import numpy as np
import pytest

import raycloak
from raycloak.coordinator.client.sent_batches import SealedBatch
from tests.coordinator.client.conftest import CONFIG

SOON = 120.0
SENT = {
    **CONFIG,
    "key_service": {"address": "localhost:7443", "contract": "{}"},
    "dataset": {
        "kind": "sent",
        "shape": [2],
        "classes": 10,
        "max_participations": 2,
        "max_examples_per_step": 4,
    },
}


class Keys:
    """In place of `raycloak.DataKeys`: seals nothing, and tells for which places batches were sealed."""

    def __init__(self):
        self.places = []
        self.accepted = []
        self.refusal = None

    def accept(self, manifest, dataset):
        if self.refusal is not None:
            raise self.refusal
        self.accepted.append(manifest)
        assert dataset.kind == "sent"
        return self

    def seal_batch(self, batch, *, client_id, step, number, first):
        self.places.append((step, number, first))
        # Longer than a piece of the stream, and another each time, as a real sealing is.
        content = f"{client_id} {self.places} {batch['features'].tolist()}".encode() * 20_000
        count = len(batch["example_ids"])
        return SealedBatch(count, bytes(16 * count), hashlib.sha256(content).digest(), content)


def batch(count, value=0.0):
    return {"example_ids": list(range(count)), "features": np.full((count, 2), value), "labels": np.zeros(count, int)}


def admit(memory_service, client_id="c0"):
    with memory_service.changed:
        client = memory_service.clients[client_id]
        client.manifest_json = "{}"
        client.revision += 1
        memory_service.changed.notify_all()


@pytest.fixture
def keys():
    return Keys()


@pytest.fixture
def sending(memory_service, service, keys):
    """A training client that sends its data, and whose run is admitted."""
    training = service.create_training_client(SENT, data_keys=keys)
    admit(memory_service)
    return training


def test_each_batch_gets_its_place(sending, keys):
    futures = [sending.forward_backward(batch(3)), sending.forward_backward(batch(1)), sending.optim_step()]
    futures += [sending.forward_backward(batch(2)), sending.optim_step(), sending.forward_backward(batch(4))]
    assert [future.result(SOON).step for future in futures] == [0, 0, 1, 1, 2, 2]
    assert [futures[place].result().examples_sent for place in (0, 1, 3, 5)] == [3, 1, 2, 4]
    assert keys.places == [(0, 0, 0), (0, 1, 3), (1, 0, 0), (2, 0, 0)]
    assert keys.accepted == ["{}"]


def test_a_batch_waits_until_the_run_is_admitted(memory_service, service, keys):
    training = service.create_training_client(SENT, data_keys=keys)
    memory_service.clients["c0"].status = "INITIALIZING"
    future = training.refresh().forward_backward(batch(1))
    with pytest.raises(raycloak.FutureTimeoutError):
        future.result(0.2)
    admit(memory_service)
    assert future.result(SOON).step == 0
    assert keys.accepted == ["{}"]


def test_a_batch_of_a_run_that_failed_is_told_why(memory_service, service, keys):
    training = service.create_training_client(SENT, data_keys=keys)
    client = memory_service.clients["c0"]
    client.status, client.error.kind, client.error.code = "ERROR", "failed", "policy"
    assert training.forward_backward(batch(1)).exception(SOON).code == "policy"


def test_the_rows_are_those_of_the_call(memory_service, service, keys):
    training = service.create_training_client(SENT, data_keys=keys)
    # Until the run is admitted, nothing is sealed.
    memory_service.clients["c0"].status = "INITIALIZING"
    rows = batch(1, 0.25)
    future = training.refresh().forward_backward(rows)
    rows["features"][:] = 0.75
    admit(memory_service)
    future.result(SOON)
    assert b"0.25" in memory_service.batches[0]


def test_a_lost_reply_sends_the_same_ciphertext_again(memory_service, sending, keys):
    memory_service.lost_replies = 1
    assert sending.forward_backward(batch(2)).result(SOON).examples_sent == 2
    attempts = memory_service.batches
    # The stream of changes may tell the result first.
    pause = threading.Event()
    while len(attempts) < 2:
        pause.wait(0.01)
    assert attempts[0] == attempts[1]
    assert keys.places == [(0, 0, 0)]


def test_who_attaches_goes_on_in_the_step_that_was_left(memory_service, sending, keys):
    for future in (sending.forward_backward(batch(3)), sending.optim_step(), sending.forward_backward(batch(2))):
        future.result(SOON)
    with raycloak.ServiceClient(memory_service.address) as service:
        again = service.get_client("c0", data_keys=keys)
        again.forward_backward(batch(1)).result(SOON)
    assert keys.places[-1] == (1, 1, 2)


def test_a_cancelled_step_is_the_next_one_again(memory_service, sending, keys):
    sending.forward_backward(batch(3)).result(SOON)
    memory_service.runs = False
    future = sending.optim_step()
    while not future.operation_id:
        threading.Event().wait(0.01)
    assert future.cancel()
    memory_service.runs = True
    sending.forward_backward(batch(1)).result(SOON)
    assert keys.places[-1] == (0, 1, 3)


def test_a_refusal_to_seal_is_the_futures_error(memory_service, sending, keys):
    keys.refusal = raycloak.EvidenceError("data_terms", "the run charges another account.")
    error = sending.forward_backward(batch(1)).exception(SOON)
    assert (type(error), error.code) == (raycloak.FutureFailedError, "data_terms")
    assert memory_service.batches == []
    keys.refusal = None
    assert sending.forward_backward(batch(1)).result(SOON).step == 0


def test_a_refused_batch_takes_no_place(memory_service, sending, keys):
    refusal = raycloak.ServiceValidationError("participations_exceeded", "an id was used.", field="batch.example_ids")
    memory_service.failures["SendBatch"] = [refusal]
    with pytest.raises(raycloak.ServiceValidationError, match="participations_exceeded"):
        sending.forward_backward(batch(3)).result(SOON)
    sending.forward_backward(batch(3)).result(SOON)
    assert keys.places == [(0, 0, 0), (0, 0, 0)]


LATER = raycloak.ServiceRateLimitedError("rate_limited", "too many calls.", retry_after_s=0.05)
NEVER = raycloak.ServiceRateLimitedError("rate_limited", "too many calls.", retry_after_s=3600.0)
REFUSAL = raycloak.ServiceValidationError("participations_exceeded", "an id was used.", field="batch.example_ids")


def test_a_batch_that_came_too_early_is_sent_again_and_is_in_its_step(memory_service, sending, keys):
    memory_service.failures["SendBatch"] = [LATER, LATER]
    futures = [sending.forward_backward(batch(3)), sending.forward_backward(batch(1)), sending.optim_step()]
    assert [future.result(SOON).step for future in futures] == [0, 0, 1]
    first, second, step = (future.idempotency_key for future in futures)
    assert memory_service.submitted == [first, first, first, second, step]
    assert keys.places == [(0, 0, 0), (0, 1, 3)], "it is sealed once"


def waits(memory_service, future):
    """Wait until the service has refused an attempt of a submission."""
    while future.idempotency_key not in memory_service.submitted:
        threading.Event().wait(0.01)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_batch_that_waits_for_its_time_can_be_cancelled(memory_service, service, keys, how):
    # Longer than the test waits, and shorter than the client's patience.
    later = raycloak.ServiceRateLimitedError("rate_limited", "too many calls.", retry_after_s=600.0)
    memory_service.failures["SendBatch"] = [later]
    with raycloak.ServiceClient(memory_service.address, patience_s=3600) as service:
        sending = service.create_training_client(SENT, data_keys=keys)
        admit(memory_service)
        future = sending.forward_backward(batch(3))
        waits(memory_service, future)
        assert not future.done()
        if how == "cancel":
            assert future.cancel()
        else:
            sending.close()
        assert isinstance(future.exception(SOON), raycloak.FutureCancelledError)
        assert memory_service.batches == []
        if how == "cancel":
            # The caller knows what is not in the step.
            assert sending.forward_backward(batch(1)).result(SOON).step == 0
            assert sending.optim_step().result(SOON).step == 1


@pytest.mark.parametrize("refusal", [REFUSAL, NEVER])
def test_guarantee_no_step_is_charged_without_a_batch_that_its_caller_believes_to_be_in_it(
    memory_service, sending, refusal
):
    taken = sending.forward_backward(batch(1)).result(SOON)
    memory_service.failures["SendBatch"] = [refusal]
    lost, step = sending.forward_backward(batch(3)), sending.optim_step()
    # All of the next step, which would else be added to the rest of this one.
    behind = [sending.forward_backward(batch(2)), sending.save_state(), sending.optim_step()]
    for future in (step, *behind):
        error = future.exception(SOON)
        assert (type(error), error.code) == (raycloak.FutureFailedError, refusal.code)
        assert error.__cause__.message == refusal.message
        assert not future.operation_id
    assert taken.examples_sent == 1
    assert [each.kind for each in memory_service.operations["c0"]] == ["forward_backward"]
    # Now the caller knows, and one batch more makes the step what it was to be.
    assert sending.forward_backward(batch(3)).result(SOON).step == 0
    assert sending.optim_step().result(SOON).step == 1
    assert type(lost.exception(SOON)) is type(refusal)


def test_an_optim_step_is_not_sent_though_its_batch_had_failed_before_it_was_submitted(memory_service, sending):
    sending.forward_backward(batch(1)).result(SOON)
    memory_service.failures["SendBatch"] = [REFUSAL, REFUSAL]
    lost, second = sending.forward_backward(batch(3)), sending.forward_backward(batch(2))
    while not (lost.done() and second.done()):
        threading.Event().wait(0.01)
    # The caller has seen the end of one batch and not of the other.
    assert lost.exception(SOON).code == "participations_exceeded"
    assert sending.optim_step().exception(SOON).code == "participations_exceeded"
    # A caller who has seen it may mean the step to be what was taken.
    assert sending.optim_step().result(SOON).step == 1


@pytest.mark.parametrize("place", [0, 1])
def test_what_was_not_sent_behind_an_operation_that_may_have_arrived_is_no_part_of_a_later_step(
    memory_service, sending, keys, place
):
    """The caller has seen no end yet, so its next step is not the one that is open."""
    unknown = raycloak.ServiceServerError("internal", "it broke.")
    memory_service.failures[("SendBatch", "Submit")[place]] = [unknown]
    may_go, seal = threading.Event(), keys.seal_batch

    def seal_later(rows, **at):
        assert may_go.wait(SOON)
        return seal(rows, **at)

    keys.seal_batch = seal_later
    first = [sending.forward_backward(batch(1)), sending.optim_step(), sending.forward_backward(batch(2))]
    may_go.set()
    while not all(future.done() for future in first):
        threading.Event().wait(0.01)
    assert [len(memory_service.batches), first[place].kind] == [place, ("forward_backward", "optim_step")[place]]
    later = [sending.forward_backward(batch(3)), sending.optim_step()]
    assert [future.exception(SOON).code for future in later] == ["internal", "internal"]
    assert len(memory_service.batches) == place
    # Whichever end it sees, the caller knows.
    assert sending.forward_backward(batch(4)).result(SOON).step == 0
    assert sending.optim_step().result(SOON).step == 1


def test_no_step_is_sent_without_a_batch_that_failed_before_it_could_be_sent(memory_service, sending, monkeypatch):
    """The stream of changes is lost between the making of its future and its submission."""
    sending.forward_backward(batch(3)).result(SOON)
    start = sending._changes.start

    def lose():
        monkeypatch.setattr(sending._changes, "start", start)
        sending._lost(raycloak.ServiceAuthenticationError("expired", "the credentials have expired."))

    monkeypatch.setattr(sending._changes, "start", lose)
    lost, optim = sending.forward_backward(batch(2)), sending.optim_step()
    assert optim.exception(SOON).code == "expired"
    assert [each.kind for each in memory_service.operations[sending.client_id]] == ["forward_backward"]
    assert lost.exception(SOON).code == "expired"
    assert sending.optim_step().result(SOON).step == 1


def test_a_caller_who_has_seen_that_a_batch_was_not_taken_may_step_without_it(memory_service, sending):
    sending.forward_backward(batch(1)).result(SOON)
    memory_service.failures["SendBatch"] = [REFUSAL]
    assert sending.forward_backward(batch(3)).exception(SOON).code == "participations_exceeded"
    assert sending.optim_step().result(SOON).step == 1


def test_a_batch_without_keys_or_for_registered_data_is_refused_at_once(memory_service, service, training, keys):
    with pytest.raises(raycloak.ServiceValidationError, match="give no batch"):
        training.forward_backward(batch(1))
    with pytest.raises(raycloak.ServiceValidationError, match="no_data_keys"):
        service.create_training_client(SENT).forward_backward(batch(1))


def test_closing_leaves_no_batch_waiting(memory_service, service, keys):
    training = service.create_training_client(SENT, data_keys=keys)
    memory_service.clients["c0"].status = "INITIALIZING"
    future = training.refresh().forward_backward(batch(1))
    with pytest.raises(raycloak.FutureTimeoutError):
        future.result(0.1)
    training.close()
    assert isinstance(future.exception(SOON), raycloak.ServiceError)
