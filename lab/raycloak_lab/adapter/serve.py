"""One served adapter: worker process, budgets and server, from the settings and a trained model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raycloak.metrics.exporter import Exporter
from raycloak.metrics.server import MetricsServer
from raycloak_lab.adapter import places
from raycloak_lab.adapter.budgets import TokenBudgets
from raycloak_lab.adapter.collector import ADAPTER_SERIES, AdapterCollector
from raycloak_lab.adapter.desk import AdapterDesk
from raycloak_lab.adapter.server import Serving, serving
from raycloak_lab.adapter.settings import AdapterSettings
from raycloak_lab.adapter.worker_process import AdapterOpening, WorkerProcess


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """The facts about a served adapter that its owner needs.

    Attributes:
        address: for `EncryptedAdapter`: the worker's key, @, host and port.
        evidence: ``SIMULATED`` if the worker has no trusted execution environment.
        adapter: hexadecimal digest.
        budgets: file of the spent tokens.
        metrics: URL of its metrics page.
        memory: that calls take at most, and what they have.
    """

    address: str
    evidence: str
    adapter: str
    projections: int
    rank: int
    block_tokens: int
    budgets: Path
    metrics: str
    memory: str


@contextmanager
def _page(server: Serving, settings: AdapterSettings) -> Iterator[str]:
    """Serve the metrics page inside the block; yields its URL."""
    exporter = Exporter(ADAPTER_SERIES)
    exporter.add(AdapterCollector(server.figures))
    page = MetricsServer(exporter.registry, settings.metrics.bind)
    try:
        yield page.url
    finally:
        page.close()


@contextmanager
def served_adapter(
    path: str,
    settings: AdapterSettings,
    trust: Path | None = None,
    key: Path | None = None,
    config: Path | None = None,
) -> Iterator[ServedFacts]:
    """Serve the adapter of ``path`` inside the block.

    Guarantee: the adapter is read in the worker's process alone. This one never loads torch.

    Args:
        path: run directory, or its name; or folder or URL of a sealed package, which needs the others.
        trust: trust store of a package's reader. key: private key of one of its recipients.
        config: configuration that names a package's model.

    Raises:
        RaycloakError: why the adapter cannot be served.
    """
    trusted, opened, configured = (str(each) if each else None for each in (trust, key, config))
    worker = WorkerProcess(
        AdapterOpening(
            path=path,
            trust=trusted,
            key=opened,
            config=configured,
            shared=settings.shared,
            tokens=settings.block_tokens,
            simulated=settings.evidence == "simulated",
        )
    )
    try:
        facts = worker.facts
        # By the matrices' digest: their budgets are for ever, whatever run or shared parts they are served with.
        file = places.adapters_folder() / f"{facts.matrices_digest.hex()[:32]}.sqlite"
        budgets = TokenBudgets(file, settings.tokens_of_adapter, settings.tokens_of_client)
        clients = {bytes.fromhex(key): name for name, key in settings.clients.items()}
        desk = AdapterDesk(worker, budgets, clients, sessions=settings.sessions, idle_s=settings.idle_s)
        with serving(desk, worker.end, settings.bind) as server, _page(server, settings) as url:
            yield ServedFacts(
                address=f"{facts.identity_key.hex()}@{settings.bind.rpartition(':')[0]}:{server.port}",
                evidence="SIMULATED" if settings.evidence == "simulated" else "guest",
                adapter=facts.adapter_digest.hex(),
                projections=len(facts.projections),
                rank=facts.shape.rank,
                block_tokens=facts.shape.tokens,
                budgets=file,
                metrics=url,
                memory=server.memory,
            )
        budgets.close()
    finally:
        worker.stop()
