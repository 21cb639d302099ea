"""The loop over a real connection: order, repeated submissions, re-attachment, cancellation, streams."""

import asyncio
import gc
import itertools
import threading
import time
import tracemalloc
import weakref
from types import SimpleNamespace

import grpc
import pytest

import raycloak
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.changes import Changes
from raycloak.coordinator.client.futures import Resolver
from raycloak.metrics.service_errors import KINDS
from tests.coordinator.client.conftest import CONFIG
from tests.coordinator.client.memory_service import MemoryService

SOON = 120.0


@pytest.fixture
def held():
    """A service whose operations wait until the test finishes them."""
    with MemoryService(runs=False) as service:
        yield service


@pytest.fixture
def holding(held):
    """A training client of it."""
    with raycloak.ServiceClient(held.address, patience_s=120) as service:
        yield service.create_training_client(CONFIG)


def until(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


def test_the_loop_of_the_issue(service, training):
    for step in range(3):
        computed, released = training.forward_backward(), training.optim_step()
        assert released.result(SOON).step == step + 1
        assert released.result().dp_metrics.epsilon_spent == 0.5 * (step + 1)
        assert (computed.result(SOON).step, computed.result().loss) == (step, None)
    artifact = training.save_state(metadata={"epoch": 1}).result(SOON)
    assert service.pull_artifact(artifact.artifact_id) == bytes(range(256)) * 20
    assert training.load_state(artifact.artifact_id).result(SOON).step == 3
    sampled = training.sample(["Once upon"], max_tokens=4, temperature=0.7, top_p=0.9, top_k=50, stop=["\n"])
    assert [each.text for each in sampled.result(SOON).completions] == ["nopu ecnO"]
    assert (training.step, training.dp_metrics.steps_charged) == (3, 3)
    assert [each.artifact_id for each in training.artifacts()] == [artifact.artifact_id]


def test_a_submission_waits_for_no_earlier_result(held, holding):
    futures = [holding.forward_backward(), holding.optim_step(), holding.forward_backward()]
    assert not any(future.done() for future in futures)
    until(lambda: len(held.submitted) == 3)
    held.finish("c0")
    assert [future.result(SOON).step for future in futures] == [0, 1, 1]


def test_guarantee_an_operation_is_never_sent_before_an_earlier_one(memory_service, training):
    memory_service.failures["Submit"] = [grpc.StatusCode.UNAVAILABLE] * 3
    kinds = ["forward_backward", "optim_step", "save_state"] * 30
    futures = [getattr(training, kind)() for kind in kinds]
    for future in futures:
        future.result(SOON)
    assert [each.kind for each in memory_service.operations["c0"]] == kinds
    assert [each.idempotency_key for each in memory_service.operations["c0"]] == [
        each.idempotency_key for each in futures
    ]


def test_a_lost_reply_is_asked_for_again_with_the_same_key(memory_service, training):
    memory_service.lost_replies = 2
    assert training.forward_backward().result(SOON).step == 0
    until(lambda: len(memory_service.submitted) == 3)
    assert len(set(memory_service.submitted)) == len(memory_service.operations["c0"]) == 1


def test_a_lost_reply_makes_no_second_client(memory_service, service):
    memory_service.failures["CreateClient reply"] = [True]
    assert service.create_training_client(CONFIG).client_id == "c0"
    assert len(memory_service.clients) == 1


def test_those_behind_a_submission_without_an_answer_fail_as_well(memory_service):
    with raycloak.ServiceClient(memory_service.address, patience_s=0.3) as service:
        training = service.create_training_client(CONFIG)
        memory_service.failures["Submit"] = [grpc.StatusCode.UNAVAILABLE] * 1000
        memory_service.may_answer.clear()
        futures = [training.forward_backward(), training.optim_step()]
        memory_service.may_answer.set()
        errors = [future.exception(SOON) for future in futures]
        assert [error.code for error in errors] == ["unreachable", "not_sent"]
        assert {type(error) for error in errors} == {raycloak.ServiceConnectionError}
        # The client is usable once the service is.
        memory_service.failures["Submit"].clear()
        assert training.forward_backward().result(SOON).step == 0


def test_those_behind_a_submission_that_the_service_may_have_taken_fail_as_well(memory_service, training):
    """A store that failed may hold the operation or not, and after a restart those behind would arrive without it."""
    memory_service.failures["Submit"] = [grpc.StatusCode.UNAVAILABLE] * 3
    memory_service.failures["Submit"] += [raycloak.ServiceServerError("store_failed", "it cannot write.")]
    memory_service.may_answer.clear()
    futures = [training.forward_backward(), training.optim_step()]
    memory_service.may_answer.set()
    assert [future.exception(SOON).code for future in futures] == ["store_failed", "not_sent"]
    assert training.forward_backward().result(SOON).step == 0


def test_an_optim_step_that_is_being_sent_takes_those_behind_it_along(memory_service, training):
    assert training.forward_backward().result(SOON).step == 0
    memory_service.failures["Submit"] = [grpc.StatusCode.UNAVAILABLE] * 1000
    optim, second = training.optim_step(), training.forward_backward()
    until(lambda: len(memory_service.submitted) > 1)
    memory_service.runs = False
    assert optim.cancel()
    memory_service.failures["Submit"].clear()
    for future in (second, optim):
        assert type(future.exception(SOON)) is raycloak.FutureCancelledError


def test_an_optim_step_that_was_not_sent_is_cancelled_with_all_that_follow(memory_service, training):
    """As one that was sent: the next optim_step would else release what this one was to release."""
    memory_service.failures["Submit"] = [grpc.StatusCode.UNAVAILABLE] * 1000
    first, optim, second, last = (getattr(training, kind)() for kind in ("forward_backward", "optim_step") * 2)
    until(lambda: memory_service.submitted)
    assert optim.cancel()
    for future in (optim, second, last):
        with pytest.raises(raycloak.FutureCancelledError, match="before it was sent"):
            future.result(SOON)
    memory_service.failures["Submit"].clear()
    assert first.result(SOON).step == 0
    assert [each.kind for each in memory_service.operations["c0"]] == ["forward_backward"]


def test_futures_survive_a_restart_of_the_service(held, holding):
    futures = [holding.forward_backward(), holding.optim_step()]
    until(lambda: len(held.operations["c0"]) == 2)
    address = held.address
    held.stop()
    held.finish("c0")
    held.start(address)
    assert futures[1].result(SOON).step == 1
    assert futures[0].result(SOON).step == 0


@pytest.mark.parametrize("kind", ["rate_limited", "queue_full", "server"])
def test_futures_survive_a_refusal_that_passes(held, holding, kind):
    held.failures["Watch"] = [grpc.StatusCode.UNAVAILABLE]
    held.failures["GetClient"] = [KINDS[kind]("a_code", "a sentence.")]
    future = holding.forward_backward()
    until(lambda: future.operation_id and not held.failures["GetClient"])
    held.finish("c0")
    assert future.result(SOON).step == 0


def test_a_change_that_cannot_be_read_ends_the_futures(held, holding, monkeypatch, caplog):
    future = holding.forward_backward()
    until(lambda: future.operation_id)
    monkeypatch.setattr("raycloak.coordinator.client.training_client.result_of", lambda operation: 1 / 0)
    held.finish("c0")
    error = future.exception(SOON)
    assert (type(error), error.code) == (raycloak.FutureFailedError, "not_followed")


def test_a_rewind_while_a_stream_is_opened_is_not_lost():
    asked = []

    class Connection:
        patience_s = SOON

        def stream(self, method, request, opened):
            asked.append(request.since)
            if len(asked) == 1:
                changes.rewind(3)
            else:
                changes.end()
            cancelled = threading.Event()
            opened(SimpleNamespace(cancel=cancelled.set))
            assert cancelled.wait(SOON)
            yield from ()

        def pause(self, seconds):
            return False

        def call(self, method, request):
            return wire.Client()

    changes = Changes(
        Connection(), Resolver(None), wire.Client(client_id="c0", revision=7), lambda change: None, lambda: None, print
    )
    changes.start()
    until(lambda: len(asked) > 1)
    assert asked == [7, 3]


@pytest.mark.parametrize("breaks", ["stream", "call"])
def test_a_stream_that_breaks_after_hours_is_opened_again(monkeypatch, breaks):
    """It ends each hour by its deadline, and whenever the service is started again."""
    asked, lost, now = [], [], [0.0]
    monkeypatch.setattr("raycloak.coordinator.client.changes.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Connection:
        patience_s = 60.0

        def stream(self, method, request, opened):
            asked.append(request.since)
            now[0] += 3600.0
            if len(asked) == 3:
                changes.end()
            if breaks == "stream":
                raise raycloak.ServiceConnectionError("unreachable", "the stream broke.")
            yield from ()

        def pause(self, seconds):
            return False

        def call(self, method, request):
            if breaks == "call":
                raise raycloak.ServiceServerError("store_failed", "the service is being started again.")
            return wire.Client()

    changes = Changes(
        Connection(),
        Resolver(None),
        wire.Client(client_id="c0", revision=7),
        lambda change: None,
        lambda: None,
        lost.append,
    )
    changes.start()
    until(lambda: len(asked) == 3 or lost)
    assert lost == []


@pytest.mark.parametrize("replaced", [True, False])
def test_a_stream_that_ends_with_its_token_goes_on_with_the_one_that_took_its_place(replaced):
    asked, lost = [], []
    expired = raycloak.ServiceAuthenticationError("expired", "the credentials have expired.")

    class Connection:
        patience_s = SOON

        def stream(self, method, request, opened):
            asked.append(request.since)
            if len(asked) == 1:
                yield wire.Change(operation=wire.Operation(revision=9))
                raise expired
            changes.end()

        def pause(self, seconds):
            return False

        def call(self, method, request):
            if not replaced:
                raise expired
            return wire.Client()

    changes = Changes(
        Connection(),
        Resolver(None),
        wire.Client(client_id="c0", revision=7),
        lambda change: None,
        lambda: None,
        lost.append,
    )
    changes.start()
    until(lambda: len(asked) == 2 or lost)
    assert (asked, lost) == (([7, 9], []) if replaced else ([7], [expired]))


def test_pending_futures_fail_when_the_service_stays_away():
    with MemoryService(runs=False) as held, raycloak.ServiceClient(held.address, patience_s=0.5) as service:
        future = service.create_training_client(CONFIG).forward_backward()
        until(lambda: future.operation_id)
        held.stop()
        assert future.exception(SOON).code == "unreachable"


@pytest.mark.parametrize("sends", [False, True])
def test_what_has_failed_before_it_could_be_sent_is_not_sent(memory_service, training, monkeypatch, sends):
    """The stream of changes is lost between the making of a future and its submission."""
    start = training._changes.start

    def lose():
        monkeypatch.setattr(training._changes, "start", start)
        training._lost(raycloak.ServiceAuthenticationError("expired", "the credentials have expired."))

    monkeypatch.setattr(training._changes, "start", lose)
    lost = training.forward_backward()
    assert lost.exception(SOON).code == "expired"
    if sends:
        training.forward_backward().result(SOON)
    training.detach()
    taken = [each.idempotency_key for each in memory_service.operations[training.client_id]]
    assert lost.idempotency_key not in taken
    assert len(taken) == sends


def test_a_caller_attaches_again_and_finds_its_futures(held, holding):
    holding.forward_backward()
    holding.optim_step()
    until(lambda: len(held.operations["c0"]) == 2)
    held.finish("c0", 0)
    holding.detach()
    with raycloak.ServiceClient(held.address) as service:
        assert [each.client_id for each in service.list_clients()] == ["c0"]
        again = service.get_client("c0")
        futures = again.futures()
        assert list(futures) == ["c0-0", "c0-1"]
        assert futures["c0-0"].result(0).step == 0
        assert not futures["c0-1"].done()
        held.finish("c0")
        assert futures["c0-1"].result(SOON).step == 1
        assert again.future("c0-1").result(SOON).step == 1
        assert again.config == raycloak.TrainingConfig(**CONFIG)
        with pytest.raises(raycloak.ServiceNotFoundError) as caught:
            again.future("c0-7")
        assert caught.value.resource == "future"


def test_a_list_of_futures_is_whole_though_the_stream_ends_early(memory_service, service, training):
    """As where the service ends and is started again."""
    for _ in range(3):
        training.save_state().result(SOON)
    with raycloak.ServiceClient(memory_service.address, patience_s=120) as other:
        attached = other.get_client("c0")
        stream, ends = attached._connection.stream, [0, 1]

        def broken(method, request, opened=None):
            whole = stream(method, request, opened)
            return itertools.islice(whole, ends.pop(0)) if ends else whole

        attached._connection.stream = broken
        assert [each.kind for each in attached.futures().values()] == ["save_state"] * 3
        assert not ends


def test_what_a_detached_client_did_not_send_says_so(memory_service, monkeypatch):
    monkeypatch.setattr("raycloak.coordinator.client.training_client._ENDS_S", 0.1)
    with raycloak.ServiceClient(memory_service.address, patience_s=120) as service:
        training = service.create_training_client(CONFIG)
        memory_service.failures["Submit"] = [grpc.StatusCode.UNAVAILABLE] * 1000
        futures = [training.forward_backward(), training.optim_step()]
        until(lambda: memory_service.submitted)
        training.detach()
        assert [future.exception(SOON).code for future in futures] == ["detached", "not_sent"]


def test_a_future_that_is_attached_to_late_still_ends(held, holding):
    """The stream passed the end of the operation between the look at the list and the future's birth."""
    holding.forward_backward().add_done_callback(lambda _: None)
    until(lambda: held.operations["c0"])
    stale = wire.Operation()
    stale.CopyFrom(held.operations["c0"][0])
    held.finish("c0")
    until(lambda: not holding._resolver.pending())
    future = holding._attach(stale)
    assert future.result(SOON).step == 0


def test_a_detached_client_says_so(held, holding):
    future = holding.forward_backward()
    holding.detach()
    assert future.exception(SOON).code == "detached"
    assert len(held.operations["c0"]) == 1
    with pytest.raises(raycloak.ServiceStateError, match="closed"):
        holding.optim_step()


def test_closing_cancels_what_waits_and_tells_it(held, holding):
    with holding as training:
        futures = [training.forward_backward(), training.optim_step()]
        until(lambda: len(held.operations["c0"]) == 2)
    assert [future.cancelled() for future in futures] == [True, True]
    assert training.status is raycloak.ClientStatus.TERMINATED


def test_nothing_is_kept_of_a_sample_that_was_refused_and_of_a_client_that_was_closed(memory_service, service):
    client = service.create_training_client(CONFIG)
    memory_service.failures["Submit"] = [KINDS["validation"]("a_code", "a sentence.")]
    assert client.sample(["a"], on_token=print).exception(SOON).code == "a_code"
    assert client._tokens._streams == {}
    client.close()
    client = weakref.ref(client)
    until(lambda: gc.collect() >= 0 and client() is None)


def test_cancel_one_that_the_service_has(held, holding):
    future, later = holding.forward_backward(), holding.forward_backward()
    until(lambda: later.operation_id)
    assert future.cancel()
    with pytest.raises(raycloak.FutureCancelledError, match="stays charged"):
        future.result(SOON)
    assert future.cancelled()
    assert not future.cancel()
    held.finish("c0")
    assert not later.cancelled()
    assert later.result(SOON).step == 0
    assert not later.cancel()


def test_cancel_one_that_was_not_sent(memory_service, training):
    memory_service.failures["Submit"] = [grpc.StatusCode.UNAVAILABLE] * 1000
    sending, waiting = training.forward_backward(), training.optim_step()
    until(lambda: memory_service.submitted)
    assert waiting.cancel()
    with pytest.raises(raycloak.FutureCancelledError, match="before it was sent"):
        waiting.result(SOON)
    # One that is on its way is cancelled as soon as it has arrived.
    memory_service.runs = False
    assert sending.cancel()
    memory_service.failures["Submit"].clear()
    with pytest.raises(raycloak.FutureCancelledError, match="stays charged"):
        sending.result(SOON)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"timeout"}))
