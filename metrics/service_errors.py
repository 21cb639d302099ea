"""The errors of a training service, as its client raises them and its server sends them.

ServiceError                       below RaycloakError; carries the id of the request too
├── ServiceAuthenticationError     the credentials are missing, unknown or expired
├── ServicePermissionError         the tenant may not use what it asked for
├── ServiceNotFoundError           no such client, future, artifact, dataset or model of this tenant
├── ServiceValidationError         a field of the request is wrong
├── ServiceRateLimitedError        too many calls
├── ServiceQueueFullError          too many operations wait
├── FutureTimeoutError             a result was not there in time; the operation goes on
├── FutureCancelledError           the operation was cancelled; what was charged stays charged
├── FutureFailedError              the operation failed; what was charged stays charged
├── BudgetExceededError            the account has no room for the step
├── ServiceStateError              the call does not fit the state that the client is in
├── ServiceConnectionError         the service does not answer, or is not the one that was named
└── ServiceServerError             the service failed

A message never carries data-dependent text.
"""

from typing import Any, ClassVar

from raycloak.metrics.errors import RaycloakError


class ServiceError(RaycloakError):
    """The base of all errors of a training service.

    Args:
        code, message, remedy: see `RaycloakError`.
        request_id: the id of the refused call, which the service's log has for a `ServiceServerError`; empty if the
            call never reached the service, or if the operation was accepted and failed later.
        details: the additional fields that the class names, by name.
    """

    kind: ClassVar[str] = "server"
    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, code: str, message: str, remedy: str = "", request_id: str = "", **details: Any) -> None:
        super().__init__(code, message, remedy)
        self.request_id = request_id
        self.details = {name: details.get(name) for name in self.fields}
        for name, value in self.details.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        given = self.code, self.message, self.remedy, self.request_id
        return type(self), given, {"details": self.details, **self.details}


class ServiceAuthenticationError(ServiceError):
    """A refusal of credentials: they are missing, unknown or expired."""

    exit_code = 3
    kind = "authentication"


class ServicePermissionError(ServiceError):
    """A refusal of something that the tenant may not use."""

    exit_code = 3
    kind = "permission"


class ServiceNotFoundError(ServiceError):
    """An unknown name: the tenant has no such thing. ``resource`` is its kind, such as ``artifact``."""

    exit_code = 2
    kind = "not_found"
    fields = ("resource",)
    resource: str | None


class ServiceValidationError(ServiceError):
    """A wrong field of a request; ``field`` is its dotted path."""

    exit_code = 2
    kind = "validation"
    fields = ("field",)
    field: str | None


class ServiceRateLimitedError(ServiceError):
    """A refusal of one call too many; ``retry_after_s`` is in seconds."""

    kind = "rate_limited"
    fields = ("retry_after_s",)
    retry_after_s: float | None


class ServiceQueueFullError(ServiceError):
    """A refusal of an operation because as many wait as may; ``retry_after_s`` is in seconds."""

    kind = "queue_full"
    fields = ("retry_after_s",)
    retry_after_s: float | None


class FutureTimeoutError(ServiceError, TimeoutError):
    """The end of a wait: the result was not there in time, and the operation continues."""

    kind = "timeout"


class FutureCancelledError(ServiceError):
    """A cancelled operation; a step that was charged stays charged."""

    kind = "cancelled"


class FutureFailedError(ServiceError):
    """A failed operation; ``code`` is the cause's, and a step that was charged stays charged."""

    kind = "failed"


class BudgetExceededError(ServiceError):
    """A refusal of a step that the account has no room for; epsilons are None if the cause names none."""

    exit_code = 3
    kind = "budget_exceeded"
    fields = ("current_epsilon", "max_epsilon")
    current_epsilon: float | None
    max_epsilon: float | None


class ServiceStateError(ServiceError):
    """A refusal of a call that does not fit the state of its client."""

    kind = "state"


class ServiceConnectionError(ServiceError):
    """A service that does not answer, or that is not the one that was named."""

    kind = "connection"


class ServiceServerError(ServiceError):
    """A failure of the service itself; its log has the request id."""

    kind = "server"


KINDS: dict[str, type[ServiceError]] = {each.kind: each for each in ServiceError.__subclasses__()}
"""Every class of error, by the name that the wire gives it."""
