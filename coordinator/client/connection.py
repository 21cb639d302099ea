"""One connection to a training service: its channel, credentials, deadlines, repeated calls, and errors.

Guarantee: a token leaves over TLS only, or to this machine's loopback.
"""

import ipaddress
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import grpc
from google.protobuf.message import DecodeError

from raycloak.coordinator.client.service_pb2 import ServiceErrorInfo
from raycloak.coordinator.client.service_pb2_grpc import TrainingStub
from raycloak.coordinator.config.sections import host_and_port
from raycloak.metrics.service_errors import (
    KINDS,
    ServiceAuthenticationError,
    ServiceConnectionError,
    ServiceError,
    ServiceServerError,
    ServiceValidationError,
)
from raycloak.version import VERSION

DEADLINE_S: Final = 30.0
"""Of one attempt of a call. A service writes an operation to its disk before it answers, which takes milliseconds."""
SENDING_DEADLINE_S: Final = 900.0
"""Of one attempt to send a batch, which may have hundreds of megabytes."""
STREAM_DEADLINE_S: Final = 3600.0
"""Of one stream of changes or pieces; the next one goes on where it ended."""
FIRST_ANSWER_S: Final = 10.0
"""Patience with a service that has never answered: its address is more likely wrong than the service is restarting."""
# A result for a whole vocabulary of texts does not fit into gRPC's default of 4 MiB.
MAX_MESSAGE_BYTES: Final = 64 * 2**20
_PAUSES_S: Final = (0.05, 2.0)  # first and longest pause between attempts