def test_every_error_of_an_operation_is_raised_with_what_it_carries(memory_service, training, kind):
    details = {
        "field": "batch",
        "resource": "artifact",
        "retry_after_s": 2.5,
        "current_epsilon": 1.0,
        "max_epsilon": 3.0,
    }
    sent = KINDS[kind]("a_code", "a sentence.", "a remedy.", "r1", **details)
    memory_service.outcomes["optim_step"] = sent
    future = training.optim_step()
    with pytest.raises(KINDS[kind]) as caught:
        future.result(SOON)
    error = caught.value
    assert (error.code, error.message, error.remedy, error.request_id) == ("a_code", "a sentence.", "a remedy.", "r1")
    assert {name: getattr(error, name) for name in error.fields} == {name: details[name] for name in error.fields}
    # The client is still usable.
    assert training.forward_backward().result(SOON).step == 0


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"timeout", "connection"}))
def test_every_refusal_of_a_submission_reaches_its_future(memory_service, training, kind):
    # A refusal that would pass sooner is waited for.
    memory_service.failures["Submit"] = [KINDS[kind]("a_code", "a sentence.", retry_after_s=3600.0)]
    error = training.forward_backward().exception(SOON)
    assert (type(error), error.code) == (KINDS[kind], "a_code")
    assert error.request_id in {each["raycloak-request-id"] for _, each in memory_service.calls}


