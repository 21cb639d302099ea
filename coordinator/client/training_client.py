"""TrainingClient: the loop of one training run, in the hands of the caller.

Every operation returns a `ServiceFuture` at once. Operations are done in the order in which they were submitted.
"""

import copy
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, Self
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.changes import Changes, OnToken, TokenStreams, revision_of
from raycloak.coordinator.client.connection import Connection, error_from_wire, growing_pauses, is_no_answer
from raycloak.coordinator.client.futures import Resolver, ServiceFuture, call_safely
from raycloak.coordinator.client.results import (
    Artifact,
    ClientSummary,
    DpMetrics,
    ForwardBackwardResult,
    LoadStateResult,
    OptimStepResult,
    Progress,
    SampleResult,
    from_wire,
    result_of,
)
from raycloak.coordinator.client.sent_batches import DataKeys, SentRun, SentSteps, pieces
from raycloak.coordinator.client.submissions import MakeCall, Submissions
from raycloak.coordinator.client.training_config import Metadata, TrainingConfig, parse_training_config
from raycloak.coordinator.config.sections import DatasetConfig
from raycloak.coordinator.console.output import harmless
from raycloak.metrics.service_errors import (
    FutureCancelledError,
    FutureFailedError,
    ServiceConnectionError,
    ServiceError,
    ServiceStateError,
    ServiceValidationError,
)

_ENDS_S: Final = 10.0
"""For operations that are being sent, or whose cancellation is being told, when a client is closed."""
_LOOKS_S: Final = 10.0
"""Between two looks at a run that is not admitted yet; the stream of changes tells it sooner."""
_OF_STEPS: Final = ("computed", "released", "cancelled", "sampling")
"""The phases that every step has; any other is of the start of a run."""
_METADATA: Final = TypeAdapter(Metadata)

OnProgress = Callable[[Progress], object]


class ClientStatus(StrEnum):
    """The state of a training client: its run is being started, waits for operations, works, or has ended."""

    INITIALIZING = "INITIALIZING"
    READY = "READY"
    BUSY = "BUSY"
    ERROR = "ERROR"
    TERMINATED = "TERMINATED"


