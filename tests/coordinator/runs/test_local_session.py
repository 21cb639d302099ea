"""A session of plain objects, and the backend that runs them."""

import os
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from raycloak.coordinator.cluster.backend import ActorLost, LocalBackend
from raycloak.coordinator.runs.local_session import local_session
from raycloak.metrics.errors import ConfigError, ProtocolError
from tests.protocol import NOW, secret_file, trained

ONE = np.asarray(1)


class Echo:
    """An actor that answers with what it is asked."""

    def __init__(self, member_id: str) -> None:
        self.member_id = member_id

    def one(self, value: NDArray[Any]) -> NDArray[Any]:
        return value

    def two(self, first: int, second: NDArray[Any]) -> tuple[int, NDArray[Any]]:
        return first, second

    def fail(self) -> NDArray[Any]:
        raise ProtocolError("no", "not so")


@pytest.fixture
def backend() -> LocalBackend:
    return LocalBackend(Echo, Echo)


def close(session) -> None:
    session.control.actors["ledger"].handle.close()
    session.control.actors["orchestrator"].handle.close()


# --- the session


def test_a_session_is_the_whole_protocol_in_one_process_under_simulated_evidence(tmp_path):
    run = trained(tmp_path)
    assert run.finished.evidence_class == "simulated"
    assert run.finished.colocated
    assert run.session.policy.accepts_simulated


def test_all_state_is_below_its_home(tmp_path, monkeypatch):
    """Nothing else is written: not the working directory, not the user's own state."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    session, _ = local_session(tmp_path / "state")
    close(session)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        "ledger.sqlite",
        "orchestrator",
        "simulator",
    ]
    assert list(elsewhere.iterdir()) == []
    assert not os.path.lexists(os.environ["RAYCLOAK_HOME"])


def test_the_run_id_follows_from_the_secret_and_a_session_can_be_opened_again(tmp_path):
    path = secret_file(tmp_path)
    first, _ = local_session(tmp_path, path)
    close(first)
    again, _ = local_session(tmp_path, path)
    close(again)
    other, _ = local_session(tmp_path)
    close(other)
    assert first.run_id == again.run_id != other.run_id
    assert first.orchestrator_key == again.orchestrator_key
    assert first.policy.digest() == again.policy.digest() == other.policy.digest()
    assert first.control.actors["ledger"].handle.public_key == again.control.actors["ledger"].handle.public_key
    assert again.control.actors["ledger"].handle.fencing > first.control.actors["ledger"].handle.fencing


def test_a_wrong_secret_file_is_a_config_error(tmp_path):
    path = secret_file(tmp_path, "not a secret")
    with pytest.raises(ConfigError) as error:
        local_session(tmp_path, path)
    assert error.value.code == "run_secret"


def test_the_time_is_the_callers(tmp_path):
    session, _ = local_session(tmp_path, clock=lambda: NOW)
    assert session.collateral.tdx[0].tcb_info.count("2027-01-15")
    close(session)


# --- the backend


def test_values_pass_through_references_and_arrays_are_read_only(backend):
    actor = backend.start_worker("worker-0")
    array = np.arange(3)
    (reference,) = backend.call(actor, Echo.one, backend.put(array))
    value = backend.fetch(reference, 1)
    assert np.array_equal(value, array)
    with pytest.raises(ValueError, match="read-only"):
        value[0] = 1
    array[0] = 7
    first, second = backend.call(actor, Echo.two, 1, reference, returns=2)
    assert (backend.fetch(first, 1), backend.fetch(second, 1)[1]) == (1, 1)
    assert list(backend.wait([first, second], 1)) == [first, second]


def test_an_actors_error_is_raised_where_its_answer_is_fetched(backend):
    actor = backend.start_aggregator("aggregator-0")
    references = backend.call(actor, Echo.fail, returns=2)
    for reference in references:
        with pytest.raises(ProtocolError, match="not so"):
            backend.fetch(reference, 1)


def test_a_call_waits_for_what_it_is_given_and_fails_with_it(backend):
    actor = backend.start_aggregator("aggregator-0")
    (failed,), (good,) = backend.call(actor, Echo.fail), backend.call(actor, Echo.one, ONE)
    assert backend.fetch(backend.call(actor, Echo.one, good)[0], 1) == 1
    for references in (
        backend.call(actor, Echo.one, failed),
        backend.call(actor, Echo.two, 1, failed, returns=2),
    ):
        for reference in references:
            with pytest.raises(ProtocolError, match="not so"):
                backend.fetch(reference, 1)


def test_a_stopped_actor_is_lost_and_another_of_its_kind_is_not(backend):
    actor, other = backend.start_worker("worker-0"), backend.start_worker("worker-1")
    backend.stop(actor)
    (reference,) = backend.call(actor, Echo.one, ONE)
    with pytest.raises(ActorLost) as lost:
        backend.fetch(reference, 1)
    assert lost.value.cause == "died"
    assert backend.fetch(backend.call(other, Echo.one, ONE)[0], 1) == 1
    assert backend.node(actor) == backend.node(other)


def test_an_actor_is_named_by_its_member_id(backend):
    for actor in (backend.start_worker("worker-7"), backend.start_aggregator("worker-7")):
        assert actor.member_id == actor.handle.member_id == "worker-7"
