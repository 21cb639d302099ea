"""The HTTP server of the `/metrics` page."""

import threading
from types import TracebackType
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from raycloak.metrics.errors import ConfigError


def parse_bind(bind: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[ipv6]:port``; port 0 asks for a free one.

    Raises:
        ConfigError: ``metrics_bind``.
    """
    host, separator, port = bind.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (separator and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(
            "metrics_bind", f"metrics.bind '{bind}' is not an address", "Write host:port, for example 127.0.0.1:9464."
        )
    return host, int(port)


class MetricsServer:
    """Serves one registry over HTTP from a thread of its own until :meth:`close`.

    The page carries no credentials: bind it to loopback, or keep it to the monitoring network.

    Args:
        registry: the metrics to serve.
        bind: ``host:port``.

    Raises:
        ConfigError: ``metrics_bind`` if the address cannot be parsed, resolved or bound.
    """

    def __init__(self, registry: CollectorRegistry, bind: str = "127.0.0.1:0") -> None:
        host, port = parse_bind(bind)
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            remedy = "Choose another metrics.bind; port 0 takes a free one."
            raise ConfigError(
                "metrics_bind", f"cannot serve metrics on {bind}: {error.strerror or error}", remedy
            ) from None
        self._server: WSGIServer = server
        self._thread: threading.Thread = thread
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{server.server_port}"

    @property
    def url(self) -> str:
        """The address at which a browser or Prometheus finds the page."""
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        """Stop answering, release the port and end the thread; a second call does nothing."""
        # The thread must leave its loop before the socket closes under it.
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