class TrainingClient:
    """One training run on a service. `ServiceClient.create_training_client` and ``get_client`` make one.

    As a context manager it ends the run (`close`). A run whose client is only dropped waits on the service for a caller
    who attaches again.

    All methods may be called from any thread. Properties are what the service said last; `refresh` asks it.
    """

    def __init__(self, connection: Connection, client: wire.Client, data_keys: DataKeys | None = None) -> None:
        self._connection = connection
        self._client = client
        self._lock = threading.Condition()  # of the newest client, metrics and step
        self._data_keys = data_keys
        self._sent_run: SentRun | None = None
        self._sent_steps = SentSteps()
        self._dp_metrics: DpMetrics | None = None
        self._step = 0
        self._on_progress: list[OnProgress] = []
        self._said = ""
        self._tokens = TokenStreams()
        self._resolver = Resolver(self.cancel)
        self._submissions = Submissions(connection, self._resolver, self._absorb, self.cancel)
        told = self._receive, self._tokens.interrupted, self._lost
        self._changes = Changes(connection, self._resolver, client, *told)
        self._learn(client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TrainingClient {self.client_id} {self.status} step {self.step}>"

    @property
    def client_id(self) -> str:
        """The name under which `ServiceClient.get_client` finds the run again."""
        return self._client.client_id

    @property
    def status(self) -> ClientStatus:
        """The state of the run."""
        return ClientStatus(self._client.status)

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self._step

    @property
    def dp_metrics(self) -> DpMetrics | None:
        """The account and the plan; None until the run is admitted."""
        return self._dp_metrics

    @property
    def error(self) -> ServiceError | None:
        """The reason of the state ``ERROR``, else None."""
        return error_from_wire(self._client.error) if self._client.HasField("error") else None

    @property
    def summary(self) -> ClientSummary:
        """The client's other facts, such as its run, its evidence class and its account."""
        summary: ClientSummary = from_wire(self._client)
        return summary

    @property
    def config(self) -> TrainingConfig:
        """The configuration that the run was created with."""
        return parse_training_config(self._client.config_json)

    def refresh(self) -> Self:
        """Ask the service for the newest state, and return this client."""
        self._newest()
        return self

    def forward_backward(self, batch: Any = None) -> ServiceFuture[ForwardBackwardResult]:
        """Charge and compute a step, whose update stays masked until `optim_step`.

        On registered data the service draws the step's Poisson sample, so there is exactly one call for each
        `optim_step`. With a batch, several calls before one `optim_step` accumulate; see docs/sending.md.

        Args:
            batch: the examples to send, with ``example_ids``; see `DataKeys`. They are encrypted in this process, and
                only workers that the owner's key service accepts can open them. None on registered data.

        The future raises ServiceStateError for a second call on registered data, and BudgetExceededError if the account
        has no room.
        """
        if batch is None:
            return self._submit("forward_backward", forward_backward=wire.ForwardBackward())
        keys, dataset = self._data_keys, self.config.dataset
        if not isinstance(dataset, DatasetConfig):
            raise ServiceValidationError("batch", "the service has this dataset; give no batch.", field="batch")
        if keys is None:
            message = "without keys nothing can be encrypted."
            remedy = "Give data_keys to create_training_client or get_client."
            raise ServiceValidationError("no_data_keys", message, remedy, field="batch")
        # As it is now: the caller may fill the same arrays again before they are sent.
        key, rows = uuid4().hex, copy.deepcopy(batch)
        return self._put("forward_backward", key, lambda: self._sealed(keys, dataset, key, rows), is_batch=True)

    def optim_step(self, apply_dp_noise: bool = True) -> ServiceFuture[OptimStepResult]:
        """Reduce and release the step that was computed.

        On data that the client sends, the future raises FutureFailedError if a batch of the step was not taken and the
        caller had not seen that; nothing was charged.

        Args:
            apply_dp_noise: False is refused on private data, by a ServiceValidationError of the future.
        """
        with _fields("apply_dp_noise"):
            request = wire.OptimStep(apply_dp_noise=apply_dp_noise)
        return self._submit("optim_step", optim_step=request)

    def save_state(self, metadata: Mapping[str, str | int | float] | None = None) -> ServiceFuture[Artifact]:
        """Seal the released model as a package that the service keeps.

        Args:
            metadata: notes for yourself; at most 32 entries, of 64 characters for 512. Numbers are kept as text.
        """
        try:
            given = dict(metadata) if isinstance(metadata, Mapping) else metadata
            notes = _METADATA.validate_python({} if given is None else given, strict=True)
        except ValidationError as error:
            raise ServiceValidationError("metadata", f"{error.errors()[0]['msg']}.", field="metadata") from None
        return self._submit("save_state", save_state=wire.SaveState(metadata=notes))

    def load_state(self, artifact_id: str) -> ServiceFuture[LoadStateResult]:
        """Go on from a package of this run. What was spent stays spent."""
        with _fields("artifact_id"):
            request = wire.LoadState(artifact_id=artifact_id)
        return self._submit("load_state", load_state=request)

    def sample(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int = 0,
        num_completions: int = 1,
        on_token: OnToken | None = None,
    ) -> ServiceFuture[SampleResult]:
        """Have the newest released model write. It reads no private data, so it costs nothing.

        Args:
            max_tokens: most tokens of a completion.
            temperature: 0 takes the likeliest token each time.
            top_p: share of the probability that tokens are drawn from.
            top_k: how many of the likeliest tokens are drawn from; 0 for all.
            stop: texts that end a completion, and are not part of it.
            seed: the same seed, model and request give the same text.
            num_completions: completions of each prompt.
            on_token: is called with (number of the completion, piece of text) as the text is written. It runs in the
                thread that serves this client's futures, so it must not wait for one.
        """
        if isinstance(prompts, str):
            raise ServiceValidationError(
                "request", "prompts is a list of texts; put the text in a list.", field="prompts"
            )
        request = wire.Sample()
        for name, texts in {"prompts": prompts, "stop": stop}.items():
            with _fields(name):
                getattr(request, name).extend(texts)
        numbers = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        for name, number in {**numbers, "num_completions": num_completions}.items():
            with _fields(name):
                setattr(request, name.removeprefix("num_"), number)
        return self._submit("sample", on_token=on_token, sample=request)

    def add_progress_callback(self, callback: OnProgress) -> None:
        """Call ``callback`` with every `Progress` from now on, in the thread that serves this client's futures.

        Without any, standard error gets a line for each phase in which the service starts the run.
        """
        with self._lock:
            self._on_progress = [*self._on_progress, callback]
        self._changes.start()

    def futures(self) -> dict[str, ServiceFuture[Any]]:
        """Return a future for every operation that the service took, by operation id and in their order.

        So a caller whose process has died finds the results of what it had submitted, and waits for the rest.
        """
        return {each.operation_id: self._attach(each) for each in self._operations()}

    def future(self, operation_id: str) -> ServiceFuture[Any]:
        """Return the future of one operation; ServiceNotFoundError if the client has none of that id."""
        request = wire.OperationRequest(client_id=self.client_id, operation_id=operation_id)
        return self._attach(self._connection.call("GetOperation", request))

    def artifacts(self) -> list[Artifact]:
        """List what was saved, oldest first; of more than a thousand artifacts the newest."""
        reply = self._connection.call("ListArtifacts", wire.ClientRequest(client_id=self.client_id))
        return [from_wire(each) for each in reply.artifacts]

    def cancel(self, future: ServiceFuture[Any]) -> bool:
        """Cancel an operation; see `ServiceFuture.cancel`."""
        match self._submissions.withdraw(future):
            case "withdrawn" | "sending":
                return True
        if not future.operation_id:  # refused, and about to say so
            return False
        request = wire.OperationRequest(client_id=self.client_id, operation_id=future.operation_id)
        operation = self._connection.call("CancelOperation", request)
        self._absorb(operation)
        return operation.state not in ("done", "failed")

    def close(self) -> None:
        """End the run: what waits is cancelled, what was charged stays charged, and its artifacts stay."""
        self._submissions.end(send=False)
        if not self._connection.is_closed:
            self._learn(self._connection.call("CloseClient", wire.ClientRequest(client_id=self.client_id)))
            # What was on its way is refused by now, or was taken and cancelled.
            self._submissions.join(_ENDS_S)
            self._resolver.wait_until_none(_ENDS_S)
        self._leave("the client was closed before its outcome was told")

    def detach(self) -> None:
        """Send what was submitted, and follow the run no longer; it goes on, and ``get_client`` finds it again."""
        self._submissions.end(send=True)
        self._submissions.join(_ENDS_S)
        self._submissions.fail_waiting(
            ServiceConnectionError("not_sent", "the client was detached before the operation could be sent.")
        )
        self._leave("this process has detached from the client; the operation goes on")

    def _leave(self, why: str) -> None:
        self._changes.end()
        remedy = "Attach again with ServiceClient.get_client."
        self._resolver.fail_all(ServiceConnectionError("detached", f"{why}.", remedy))

    def _submit(self, kind: str, on_token: OnToken | None = None, **operation: Any) -> ServiceFuture[Any]:
        key = uuid4().hex
        request = wire.SubmitRequest(client_id=self.client_id, idempotency_key=key, **operation)
        return self._put(kind, key, lambda: ("Submit", request), on_token)

    def _put(
        self, kind: str, key: str, call: MakeCall, on_token: OnToken | None = None, is_batch: bool = False
    ) -> ServiceFuture[Any]:
        future = self._resolver.make(kind, key)
        if on_token is not None:
            self._tokens.expect(key, on_token)
            # Also where the service never took it, and no change will tell of its end.
            future.add_done_callback(lambda _: self._tokens.end(key, []))
        self._changes.start()
        self._submissions.put(future, call, is_batch=is_batch)
        return future

    def _operations(self) -> Iterable[wire.Operation]:
        """Return all operations that the service took before this call, in their order."""
        count, since = self._newest().operations, 0
        found: dict[int, wire.Operation] = {}
        until, pauses = time.monotonic() + self._connection.patience_s, growing_pauses()
        while len(found) < count:
            calls: list[Any] = []
            request = wire.WatchRequest(client_id=self.client_id, since=since)
            try:
                for change in self._connection.stream("Watch", request, calls.append):
                    since = max(since, revision_of(change))
                    until = time.monotonic() + self._connection.patience_s
                    if change.HasField("operation") and change.operation.number < count:
                        found[change.operation.number] = change.operation
                        if len(found) == count:
                            break
            except ServiceError as error:
                if not is_no_answer(error) or time.monotonic() > until:
                    raise
            for call in calls:
                call.cancel()
            # A service that ends closes its streams early, and the next one goes on from there.
            if len(found) < count and self._connection.pause(next(pauses)):
                raise ServiceConnectionError("closed", "this client of the service is closed.", "Make a new one.")
        return [found[number] for number in sorted(found)]

    def _sealed(self, keys: DataKeys, dataset: DatasetConfig, key: str, batch: Any) -> tuple[str, Any]:
        """Return the call that sends a batch, encrypted for the step that comes next. For the thread that sends."""
        if self._sent_run is None:
            run = keys.accept(self._admitted().manifest_json, dataset)
            # Steps that a caller before this one has submitted.
            for operation in self._operations():
                self._sent_steps.learn(operation)
            self._sent_run = run
        step, number, first = self._sent_steps.next()
        sealed = self._sent_run.seal_batch(batch, client_id=self.client_id, step=step, number=number, first=first)
        return "SendBatch", lambda: pieces(self.client_id, key, sealed)

    def _admitted(self) -> wire.Client:
        """Wait until the run's manifest is there, and return the client."""
        while True:
            with self._lock:
                if not self._client.manifest_json and self._client.status == ClientStatus.INITIALIZING:
                    self._lock.wait(_LOOKS_S)
            client = self._client if self._client.manifest_json else self._newest()
            if client.manifest_json:
                return client
            if client.status != ClientStatus.INITIALIZING:
                raise self.error or ServiceStateError("not_admitted", f"the client is {client.status}.")

    def _attach(self, operation: wire.Operation) -> ServiceFuture[Any]:
        future = self._resolver.make(operation.kind, operation.idempotency_key)
        self._absorb(operation)
        if not future.done():
            # The stream may have passed the end of the operation before this future was there.
            self._changes.rewind(operation.revision - 1)
            self._changes.start()
        return future

    def _receive(self, change: wire.Change) -> None:
        match change.WhichOneof("what"):
            case "operation":
                self._absorb(change.operation)
            case "client":
                self._learn(change.client)
                self._say(change.client.phase)
            case "tokens":
                self._tokens.piece(change.tokens)
            case "progress":
                self._say(change.progress.phase)
                for callback in self._on_progress:
                    call_safely(callback, from_wire(change.progress))

    def _say(self, phase: str) -> None:
        """Show a person who waits for the first result that the service is at work: it starts for half a minute."""
        if phase and phase not in (*_OF_STEPS, self._said) and not self._on_progress:
            self._said = phase
            # What another machine says must not command a terminal.
            sys.stderr.write(f"{self._client.name}: {harmless(phase)}\n")

    def _absorb(self, operation: wire.Operation) -> None:
        """Take in what is known of an operation, from the reply to a call or from the stream."""
        key = operation.idempotency_key
        future = self._resolver.find(key)
        if future is not None:
            future.operation_id = operation.operation_id
        self._tokens.named(key, operation.operation_id)
        self._sent_steps.learn(operation)
        if operation.state == "done":
            result = result_of(operation)
            if isinstance(result, ForwardBackwardResult | OptimStepResult):
                self._measure(result.dp_metrics)
            if isinstance(result, OptimStepResult):
                with self._lock:
                    self._step = max(self._step, result.step)
            if isinstance(result, SampleResult):
                self._tokens.end(key, [each.text for each in result.completions])
            self._resolver.end(key, result)
        elif operation.state in ("failed", "cancelled"):
            self._tokens.end(key, [])
            self._resolver.end(key, error=_error_of(operation))

    def _lost(self, error: ServiceError) -> None:
        self._submissions.fail_waiting(error)
        self._resolver.fail_all(error)

    def _newest(self) -> wire.Client:
        client: wire.Client = self._connection.call("GetClient", wire.ClientRequest(client_id=self.client_id))
        self._learn(client)
        return client

    def _learn(self, client: wire.Client) -> None:
        with self._lock:
            self._lock.notify_all()
            # A reply may be older than what the stream has told.
            if client.revision >= self._client.revision:
                self._client = client
            self._step = max(self._step, client.step)
        if client.HasField("dp_metrics"):
            self._measure(from_wire(client.dp_metrics))

    def _measure(self, metrics: DpMetrics | None) -> None:
        with self._lock:
            if metrics is not None and (
                self._dp_metrics is None or metrics.steps_charged >= self._dp_metrics.steps_charged
            ):
                self._dp_metrics = metrics


def _error_of(operation: wire.Operation) -> ServiceError:
    if operation.HasField("error"):
        error = error_from_wire(operation.error)
        if operation.state == "cancelled" and not isinstance(error, FutureCancelledError):
            return FutureCancelledError(error.code, error.message, error.remedy, error.request_id)
        return error
    kind = FutureCancelledError if operation.state == "cancelled" else FutureFailedError
    return kind(operation.state, f"{operation.kind} was {operation.state}; what was charged stays charged.")


@contextmanager
def _fields(name: str) -> Iterator[None]:
    """Turn a refusal of protobuf to hold a value into the error of the field ``name``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ServiceValidationError("request", f"{name}: {error}.", field=name) from None
