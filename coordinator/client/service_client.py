"""ServiceClient: a tenant's way into a training service."""

import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Self
from uuid import uuid4
from weakref import WeakSet

from raycloak.attestation.files.whole import whole_file
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import Connection, ServiceCredentials, growing_pauses, is_no_answer
from raycloak.coordinator.client.local_service import LocalService
from raycloak.coordinator.client.results import Capabilities, ClientSummary, from_wire
from raycloak.coordinator.client.sent_batches import DataKeys
from raycloak.coordinator.client.training_client import TrainingClient
from raycloak.coordinator.client.training_config import TrainingConfig, parse_training_config
from raycloak.metrics.service_errors import ServiceError

PATIENCE_S: Final = 60.0
"""For how long a service may be away, as while it restarts, before calls and futures fail."""


class ServiceClient:
    """A connection to a training service; as a context manager it ends with the block.

    Args:
        address: ``host:port`` of the service.
        credentials: see `ServiceCredentials`. A ``str`` is a token.
        patience_s: for how long a call is repeated while the service does not answer. A service that has never
            answered is given up after 10 s.

    Raises:
        ServiceValidationError: ``address`` is no ``host:port``.
        ServiceConnectionError: no answer, or another version.
        ServiceAuthenticationError: the credentials are missing, unknown or expired.
    """

    def __init__(
        self, address: str, credentials: ServiceCredentials | str | None = None, *, patience_s: float = PATIENCE_S
    ) -> None:
        if credentials is None or isinstance(credentials, str):
            credentials = ServiceCredentials(token=credentials)
        self.address = address
        self._connection = Connection(address, credentials, patience_s)
        # Weak: what has ended is nobody's, and a client that works is held by its threads.
        self._clients: WeakSet[TrainingClient] = WeakSet()
        self._local: LocalService | None = None
        try:
            self.capabilities()
        except ServiceError:
            self._connection.close()
            raise

    @classmethod
    def local(
        cls,
        *,
        datasets: Mapping[str, Any] | None = None,
        models: Mapping[str, Any] | None = None,
        code: Sequence[str] = (),
        key_services: Sequence[str] = (),
        run: Mapping[str, Any] | None = None,
        base: str | Path = ".",
    ) -> Self:
        """Start a service for this process, and connect to it. It ends with `close`, and with this process.

        It uses the Ray cluster of this environment (``RAY_ADDRESS``), or one of its own. Its clients stay in the state
        folder, for the next local service.

        Args:
            datasets, models, run: as in the settings of `raycloak serve`; see docs/service.md.
            code: ``module:function`` names that configurations may have.
            key_services: addresses of key services that runs on sent data may ask.
            base: folder that relative paths and modules start from.

        Raises:
            ServiceConnectionError: ``not_started``, with what the service said.
        """
        local = LocalService(datasets or {}, models or {}, code, key_services, run or {}, Path(base))
        try:
            service = cls(local.address, local.token)
        except BaseException:
            local.stop()
            raise
        service._local = local
        return service

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Detach from all training clients, whose runs go on, and close the connection."""
        for client in list(self._clients):
            client.detach()
        self._clients.clear()
        self._connection.close()
        if self._local is not None:
            self._local.stop()
            self._local = None

    def capabilities(self) -> Capabilities:
        """Ask what the service offers to this tenant."""
        offer: Capabilities = from_wire(self._connection.call("GetCapabilities", wire.CapabilitiesRequest()))
        return offer

    def create_training_client(
        self, config: TrainingConfig | Mapping[str, Any], *, data_keys: DataKeys | None = None
    ) -> TrainingClient:
        """Start a training run, and return its client while the run is still being started.

        Args:
            data_keys: of the owner of the data that this client sends; not needed on registered data.

        Raises:
            ServiceValidationError: a field of the configuration is wrong; ``field`` names it.
            ServicePermissionError, ServiceNotFoundError: the dataset or model is not this tenant's.
        """
        if not isinstance(config, TrainingConfig):
            config = parse_training_config(dict(config))
        # One key for all attempts, so that an answer that was lost makes no second run.
        request = wire.CreateClientRequest(idempotency_key=uuid4().hex, config_json=config.to_json())
        return self._attached(self._connection.call("CreateClient", request), data_keys)

    def list_clients(self) -> list[ClientSummary]:
        """List this tenant's training clients, ended ones included; of more than a thousand the newest."""
        reply = self._connection.call("ListClients", wire.ListClientsRequest())
        return [from_wire(each) for each in reply.clients]

    def get_client(self, client_id: str, *, data_keys: DataKeys | None = None) -> TrainingClient:
        """Attach to a training client, such as one of a process that has died; `TrainingClient.futures` has its work.

        Raises:
            ServiceNotFoundError: ``resource`` is ``client``.
        """
        return self._attached(self._connection.call("GetClient", wire.ClientRequest(client_id=client_id)), data_keys)

    def pull_artifact(self, artifact_id: str) -> bytes:
        """Return a saved package: a tar, whose content is encrypted.

        Raises:
            ServiceNotFoundError: ``resource`` is ``artifact``.
        """
        content = io.BytesIO()
        self._pull(artifact_id, content)
        return content.getvalue()

    def save_artifact(self, artifact_id: str, path: str | Path) -> None:
        """Write a saved package to ``path``, without holding it in memory; errors as `pull_artifact`.

        The file is there as a whole, or not at all.
        """
        with whole_file(Path(path)) as file:
            self._pull(artifact_id, file)

    def _pull(self, artifact_id: str, file: BinaryIO) -> None:
        """Write the pieces of a package; from the start again where the connection breaks."""
        until, pauses = time.monotonic() + self._connection.patience_s, growing_pauses()
        while True:
            file.seek(0)
            file.truncate()
            try:
                for piece in self._connection.stream("PullArtifact", wire.ArtifactRequest(artifact_id=artifact_id)):
                    file.write(piece.data)
                    until = time.monotonic() + self._connection.patience_s
            except ServiceError as error:
                pause = next(pauses)
                if not is_no_answer(error) or time.monotonic() + pause > until or self._connection.pause(pause):
                    raise
            else:
                return

    def _attached(self, client: wire.Client, data_keys: DataKeys | None) -> TrainingClient:
        attached = TrainingClient(self._connection, client, data_keys)
        self._clients.add(attached)
        return attached