def test_a_submission_that_came_too_early_is_sent_again_before_those_behind_it(memory_service, training):
    memory_service.failures["Submit"] = [KINDS["rate_limited"]("a_code", "a sentence.", retry_after_s=0.05)] * 3
    futures = [training.forward_backward(), training.optim_step()]
    assert [future.result(SOON).step for future in futures] == [0, 1]
    keys = [future.idempotency_key for future in futures]
    assert memory_service.submitted == [*[keys[0]] * 4, keys[1]]


def test_a_field_that_cannot_be_sent_is_named(training):
    for fields in (
        {"max_tokens": -1},
        {"temperature": "warm"},
        {"seed": -1},
        {"stop": [3]},
        {"num_completions": 2**40},
    ):
        with pytest.raises(raycloak.ServiceValidationError) as caught:
            training.sample(["a"], **fields)
        assert [caught.value.field] == list(fields)
    with pytest.raises(raycloak.ServiceValidationError) as caught:
        training.sample("a text")
    assert caught.value.field == "prompts"
    for metadata in (
        {"epoch": None},
        {"epoch": "\ud800"},
        {"": "x"},
        {"x": "y" * 513},
        {str(number): "" for number in range(33)},
    ):
        with pytest.raises(raycloak.ServiceValidationError) as caught:
            training.save_state(metadata)
        assert caught.value.field == "metadata"