_OPTIONS: Final = (
    # Each connection has its own credentials; a shared pool could use another's.
    ("grpc.use_local_subchannel_pool", 1),
    # This module repeats calls, and knows which may be.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A restarted service is found again in seconds. `grpc.min_reconnect_backoff_ms` stays at its 20 s: it is also
    # what a connection gets for its TLS handshake.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Notices a machine that is gone without a word. The service allows one question in 30 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
TRAILER: Final = "raycloak-error-bin"
"""The key of the trailing metadata that carries an error."""
_MOST_TEXT: Final = 1024
"""Characters: peers refuse trailing metadata of more than some kilobytes, and with it the whole answer."""
_NO_ANSWER: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
"""Answers of calls that may have reached the service or not. The last is how gRPC drops calls when too many come."""


@dataclass(frozen=True)
class ServiceCredentials:
    """The means by which a tenant and a service know each other.

    Attributes:
        token: the tenant's token, which the operator gave out.
        token_file: file of the token instead; it is read for every call, so it may be replaced.
        ca: file of the certificates (PEM) that the service's certificate is checked against; gRPC's public ones if
            absent.
        certificate, key: files (PEM) of the tenant's own certificate, for mutual TLS.
    """

    token: str | None = field(default=None, repr=False)
    token_file: str | Path | None = None
    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise ServiceValidationError("credentials", "token and token_file are both given.", field="token_file")
        if (self.certificate is None) != (self.key is None):
            raise ServiceValidationError("credentials", "certificate and key belong together.", field="key")

    def bearer(self) -> str | None:
        """Return the token, if there is one.

        Raises:
            ServiceAuthenticationError: ``no_token`` if the file cannot be read or is no token.
        """
        token = self.token
        if self.token_file is not None:
            token = _read(self.token_file, "no_token").decode("ascii", "replace").strip()
        if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
            raise ServiceAuthenticationError("no_token", "the token is empty, or holds characters that no token has.")
        return token

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the TLS credentials; ServiceAuthenticationError ``no_certificate`` if a file cannot be read."""
        ca, certificate, key = (
            None if path is None else _read(path, "no_certificate") for path in (self.ca, self.certificate, self.key)
        )
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)


class Connection:
    """A channel to the service, for any number of threads.

    Args:
        address: ``host:port``. TLS is used unless it is a loopback address and the credentials name no ``ca``.
        patience_s: for how long a call is repeated while the service does not answer.

    Raises:
        ServiceValidationError: ``address`` if it is no ``host:port``.

    Every call raises the error that the service sent, or ServiceConnectionError ``unreachable``.
    """

    def __init__(self, address: str, credentials: ServiceCredentials, patience_s: float) -> None:
        try:
            self.address = host_and_port(address)
        except ValueError as error:
            raise ServiceValidationError("address", f"{error}.", field="address") from None
        self.patience_s = patience_s
        self._credentials = credentials
        self._answered = False
        self._closed = threading.Event()
        if credentials.ca is None and credentials.certificate is None and is_loopback(address):
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials.channel_credentials(), _OPTIONS)
        self._stub: Any = TrainingStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End all calls and close the channel."""
        self._closed.set()
        self._channel.close()

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed.is_set()

    def call(self, method: str, request: Any) -> Any:
        """Return the reply to ``request``, which is repeated as it is while no answer comes.

        Args:
            request: a message; or a function that returns a new iterator of messages, for a call that sends a stream.
        """
        request_id, pauses, has_failed = uuid4().hex, growing_pauses(), False
        deadline_s = SENDING_DEADLINE_S if callable(request) else DEADLINE_S
        patience_s = self.patience_s if self._answered else min(self.patience_s, FIRST_ANSWER_S)
        until = time.monotonic() + patience_s
        while True:
            sent = request() if callable(request) else request
            try:
                reply = getattr(self._stub, method)(sent, timeout=deadline_s, metadata=self._metadata(request_id))
            except grpc.RpcError as failure:
                error = self._error(failure, request_id)
            except ValueError as failure:  # the channel is closed
                raise self._closed_error(request_id) from failure
            else:
                self._answered = True
                return reply
            pause = next(pauses)
            # An upload may have gone on for minutes before it broke.
            if callable(request) and not has_failed:
                until, has_failed = time.monotonic() + patience_s, True
            if not is_no_answer(error) or time.monotonic() + pause > until:
                raise error
            if self._closed.wait(pause):
                raise self._closed_error(request_id)

    def stream(self, method: str, request: Any, opened: Callable[[Any], None] | None = None) -> Iterator[Any]:
        """Yield the messages of one stream, which is not repeated.

        Args:
            opened: is given the call, whose ``cancel()`` ends the stream.
        """
        request_id = uuid4().hex
        try:
            call = getattr(self._stub, method)(request, timeout=STREAM_DEADLINE_S, metadata=self._metadata(request_id))
            if opened is not None:
                opened(call)
            for message in call:
                self._answered = True
                yield message
        except grpc.RpcError as failure:
            raise self._error(failure, request_id) from None
        except ValueError as failure:  # the channel is closed
            raise self._closed_error(request_id) from failure

    def pause(self, seconds: float) -> bool:
        """Wait; return whether the connection was closed meanwhile."""
        return self._closed.wait(seconds)

    def _metadata(self, request_id: str) -> tuple[tuple[str, str], ...]:
        token = self._credentials.bearer()
        authorization = () if token is None else (("authorization", f"Bearer {token}"),)
        return (*authorization, ("raycloak-version", VERSION), ("raycloak-request-id", request_id))

    def _error(self, failure: Any, request_id: str) -> ServiceError:
        status = failure.code() if hasattr(failure, "code") else grpc.StatusCode.UNKNOWN
        trailing = failure.trailing_metadata() if hasattr(failure, "trailing_metadata") else None
        carried = next((value for key, value in trailing or () if key == TRAILER), None)
        with suppress(DecodeError):
            if carried is not None:
                sent = error_from_wire(ServiceErrorInfo.FromString(carried))
                self._answered = True
                sent.request_id = sent.request_id or request_id
                return sent
        if self.is_closed:
            return self._closed_error(request_id)
        if status in _NO_ANSWER:
            message = f"the service at {self.address} does not answer ({status.name})."
            remedy = "Check the address, the certificate authority and that the service runs."
            return ServiceConnectionError("unreachable", message, remedy, request_id)
        # What the service refuses by itself has a reason, so it is gRPC that refused the size.
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            message = "the request is larger than the service takes in one message."
            return ServiceValidationError("too_large", message, "Ask for less at once.", request_id, field="request")
        if status is grpc.StatusCode.UNIMPLEMENTED:
            message = f"{self.address} is no training service of this version."
            return ServiceConnectionError("other_service", message, "Check the address and the version.", request_id)
        message = f"the service at {self.address} ended the call without a reason of its own ({status.name})."
        return ServiceServerError("no_reason", message, "Look for the request id in the service's log.", request_id)

    def _closed_error(self, request_id: str) -> ServiceConnectionError:
        return ServiceConnectionError(
            "closed", "this client of the service is closed.", "Make a new ServiceClient.", request_id
        )


def is_no_answer(error: ServiceError) -> bool:
    """Return whether ``error`` leaves open if the call reached the service, so that the same call may be repeated."""
    return isinstance(error, ServiceConnectionError) and error.code not in ("closed", "other_service", "other_version")


def growing_pauses() -> Iterator[float]:
    """Yield growing pauses in seconds, with a random part, so that not all clients return in one moment."""
    pause, longest = _PAUSES_S
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, longest)


def _read(path: str | Path, code: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror})."
        raise ServiceAuthenticationError(code, message, "Check the path.") from None


def is_loopback(address: str) -> bool:
    """Return whether ``host:port`` can be reached from this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def error_to_wire(error: ServiceError) -> ServiceErrorInfo:
    """Return the message that carries ``error``; a text of more than 1,024 characters is cut."""
    known = {name: value for name, value in error.details.items() if value is not None}
    return ServiceErrorInfo(
        code=error.code,
        message=error.message[:_MOST_TEXT],
        remedy=error.remedy[:_MOST_TEXT],
        request_id=error.request_id,
        kind=error.kind,
        **known,
    )


def error_from_wire(info: ServiceErrorInfo) -> ServiceError:
    """Return the exception that ``info`` carries; one of an unknown kind becomes a `ServiceServerError`."""
    kind = KINDS.get(info.kind, ServiceServerError)
    # An optional number that is absent reads as 0, so presence is asked for.
    optional = {"retry_after_s", "current_epsilon", "max_epsilon"}
    details = {name: getattr(info, name) for name in kind.fields if name not in optional or info.HasField(name)}
    return kind(info.code, info.message, info.remedy, info.request_id, **details)
