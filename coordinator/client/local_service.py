"""A training service of this process's own: a child on loopback, with a token that only this process knows.

Guarantee: it ends with this process, however this process ends. The state folder keeps its clients for the next one.
"""

import hashlib
import json
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from raycloak.metrics.service_errors import ServiceConnectionError

TENANT: Final = "local"
_STARTS_S: Final = 120.0
_ENDS_S: Final = 90.0
_LOG_LINES: Final = 5


class LocalService:
    """A running service. Its settings are as for `raycloak serve`, without address and tenants.

    Args:
        datasets, models, run: see docs/service.md.
        code: ``module:function`` names that configurations may have.
        key_services: addresses of key services that runs on sent data may ask.
        base: folder that relative paths and modules start from.

    Raises:
        ServiceConnectionError: ``not_started``, with the last lines that the service wrote.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        models: Mapping[str, Any],
        code: Sequence[str],
        key_services: Sequence[str],
        run: Mapping[str, Any],
        base: Path,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        hashed = hashlib.sha256(self.token.encode()).hexdigest()
        settings = {
            "bind": "127.0.0.1:0",
            "run": dict(run),
            "datasets": dict(datasets),
            "models": dict(models),
            "metrics": {"bind": "127.0.0.1:0"},
            "tenants": {
                TENANT: {
                    "token_sha256": [{"sha256": hashed}],
                    "datasets": sorted(datasets),
                    "models": sorted(models),
                    "code": list(code),
                    "key_services": list(key_services),
                }
            },
        }
        self._folder = tempfile.TemporaryDirectory(prefix="raycloak-service-")
        file, self._log = Path(self._folder.name) / "service.yaml", Path(self._folder.name) / "log"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [sys.executable, "-m", "raycloak", "serve", str(file), "--base", str(base.resolve()), "--json"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "raycloak.coordinator.client.leash", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            self.address = self._announced()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the service after the step that it does."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()

    def _announced(self) -> str:
        """Wait for the line of JSON in which the service says its address."""
        assert self._process.stdout is not None, "it is a pipe"
        deadline, said = time.monotonic() + _STARTS_S, b""
        while b"\n" not in said and time.monotonic() < deadline:
            ready, _, _ = select.select([self._process.stdout], [], [], 0.5)
            if ready:
                piece = self._process.stdout.read1(65536)  # type: ignore[attr-defined]
                if not piece:
                    break
                said += piece
        try:
            return str(json.loads(said)["address"])
        except (ValueError, LookupError, TypeError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = " ".join(lines[-_LOG_LINES:]).strip(" .")
            raise ServiceConnectionError(
                "not_started",
                f"the service did not start: {last.removeprefix('error: ').removesuffix('.') or 'it said nothing'}.",
                "Its settings are what ServiceClient.local was given.",
            ) from None