def test_progress_and_tokens_reach_their_callbacks(held, holding):
    seen, written = [], []
    holding.add_progress_callback(seen.append)
    holding.add_progress_callback(lambda _: 1 / 0)
    future = holding.sample(["cba", "fed"], on_token=lambda number, text: written.append((number, text)))
    until(lambda: future.operation_id and any(method == "Watch" for method, _ in held.calls))
    until(lambda: told(held, seen))
    for number, text in ((0, "a"), (1, "d"), (0, "b")):
        held.tell(wire.Change(tokens=wire.Tokens(operation_id="c0-0", completion=number, text=text)))
    until(lambda: len(written) == 3)
    held.finish("c0")
    assert [each.text for each in future.result(SOON).completions] == ["abc", "def"]
    assert written == [(0, "a"), (1, "d"), (0, "b"), (0, "c"), (1, "ef")]
    assert seen[0] == raycloak.Progress("c0-0", 3, 0.5, None, "computing")


def test_who_waits_for_the_first_result_reads_the_phases_of_the_start(held, holding, capsys):
    read = []

    def said(words, phase):
        held.tell(wire.Change(progress=wire.Progress(phase=phase)))
        read.append(capsys.readouterr().err)
        return f"run: {words}\n" in "".join(read)

    future = holding.forward_backward()
    until(lambda: future.operation_id)
    until(lambda: said("connecting to Ray", "connecting to Ray"))
    said("", "computed")
    until(lambda: said("opening \N{REPLACEMENT CHARACTER}[2Jdata", "opening \x1b[2Jdata"))
    # Each phase once, and none of a step.
    assert len("".join(read).splitlines()) == 2
    held.finish("c0")
    future.result(SOON)


