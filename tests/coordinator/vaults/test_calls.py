"""Calls and answers of actors travel as canonical messages and arrays, and as nothing else."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.cluster.control import LedgerFace, OrchestratorFace
from raycloak.coordinator.cluster.remote import Aggregator, AggregatorActor, Remote, Worker, WorkerActor
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.vaults.calls import ActorRefusal, Receiver, Reference, Wire
from raycloak.coordinator.vaults.run_orchestrator import RunOrchestrator
from raycloak.metrics import errors
from raycloak.metrics.errors import (
    BudgetError,
    ConfigError,
    ProtocolError,
    RaycloakError,
    RunFailedError,
    SenderError,
)
from tests.protocol import whole_run

State = Mapping[str, np.ndarray]
ENVELOPE = Envelope(body=b"{}", signature=b"\xff" * 64)


Number = TypeVar("Number", bound=np.generic)
NamedArray = TypeAliasType("NamedArray", np.ndarray[Any, np.dtype[Number]], type_params=(Number,))


@dataclass(frozen=True, slots=True)
class Pair:
    """A record of an argument."""

    name: str
    share: float
    parts: tuple[bytes, ...] = ()


class Desk(Receiver):
    """An actor that answers in every form."""

    def tell(self, step: int, pair: Pair | None = None, *more: int) -> tuple[int, str, tuple[int, ...]]:
        return step, "-" if pair is None else pair.name, more

    def sign(self, envelope: Envelope, state: State, *arrays: NDArray[Any]) -> tuple[Pair, State, NDArray[np.float64]]:
        self.given = envelope, state, arrays
        return Pair("p", 2, (b"\x01",)), {"b": arrays[0], "a": state["x"]}, np.zeros(2)

    def refuse(self) -> None:
        raise SenderError("no", "not so", "Wait.", "worker-1")

    def fail(self) -> None:
        raise ZeroDivisionError

    def _hidden(self) -> None:
        pass


def call(method, *args, **keywords) -> tuple[Any, ...]:
    """Return what travels of a call."""
    wire = Wire.of(method)
    return wire.write_call(wire.positional(args, keywords))


def received(*frames, method="tell", returns=1) -> Any:
    return Desk().receive(method, returns, *frames)


def refusal(*frames, **options) -> RaycloakError:
    """Return the error with which a call is refused."""
    with pytest.raises(ActorRefusal) as caught:
        received(*frames, **options)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    (body,) = caught.value.args
    return parse(Failed, body).raised()


def carried(frame: Any) -> bool:
    """Return whether a frame is bytes, an array of numbers, or a tuple of these."""
    if isinstance(frame, tuple):
        return all(type(each) is not tuple and carried(each) for each in frame)
    return type(frame) is bytes or (type(frame) is np.ndarray and frame.dtype.kind in "biuf")


# --- what travels


def test_a_call_is_one_message_of_its_arguments_by_name_with_defaults():
    assert call(Desk.tell, 3) == (b'{"more":[],"pair":null,"step":3}',)
    pair = b'{"more":[4,5],"pair":{"name":"n","parts":["ff"],"share":1.0},"step":3}'
    assert call(Desk.tell, 3, Pair("n", 1, (b"\xff",)), 4, 5) == (pair,)
    answer = received(pair)
    assert Wire.of(Desk.tell).read_answer(0, answer) == (3, "n", (4, 5))


def test_arrays_states_and_envelopes_travel_by_themselves_and_come_out_as_they_were():
    desk, array = Desk(), np.arange(3, dtype="<u4")
    body, envelope, state, first, second = call(Desk.sign, ENVELOPE, {"x": array, "w": array[:1]}, array, array[::2])
    assert body == b"{}"
    assert envelope == ENVELOPE.encode()
    assert state[0] == b'{"names":["x","w"]}'
    frames = desk.receive("sign", 3, body, envelope, state, first, second)
    given, states, arrays = desk.given
    assert given == ENVELOPE
    assert list(states) == ["x", "w"]
    assert [each.tolist() for each in arrays] == [[0, 1, 2], [0, 2]]
    wire = Wire.of(Desk.sign)
    pair, new, last = (wire.read_answer(index, frame) for index, frame in enumerate(frames))
    assert pair == Pair("p", 2.0, (b"\x01",))
    assert list(new) == ["b", "a"]
    assert last.tolist() == [0.0, 0.0]


def test_an_array_travels_by_itself_where_its_type_is_a_named_alias():
    """As those of NumPy are from 2.5 on."""

    def take(self: object, rows: NamedArray[np.float32]) -> None:
        raise AssertionError("nobody calls it")

    assert set(Wire.of(take).forms) == {"rows"}


def test_who_is_given_an_array_cannot_write_into_it():
    array = np.arange(3)
    (*_, sent) = call(Desk.sign, ENVELOPE, {}, array)
    with pytest.raises(ValueError, match="read-only"):
        sent[0] = 1
    array[0] = 7
    assert sent.base is array, "it is not copied"


def test_a_reference_stands_for_what_travels_by_itself():
    awaited = Reference()
    assert call(Desk.sign, awaited, awaited, awaited)[1:] == (awaited,) * 3


def test_each_method_has_a_domain_of_its_own():
    methods = [each for _, each in inspect.getmembers(Desk, inspect.isfunction) if "return" in each.__annotations__]
    domains = {Wire.of(each).arguments.DOMAIN for each in methods if each.__name__ != "receive"}
    assert domains == {f"raycloak/{name}/v1" for name in ("tell", "sign", "refuse", "fail", "_hidden")}


# --- what is refused


@pytest.mark.parametrize(
    "body",
    [
        b'{"more":[],"pair":null,"step":3 }',
        b'{"step":3,"more":[],"pair":null}',
        b'{"more":[],"pair":null}',
        b'{"more":[],"pair":null,"step":"3"}',
        b'{"more":[],"pair":null,"step":3.0}',
        b'{"more":[],"other":1,"pair":null,"step":3}',
        b'{"more":[],"pair":{"name":"n","parts":[],"share":1},"step":3}',
        b'{"more":[],"pair":{"name":"n","other":1,"parts":[],"share":1.0},"step":3}',
        b'{"more":[],"pair":{"name":"n","parts":["FF"],"share":1.0},"step":3}',
        b"\x80\x04K\x03.",
        b"",
    ],
)
def test_guarantee_a_receiver_takes_one_encoding_of_what_the_signature_says(body):
    assert refusal(body).code == "malformed"


@pytest.mark.parametrize("frame", [{"step": 3}, "text", None, 3, [], np.arange(3), object()])
def test_guarantee_no_other_object_is_a_message(frame):
    assert refusal(frame).code == "malformed"


@pytest.mark.parametrize(
    "frames",
    [
        (ENVELOPE, (b'{"names":[]}',), np.zeros(1)),
        (ENVELOPE.encode(), {}, np.zeros(1)),
        (ENVELOPE.encode(), (), np.zeros(1)),
        (ENVELOPE.encode(), (b'{"names":["a"]}',), np.zeros(1)),
        (ENVELOPE.encode(), (b'{"names":["a","a"]}', np.zeros(1), np.zeros(1)), np.zeros(1)),
        (ENVELOPE.encode(), (b'{"names":["a"]}', b"x"), np.zeros(1)),
        (ENVELOPE.encode(), (b'{"names":[]}',), np.array([None])),
        (ENVELOPE.encode(), (b'{"names":[]}',), np.array(["text"])),
        (ENVELOPE.encode(), (b'{"names":[]}',), [1.0]),
        (ENVELOPE.encode(),),
        (),
    ],
)
def test_what_travels_by_itself_is_checked_too(frames):
    assert refusal(b"{}", *frames, method="sign", returns=3).code == "malformed"


def test_more_than_a_method_takes_is_refused():
    assert refusal(b'{"more":[],"pair":null,"step":3}', np.zeros(1)).code == "malformed"
    assert refusal().code == "malformed"


@pytest.mark.parametrize("name", ["_hidden", "__init__", "receive_beside", "given", "", "__class__"])
def test_only_public_methods_are_called(name):
    assert refusal(b"{}", method=name).code == "malformed"


# --- errors


EVERY_ERROR = [
    *(kind("a_code", "It is so.", "Do that.") for kind in (ConfigError, BudgetError, ProtocolError, RaycloakError)),
    SenderError("a_code", "It is so.", "", "worker-1"),
    RunFailedError("a_code", "It is so.", "Do that.", 7, 1.5),
    RunFailedError("a_code", "It is so."),
]


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_an_error_comes_out_as_it_was(error):
    found = parse(Failed, Failed.of(error).encode()).raised()
    assert type(found) is type(error)
    assert found.__reduce__() == error.__reduce__()


def test_every_class_of_errors_travels():
    kinds = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, RaycloakError)]
    for kind in kinds:
        assert type(Failed.of(kind("a_code", "It is so.")).raised()) is kind


def test_an_error_of_a_later_class_travels_as_the_one_above_it():
    class Special(BudgetError):
        pass

    assert type(Failed.of(Special("a_code", "It is so.")).raised()) is BudgetError


def test_an_unknown_kind_is_refused():
    foreign = Failed.of(ConfigError("a", "b")).model_copy(update={"error": "SystemExit"})
    with pytest.raises(ProtocolError, match="unknown class"):
        foreign.raised()


def test_a_refusal_names_the_sender_and_a_defect_is_no_refusal():
    error = refusal(b"{}", method="refuse")
    assert isinstance(error, SenderError)
    assert (error.code, error.message, error.remedy, error.member_id) == ("no", "not so", "Wait.", "worker-1")
    with pytest.raises(ZeroDivisionError):
        received(b"{}", method="fail")


# --- the four roles


def remote_methods() -> list[Any]:
    """Return every method by which a worker, aggregator, ledger or orchestrator of a run is called."""
    listed = [
        getattr(owner, name)
        for face, owner in ((LedgerFace, PrivacyLedger), (OrchestratorFace, RunOrchestrator))
        for name in dir(face)
        if not name.startswith("_") and inspect.isfunction(getattr(owner, name, None))
    ]
    protocols = [
        each for protocol in (Worker, Aggregator) for name, each in vars(protocol).items() if not name.startswith("_")
    ]
    return [*listed, *protocols, RunOrchestrator.open_run, RunOrchestrator.service_figures]


@pytest.mark.parametrize("method", remote_methods(), ids=lambda method: method.__qualname__)
def test_guarantee_every_remote_method_takes_and_gives_messages_and_arrays(method):
    """A type that has no canonical form has no schema, and the method could not be called at all."""
    wire = Wire.of(method)
    assert wire.answers
    assert f"raycloak/{method.__name__}/v1" == wire.arguments.DOMAIN


def test_every_method_of_a_face_is_listed():
    names = {method.__name__ for method in remote_methods()}
    for face in (WorkerActor, AggregatorActor, LedgerFace, OrchestratorFace):
        assert names >= {name for name, each in vars(face).items() if isinstance(each, Remote)}


def test_guarantee_nothing_but_bytes_and_arrays_enters_or_leaves_an_actor(tmp_path, monkeypatch):
    """Of a whole run, from the first facts to the last commit."""
    seen: dict[str, list[Any]] = {}
    genuine = {name: getattr(Wire, name) for name in ("write_call", "write_answer")}

    def write_call(self, args):
        frames = genuine["write_call"](self, args)
        seen.setdefault(self.arguments.__name__, []).extend(frames)
        return frames

    def write_answer(self, value, returns):
        frames = genuine["write_answer"](self, value, returns)
        seen.setdefault(self.arguments.__name__, []).extend(frames)
        return frames

    monkeypatch.setattr(Wire, "write_call", write_call)
    monkeypatch.setattr(Wire, "write_answer", write_answer)
    run = whole_run(tmp_path, measurements={"class_counts": {"classes": 4, "noise_multiplier": 20}})
    run.train()
    assert {"prepare", "present", "accept_keys", "step", "reduce", "measure", "charge", "bind_vectors"} <= seen.keys()
    assert {"begin", "admit", "open_step", "release", "record_data", "finish", "view"} <= seen.keys()
    assert [name for name, frames in seen.items() if not all(map(carried, frames))] == []
    assert all(json.loads(frames[0]) is not None for frames in seen.values()), "a call begins with its message"
