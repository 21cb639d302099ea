"""The errors of the service on the wire: from an exception to `ServiceErrorInfo`, and back."""

from typing import Final

from raycloak.coordinator.client.service_pb2 import ServiceErrorInfo
from raycloak.metrics.service_errors import KINDS, ServiceError, ServiceServerError

TRAILER: Final = "raycloak-error-bin"
"""The key of the trailing metadata that carries an error."""
_MOST_TEXT: Final = 1024
"""Characters: peers refuse trailing metadata of more than some kilobytes, and with it the whole answer."""


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