def told(held, seen):
    held.tell(wire.Change(progress=wire.Progress(operation_id="c0-0", step=3, epsilon=0.5, phase="computing")))
    return seen


def test_pieces_after_a_broken_connection_wait_for_the_end(held, holding):
    seen, written = [], []
    holding.add_progress_callback(seen.append)
    future = holding.sample(["cba"], on_token=lambda number, text: written.append(text))
    until(lambda: future.operation_id)
    address = held.address
    held.stop()
    held.start(address)
    # By the stream that was opened after the break.
    until(lambda: told(held, seen))
    held.tell(wire.Change(tokens=wire.Tokens(operation_id="c0-0", completion=0, text="b")))
    # What comes behind the piece: the end of the operation would overtake it.
    held.tell(wire.Change(progress=wire.Progress(operation_id="c0-0", step=4, epsilon=0.5, phase="computing")))
    until(lambda: seen[-1].step == 4)
    assert written == []
    held.finish("c0")
    future.result(SOON)
    assert written == ["abc"]


def test_the_properties_follow_the_service(memory_service, training):
    assert (training.status, training.step, training.dp_metrics, training.error) == ("READY", 0, None, None)
    training.forward_backward()
    training.optim_step().result(SOON)
    assert training.step == 1
    client = memory_service.clients["c0"]
    with memory_service.changed:
        client.status = "ERROR"
        client.error.kind, client.error.code, client.error.message = "failed", "unreachable", "a worker is gone."
        client.revision += 1
    assert training.refresh().status is raycloak.ClientStatus.ERROR
    assert (type(training.error), training.error.code) == (raycloak.FutureFailedError, "unreachable")
    assert training.summary.client_id == training.client_id == "c0"


