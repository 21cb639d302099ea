"""A training service of this process's own: a child on loopback, with a token that only this process knows.

Guarantee: it ends with this process, however this process ends. The state folder keeps its clients for the next one.
"""

import hashlib
import secrets
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from raycloak.attestation.core.messages import Message
from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.metrics.errors import RaycloakError
from raycloak.metrics.service_errors import ServiceConnectionError

TENANT: Final = "local"
_STARTS_S: Final = 120.0
_ENDS_S: Final = 90.0


class Listening(Message):
    """A report that the service listens."""

    DOMAIN: ClassVar[str] = "raycloak/local-service/listening/v1"
    address: str


class LocalService:
    """A running service. Its settings are as for `raycloak serve`, without address and tenants.

    Args:
        datasets, models, run: see docs/service.md.
        code: ``module:function`` names that configurations may have.
        key_services: addresses of key services that runs on sent data may ask.
        base: folder that relative paths and modules start from.

    Raises:
        ServiceConnectionError: ``not_started``, with the last line that the service wrote.
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
        file, log = Path(self._folder.name) / "service.yaml", Path(self._folder.name) / "log"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        self._child = Child("raycloak.coordinator.cli.serve:serve_parent", str(file), str(base.resolve()), log=log)
        try:
            self.address = self._child.receive(Listening, by=Deadline(_STARTS_S)).address
        except BaseException as error:
            said = self._child.last_words().removeprefix("error: ") or str(error)
            self.stop()
            if not isinstance(error, RaycloakError):
                raise
            message = f"the service did not start: {said.strip(' .')}."
            remedy = "Its settings are what ServiceClient.local was given."
            raise ServiceConnectionError("not_started", message, remedy) from None

    def stop(self) -> None:
        """End the service after the step that it does."""
        self._child.signal(signal.SIGTERM)
        self._child.end(Deadline(_ENDS_S))
        self._folder.cleanup()
