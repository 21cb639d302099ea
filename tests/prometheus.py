"""A real Prometheus for tests: Debian's binary, on loopback, with storage of its own."""

import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

BINARY = shutil.which("prometheus")
_DEADLINE_S = 120.0
_EVERY = "200ms"
"""The interval of scrapes, and their timeout: a busy machine may answer later than in a tenth of a second."""
_CLEAN = "1s"
"""How long no scrape may have failed at a moment that tests ask about: several scrapes and evaluations of the rules."""


class Prometheus:
    """One server that scrapes a few pages five times a second until it is closed.

    Args:
        pages: ``host:port`` of each page, by the name of its job.
        rules: a file of rules, which it evaluates as often.
    """

    def __init__(self, pages: Mapping[str, str], rules: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rcprom")
        folder = Path(self._folder.name)
        jobs = [{"job_name": name, "static_configs": [{"targets": [page]}]} for name, page in pages.items()]
        often = {"scrape_interval": _EVERY, "scrape_timeout": _EVERY, "evaluation_interval": _EVERY}
        config = {"global": often, "rule_files": [str(rules)], "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        assert BINARY is not None, "the caller skips without it"
        self._log = folder / "log"
        command = [BINARY, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--web.listen-address=127.0.0.1:0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        listening = eventually(lambda: re.search(r'"Listening on" address=(\S+)', self._log.read_text()))
        self._url = f"http://{listening[1]}"
        eventually(lambda: "Server is ready" in self._log.read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(_DEADLINE_S)
        self._folder.cleanup()

    def ask(self, path: str, **fields: str) -> Any:
        """Return the data of an answer of the HTTP API."""
        with urllib.request.urlopen(
            f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(fields)}", timeout=60
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str, at: float) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each sample of an expression at a Unix time."""
        found = self.ask("query", query=expr, time=f"{at:.3f}")["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def sees(self, expr: str) -> None:
        """Wait until an expression has data now."""
        eventually(lambda: self.query(expr, time.time()))

    def moment(self) -> float:
        """Return a Unix time at which every page was scraped and every rule saw its series.

        A scrape that times out marks its series as stale from the time it began. A time is therefore judged in
        hindsight, after the next scrape of each page.
        """
        return float(eventually(self._clean_moment))

    def _clean_moment(self) -> float | None:
        asked = time.time()
        self.sees(f"min(timestamp(up)) > {asked:.3f}")
        ((_, clean),) = self.query(f"min(min_over_time(up[{_CLEAN}]))", asked)
        return asked if clean == 1 else None


def eventually(question: Callable[[], Any]) -> Any:
    """Return the first answer that counts as true."""
    deadline = time.monotonic() + _DEADLINE_S
    while not (answer := question()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
    return answer
