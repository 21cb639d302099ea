"""A witness over HTTP: what `docs/ledger.md` asks of one, in as few lines as it takes."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class WitnessServer(ThreadingHTTPServer):
    """A server that keeps one content per path.

    Attributes:
        kept: the contents.
        answers: statuses that are sent, in order, instead of doing what is asked.
        lost: how many of the next PUTs are done, but their answers never sent.
        asked: every (method, path).
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kept: dict[str, bytes] = {}
        self.answers: list[int] = []
        self.lost = 0
        self.asked: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Return the URL of the server."""
        return f"http://127.0.0.1:{self.server_port}/witness"

    def named_in(self, folder: Path) -> str:
        """Return the path of a private file with the URL, which names this witness."""
        return url_file(folder, self.url)


def url_file(folder: Path, url: str, mode: int = 0o600) -> str:
    """Return the path of a new file with a URL."""
    path = folder / f"witness-{len(list(folder.iterdir()))}.url"
    path.touch(mode)
    path.write_text(f"{url}\n")
    return str(path)


class _Handler(BaseHTTPRequestHandler):
    server: WitnessServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path))
        if not self._overruled():
            content = self.server.kept.get(self.path)
            self._answer(404 if content is None else 200, content or b"")

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(("PUT", self.path))
        if self._overruled():
            return
        with self.server.lock:
            kept = self.server.kept.get(self.path)
            wanted, absent = self.headers["If-Match"], self.headers["If-None-Match"] == "*"
            if (absent and kept is not None) or (not absent and wanted != _etag(kept)):
                self._answer(412, b"")
                return
            self.server.kept[self.path] = content
        if self.server.lost:
            self.server.lost -= 1
            self.close_connection = True
            return
        self._answer(204, b"", _etag(content))

    def _overruled(self) -> bool:
        if self.server.answers:
            self._answer(self.server.answers.pop(0), b"")
            return True
        return False

    def _answer(self, status: int, content: bytes, etag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if etag or content:
            self.send_header("ETag", etag or _etag(content))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _etag(content: bytes | None) -> str:
    return "" if content is None else f'"{hashlib.sha256(content).hexdigest()}"'


@contextmanager
def witness_server() -> Iterator[WitnessServer]:
    """Yield a server on this machine."""
    server = WitnessServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()