def test_many_tasks_and_threads_wait_for_one_future(held, holding):
    future = holding.forward_backward()
    results = []
    threads = [threading.Thread(target=lambda: results.append(future.result(SOON))) for _ in range(4)]

    async def wait():
        waits = [asyncio.ensure_future(_awaited(future)) for _ in range(4)]
        left = asyncio.ensure_future(_awaited(future))
        await asyncio.sleep(0)
        left.cancel()
        held.finish("c0")
        results.extend(await asyncio.gather(*waits))
        with pytest.raises(asyncio.CancelledError):
            await left

    until(lambda: held.operations["c0"])
    for thread in threads:
        thread.start()
    asyncio.run(wait())
    for thread in threads:
        thread.join(SOON)
    assert [each.step for each in results] == [0] * 8
    assert not future.cancelled()


async def _awaited(future):
    return await future


def test_an_awaited_error_is_raised(memory_service, training):
    memory_service.outcomes["forward_backward"] = raycloak.BudgetExceededError(
        "cap_exceeded", "no room.", current_epsilon=2.0, max_epsilon=3.0
    )

    async def loop():
        await training.forward_backward()

    with pytest.raises(raycloak.BudgetExceededError) as caught:
        asyncio.run(loop())
    assert (caught.value.current_epsilon, caught.value.max_epsilon) == (2.0, 3.0)


def test_ten_thousand_pending_futures_are_cheap_and_need_two_threads(held, holding):
    # Threads of services that ended before may end any time.
    threads = threading.active_count()
    holding.forward_backward()
    until(lambda: held.submitted)
    gc.collect()
    tracemalloc.start()
    # Held back here, so that the memory of the service, which is in this process too, is not measured.
    held.failures["Submit"] = [grpc.StatusCode.UNAVAILABLE] * 100_000
    futures = [holding.forward_backward() for _ in range(10_000)]
    per_future = tracemalloc.get_traced_memory()[0] / len(futures)
    tracemalloc.stop()
    assert per_future < 1500
    mine = {thread.name for thread in threading.enumerate() if thread.name.startswith("raycloak-")}
    assert mine == {"raycloak-submissions", "raycloak-changes"}
    assert threading.active_count() <= threads + 40
    ended = []
    for future in futures:
        future.add_done_callback(ended.append)
    holding._lost(raycloak.FutureFailedError("over", "over."))
    assert len(ended) == len(futures)
    held.failures["Submit"].clear()
