"""Measures what a training service costs per operation, whose drivers train nothing.

Three peers take turns on the same machine, at first with one caller, then with all: operations through the service,
from submission to their result in the client; direct calls of Ray actors; and the floor, a call of gRPC with two synced
commits behind it. The service runs in a process of its own, and so does the floor. This process is the clients.
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import grpc

from raycloak.attestation.processes.child import Child
from raycloak.coordinator.client.service_client import ServiceClient
from raycloak.coordinator.client.training_client import TrainingClient
from raycloak.metrics.errors import ConfigError
from raycloak_lab.bench import service_processes as processes
from raycloak_lab.bench.attest_processes import BenchServing, Figures, cpu_seconds, figures, soon
from raycloak_lab.bench.no_op_actors import NoOpActors
from raycloak_lab.bench.resident_memory import resident

MOST_CLIENTS: Final = 1024
_ROUNDS: Final = 5
_ALONE: Final = 60
"""Calls of one caller in a round; even, as an operation of each kind is a step."""
_EACH: Final = 12
"""Calls of each caller in a round in which all call."""
_IDLE_CLIENTS: Final = 100
_PENDING: Final = 10_000
_ORDERS: Final = 6
"""Orders of the three loops."""
_STEPS: Final = 300
"""Steps of a loop, for the pipeline; as many in each order."""
_DEADLINE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class ServiceBench:
    """The result of the measurement. Times are medians and 99th percentiles, in milliseconds.

    Attributes:
        clients: that call at a time, for the figures that are not of one alone.
        operations: through the service that were measured.
        operation_ms, actor_ms, floor_ms: of one caller alone: an operation, an actor's call, a call of the floor.
        overhead_ms: ``operation_ms`` less ``actor_ms``. over_floor_ms: less ``floor_ms``.
        service_cpu_ms, client_cpu_ms: processor time of the two processes for an operation of one caller alone.
        operations_per_second, actor_calls_per_second, floor_per_second: of all callers together.
        operation_p50_ms, operation_p99_ms: while all call; the same of actors and the floor.
        overhead_per_operation_ms: time that the machine needs for an operation more than for an actor's call, while all
            call: the inverse of the one rate less that of the other.
        idle_service_bytes, idle_client_bytes: resident memory of a client that has done a step and is idle.
        pending: futures that were pending at once. pending_submit_s: until the service had all of them on disk.
        pending_resolve_s: from there, until all had their results. pending_client_bytes: memory of one in its client.
        await_each_s: a loop that awaits each operation. pipeline_s: one that submits a step's two before it awaits the
            second. ahead_s: one that submits all steps before it awaits any.
        pipeline_speedup, ahead_speedup: ``await_each_s`` over the other two.
    """

    clients: int
    operations: int
    operation_ms: float
    operation_alone_p99_ms: float
    actor_ms: float
    actor_alone_p99_ms: float
    floor_ms: float
    overhead_ms: float
    over_floor_ms: float
    service_cpu_ms: float
    client_cpu_ms: float
    operations_per_second: float
    operation_p50_ms: float
    operation_p99_ms: float
    actor_calls_per_second: float
    actor_p50_ms: float
    actor_p99_ms: float
    floor_per_second: float
    floor_p50_ms: float
    floor_p99_ms: float
    overhead_per_operation_ms: float
    idle_service_bytes: float
    idle_client_bytes: float
    pending: int
    pending_submit_s: float
    pending_resolve_s: float
    pending_client_bytes: float
    await_each_s: float
    pipeline_s: float
    ahead_s: float
    pipeline_speedup: float
    ahead_speedup: float


Call = Callable[[int], None]
"""Makes one call for the caller of a number, and waits for its answer."""


@dataclass(slots=True)
class _MeasuredService:
    """The times of one peer's calls in seconds: of one caller, and of all with the wall time of each of their turns.

    Attributes:
        cpu: processor seconds of the service and of this process during the turns of one caller.
    """

    alone: list[float]
    together: list[float]
    walls: list[float]
    cpu: list[float]

    @property
    def per_second(self) -> float:
        return len(self.together) / sum(self.walls)


def bench_service(clients: int) -> ServiceBench:
    """Measure with ``clients`` callers.

    Raises:
        ConfigError: ``clients`` if there are too few or too many.
        RunFailedError: ``child_ended`` or ``child_overdue`` if a process of the bench does not answer.
    """
    if not 1 <= clients <= MOST_CLIENTS:
        raise ConfigError("clients", f"{clients} clients cannot be measured.", f"Give from 1 to {MOST_CLIENTS}.")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raycloak-bench-"))
        most = clients + _IDLE_CLIENTS + 8
        target = f"{processes.__name__}:"
        service = stack.enter_context(Child(f"{target}serve", folder, str(most), str(_PENDING + 8)))
        floor = stack.enter_context(Child(f"{target}floor", folder))
        # Before the threads of gRPC: Ray starts its processes from this one.
        actors = stack.enter_context(NoOpActors(clients, os.cpu_count() or 1))
        serving = service.receive(BenchServing, by=soon())
        channel = stack.enter_context(grpc.insecure_channel(floor.receive(BenchServing, by=soon()).address))
        connection = stack.enter_context(ServiceClient(serving.address, serving.credential))
        callers = [connection.create_training_client(processes.CONFIG) for _ in range(clients)]
        calls: dict[str, Call] = {
            "service": _operations(callers),
            "actor": actors.call,
            "floor": _echo(channel),
        }
        measured = _measure(calls, clients, lambda: (figures(service)["cpu"], cpu_seconds()))
        idle_service, idle_client = _idle_memory(service, serving)
        # Its process's memory is read alone, without what the measurement above has left.
        pending = _pending(service, connection)
        loops = _loops(connection)
    return _result(clients, measured, idle_service, idle_client, pending, loops)


def _operations(callers: Sequence[TrainingClient]) -> Call:
    """Return what makes a client's next operation: a step's first half, or its second."""
    halves = [False] * len(callers)

    def call(number: int) -> None:
        client = callers[number]
        second, halves[number] = halves[number], not halves[number]
        (client.optim_step() if second else client.forward_backward()).result(_DEADLINE_S)

    return call


def _echo(channel: grpc.Channel) -> Call:
    echo = channel.unary_unary(processes.ECHO)
    request = bytes(100)
    return lambda number: echo(request, timeout=_DEADLINE_S)


def _measure(
    calls: dict[str, Call], callers: int, cpu: Callable[[], tuple[float, float]]
) -> dict[str, _MeasuredService]:
    """Let the peers take turns; another one begins each round, and each has had a turn before the first.

    Args:
        cpu: returns the processor seconds of the service and of this process.
    """
    measured = {name: _MeasuredService([], [], [], [0.0, 0.0]) for name in calls}
    names = list(calls)
    for name in names:
        _together(calls[name], callers, 2)
    for number in range(_ROUNDS):
        order = names[number % len(names) :] + names[: number % len(names)]
        for name in order:
            before = cpu()
            measured[name].alone += _timed(calls[name], 0, _ALONE)
            spent = (now - then for now, then in zip(cpu(), before, strict=True))
            measured[name].cpu = [old + new for old, new in zip(measured[name].cpu, spent, strict=True)]
        for name in order:
            began = time.perf_counter()
            measured[name].together += _together(calls[name], callers, _EACH)
            measured[name].walls.append(time.perf_counter() - began)
    return measured


def _timed(call: Call, number: int, count: int) -> list[float]:
    """Return the seconds of each of ``count`` calls."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - began)
    return times


