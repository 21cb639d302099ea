"""The address of a running Ray, tried before Ray is: its own attempt to join a dead one lasts for minutes."""

import os
import socket
import time

from raycloak.metrics.errors import ConfigError

ANSWER_S = 5.0
"""A head that is there answers within milliseconds, also from another continent."""

_FOUND_BY_RAY = ("auto", "local")


def check_address(address: str, deadline_s: float = ANSWER_S) -> None:
    """Require that a server of gRPC answers at ``address``, as RAY_ADDRESS names it: ``host:port`` or ``ray://...``.

    With TLS between Ray's processes, only that a port is open there. Names that Ray resolves itself pass.

    Raises:
        ConfigError: ``ray_address`` if it has another form, ``ray_unreachable`` if nobody answers in time.
    """
    if address in _FOUND_BY_RAY:
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(
            "ray_address",
            f"RAY_ADDRESS is '{address}', which is no address of a Ray cluster.",
            "Write host:port, for example 10.0.0.1:6379, or unset it to start a local Ray.",
        )
    began = time.monotonic()
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=deadline_s).close()
    except OSError as error:
        raise unreachable(address, error.strerror or "no answer") from None
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    import grpc  # late: a local Ray does not need it

    # A port alone may be another server's, for which Ray would wait just as long.
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(max(deadline_s - (time.monotonic() - began), 0.5))
        except grpc.FutureTimeoutError:
            raise unreachable(address, "a port is open there, but no Ray answers") from None


def unreachable(address: str, why: str) -> ConfigError:
    """Return the refusal of a Ray that does not answer."""
    return ConfigError(
        "ray_unreachable",
        f"RAY_ADDRESS names {address}, and nothing can be started there: {why}.",
        "Start that Ray again, or unset RAY_ADDRESS to start a local one.",
    )
