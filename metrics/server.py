"""The HTTP server of the `/metrics` page."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Final, Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from raycloak.metrics.errors import ConfigError

READER_WAIT_S: Final = 60.0
"""The longest that a page stays for its reader: the default interval of Prometheus."""
# Its interval is known from the second read on; until then, that of docs/operations.md is taken.
_USUAL_INTERVAL_S: Final = 15.0
# Prometheus sends it with every scrape, and a person's browser does not.
_SCRAPE: Final = "HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS"


class _Reads:
    """The scrapes of a page: when Prometheus last read it, and how far apart it reads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._newest = 0.0
        self._interval = _USUAL_INTERVAL_S

    def around(self, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        """Return ``app``, whose answers to Prometheus are noted once they are sent."""

        def answer(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
            began = time.monotonic()
            yield from app(environ, start_response)
            if _SCRAPE in environ:
                with self._changed:
                    if self._count:
                        self._interval = began - self._newest
                    self._count, self._newest = self._count + 1, began
                    self._changed.notify_all()

        return answer

    def wait(self) -> None:
        with self._changed:
            asked = time.monotonic()
            if self._count == 0:
                return
            # Half an interval more, for a reader that is late. One that is gone for longer is not waited for.
            until = min(self._newest + 1.5 * self._interval, asked + READER_WAIT_S)
            self._changed.wait_for(lambda: self._newest > asked, timeout=max(0.0, until - asked))


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
    """Serves one registry over HTTP from its own thread until :meth:`close`.

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
        self._reads = _Reads()
        app = server.get_app()
        assert app is not None, "the library has set it"
        server.set_app(self._reads.around(app))
        self._server: WSGIServer = server
        self._thread: threading.Thread = thread
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{server.server_port}"

    @property
    def url(self) -> str:
        """The address at which a browser or Prometheus finds the page."""
        return f"http://{self.address}/metrics"

    def await_reader(self) -> None:
        """Wait until a Prometheus that reads the page regularly has read it once more, so that it sees the end.

        Guarantee: returns at once if no Prometheus has read the page, or if its next read is overdue. Otherwise it
        returns after the next read, after one and a half of its intervals, or after `READER_WAIT_S`.
        """
        self._reads.wait()

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