def _together(call: Call, callers: int, count: int) -> list[float]:
    """Return the seconds of each call of all callers, a thread for each."""
    found: list[list[float]] = [[] for _ in range(callers)]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            found[number] = _timed(call, number, count)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [each for times in found for each in times]


def _idle_memory(service: Child, serving: BenchServing) -> tuple[float, float]:
    """Return the bytes that an idle client takes in the service, and in a process of clients."""
    before = figures(service)["resident"]
    target = f"{processes.__name__}:idle_clients"
    with Child(target, serving.address, serving.credential, str(_IDLE_CLIENTS)) as idle:
        client_bytes = idle.receive(Figures, by=soon()).values["client"]
        return (figures(service)["resident"] - before) / (_IDLE_CLIENTS + 1), client_bytes


@dataclass(frozen=True, slots=True)
class _Pending:
    submit_s: float
    resolve_s: float
    client_bytes: float


def _pending(service: Child, connection: ServiceClient) -> _Pending:
    """Have `_PENDING` futures of one client wait at once, and then resolve all."""
    client = connection.create_training_client(processes.CONFIG)
    client.forward_backward()
    client.optim_step().result(_DEADLINE_S)
    figures(service, "hold")
    before, began = resident(), time.perf_counter()
    futures = [each for _ in range(_PENDING // 2) for each in (client.forward_backward(), client.optim_step())]
    # An operation has a name once the service has it on disk; they are sent in their order.
    while not futures[-1].operation_id and not futures[-1].done():
        time.sleep(0.01)
    submitted, client_bytes = time.perf_counter() - began, (resident() - before) / _PENDING
    figures(service, "go_on")
    began = time.perf_counter()
    for future in futures:
        future.result(_DEADLINE_S)
    return _Pending(submitted, time.perf_counter() - began, client_bytes)


def _loops(connection: ServiceClient) -> tuple[float, float, float]:
    """Return the seconds of `_STEPS` steps: each operation awaited, each step, and all at the end; in turns."""
    client = connection.create_training_client(processes.CONFIG)

    def await_each(steps: int) -> None:
        for _ in range(steps):
            client.forward_backward().result(_DEADLINE_S)
            client.optim_step().result(_DEADLINE_S)

    def pipeline(steps: int) -> None:
        for _ in range(steps):
            client.forward_backward()
            client.optim_step().result(_DEADLINE_S)

    def ahead(steps: int) -> None:
        submitted = [each for _ in range(steps) for each in (client.forward_backward(), client.optim_step())]
        submitted[-1].result(_DEADLINE_S)

    loops = (await_each, pipeline, ahead)
    seconds = [0.0] * len(loops)
    await_each(5)
    # In all their orders: what one loop leaves to be done, the next one pays for.
    for turns in permutations(range(len(loops))):
        for number in turns:
            began = time.perf_counter()
            loops[number](_STEPS // _ORDERS)
            seconds[number] += time.perf_counter() - began
    return seconds[0], seconds[1], seconds[2]


def _result(
    clients: int,
    measured: dict[str, _MeasuredService],
    idle_service: float,
    idle_client: float,
    pending: _Pending,
    loops: tuple[float, float, float],
) -> ServiceBench:
    service, actor, floor = (measured[name] for name in ("service", "actor", "floor"))
    await_each, pipeline, ahead = loops
    return ServiceBench(
        clients=clients,
        operations=len(service.alone) + len(service.together),
        operation_ms=_p50(service.alone),
        operation_alone_p99_ms=_p99(service.alone),
        actor_ms=_p50(actor.alone),
        actor_alone_p99_ms=_p99(actor.alone),
        floor_ms=_p50(floor.alone),
        overhead_ms=_p50(service.alone) - _p50(actor.alone),
        over_floor_ms=_p50(service.alone) - _p50(floor.alone),
        service_cpu_ms=1e3 * service.cpu[0] / len(service.alone),
        client_cpu_ms=1e3 * service.cpu[1] / len(service.alone),
        operations_per_second=service.per_second,
        operation_p50_ms=_p50(service.together),
        operation_p99_ms=_p99(service.together),
        actor_calls_per_second=actor.per_second,
        actor_p50_ms=_p50(actor.together),
        actor_p99_ms=_p99(actor.together),
        floor_per_second=floor.per_second,
        floor_p50_ms=_p50(floor.together),
        floor_p99_ms=_p99(floor.together),
        overhead_per_operation_ms=1e3 / service.per_second - 1e3 / actor.per_second,
        idle_service_bytes=idle_service,
        idle_client_bytes=idle_client,
        pending=_PENDING,
        pending_submit_s=pending.submit_s,
        pending_resolve_s=pending.resolve_s,
        pending_client_bytes=pending.client_bytes,
        await_each_s=await_each,
        pipeline_s=pipeline,
        ahead_s=ahead,
        pipeline_speedup=await_each / pipeline,
        ahead_speedup=await_each / ahead,
    )


def _p50(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _p99(seconds: Sequence[float]) -> float:
    return 1e3 * sorted(seconds)[min(len(seconds) - 1, len(seconds) * 99 // 100)]
