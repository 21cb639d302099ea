"""A run that a real Prometheus watches, from its first step to after its end."""

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.service.client import EvidenceClient
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.config import home as places
from raycloak.coordinator.config.section import validated
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.coordinator.evidence.standalone_service import ServiceConfig, start_service
from raycloak.coordinator.runs.verdict import metrics_view
from raycloak.coordinator.training.assignment import NewRun
from raycloak.metrics.collectors import (
    GpuReadingCollector,
    LedgerCollector,
    RunFacts,
    RunMetrics,
    ServiceMetrics,
    ServiceSnapshot,
)
from raycloak.metrics.exporter import Exporter
from raycloak.metrics.gpu_readings import GpuReading
from raycloak.metrics.registry import SERIES
from raycloak.metrics.server import MetricsServer
from raycloak_lab.adapter.collector import ADAPTER_SERIES, AdapterCollector, AdapterFigures
from raycloak_lab.dashboards.render import FILES, RULES
from tests.metrics.samples import sample_names
from tests.prometheus import BINARY, Prometheus
from tests.protocol import RENYI, WholeRun, examples, on, whole_run

pytestmark = pytest.mark.skipif(BINARY is None, reason="prometheus (Debian package) is not installed")

STEPS, LOOK = 14, 12
"""The run's steps, and after which of them the panels of a running run are asked: a day's burn needs ten."""
READINGS = (GpuReading("n0", 0, 0.5, 10 * 2**30, 80 * 2**30, 300.5, 41.0, 2, 0, "on", thermal_slowdown=False),)
"""What the tests of the sampler read through a simulated NVML: there is no GPU here."""
RAY_PAGE = "\n".join(
    f'ray_object_store_memory{{Location="{place}",NodeAddress="127.0.0.1",SessionName="s",Version="2.60.0"}} {value}'
    for place, value in (("MMAP_SHM", 4840), ("MMAP_DISK", 0), ("SPILLED", 0), ("UNSEALED", 0))
)
"""The form of Ray 2.60's own page; tests/ray checks it on a real one."""


@dataclass(frozen=True)
class Watched:
    """What Prometheus can be asked of: the moments at which the run trained, and at which its page was gone."""

    prometheus: Prometheus
    run: WholeRun
    running: float
    ended: float

    def moment(self, phase: str) -> float:
        return self.ended if phase == "ended" else self.running

    def query(self, expr: str, phase: str, run: str | None = None) -> list[tuple[dict[str, str], float]]:
        """Return the samples of a dashboard's expression, as a reader sees them who has chosen the run."""
        (account,) = {line["account"] for line in self.run.told if line["event"] == "admitted"}
        chosen = {
            "$run": run or self.run.session.run_id,
            "$account": account,
            "$node": ".*",
            "$instance": ".*",
            # Longer than the run takes on a busy machine: some of what is counted happens at its beginning alone.
            "$__rate_interval": "1h",
            "$__range": "1h",
        }
        for variable, value in chosen.items():
            expr = expr.replace(variable, value)
        return self.prometheus.query(expr, self.moment(phase))


class RayPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(RAY_PAGE.encode() + b"\n")

    def log_message(self, *arguments: object) -> None:
        pass


def page_of_ray(stack: ExitStack) -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), RayPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return f"127.0.0.1:{server.server_port}"


def page_of_a_loss(stack: ExitStack) -> str:
    """Serve the series of a run that measures a loss, and is not private."""
    facts = RunFacts("by-loss", "none", "simulated", 10, 8, 2, 2, False, 100, None, (), True, "0", "0", "0")
    metrics = RunMetrics(facts)
    metrics.loss_measured(0.25)
    exporter = Exporter()
    exporter.add(metrics)
    return stack.enter_context(MetricsServer(exporter.registry)).address


def training_service(stack: ExitStack) -> tuple[ServiceMetrics, str]:
    """Serve the series of a training service with one client; return what is told of its operations, and its page."""
    metrics = ServiceMetrics(lambda: ServiceSnapshot({"READY": 1}, 1, 0, 1, {}, time.time()))
    exporter = Exporter()
    exporter.add(metrics)
    return metrics, stack.enter_context(MetricsServer(exporter.registry)).address


def page_of_an_adapter(stack: ExitStack) -> str:
    """Serve the series of an encrypted adapter's server with one session."""
    figures = AdapterFigures({("Apply", "ok"): 1}, 64, {"charge": 0.01, "compute": 0.1}, 236, 1)
    exporter = Exporter(ADAPTER_SERIES)
    exporter.add(AdapterCollector(lambda: figures))
    return stack.enter_context(MetricsServer(exporter.registry)).address


def service(stack: ExitStack, folder: Path) -> tuple[EvidenceClient, str]:
    """Start an evidence service; return one of its peers, and its page."""
    (folder / "secret.hex").write_text("ab" * 32)
    (folder / "secret.hex").chmod(0o600)
    config = {
        "bind": "127.0.0.1:0",
        "run_secret": "secret.hex",
        "hosting": {"worker-0": [0]},
        "contract": {"virtual_workers": 1},
    }
    server, session, facts = start_service(validated(ServiceConfig, config), folder)
    stack.callback(session.run.close)
    stack.callback(server.stop)
    assert facts.contract is not None
    contract = parse(ServiceContract, facts.contract.read_bytes().strip())
    vendor = SimulatedVendor.load_or_create(places.simulator_folder())
    client = EvidenceClient(
        facts.address,
        manifest_digest=contract.digest(),
        orchestrator_key=contract.orchestrator_key,
        attester=Attester("worker-0", LocalPlatform(vendor.platform())),
    )
    return stack.enter_context(client), facts.metrics.removeprefix("http://").removesuffix("/metrics")


def run_of(home: Path) -> WholeRun:
    """Return a run with a witness, a public split, checkpoints and a worker that dies.

    It could lose another one: a run that could not is warned of after a minute.
    """
    (home / "data").mkdir()
    (home / "witness").mkdir()
    features, labels = examples()
    np.savez(home / "data" / "public.npz", features=features, labels=labels)
    split = {"kind": "npz", "path": "public.npz", "features": "features", "public": True}
    run = whole_run(
        home,
        steps=STEPS,
        num_workers=4,
        dp_config=RENYI,
        evaluation={"dataset": split, "every": 1},
        ledger={"witness": str(home / "witness")},
        # In the last step before the look: panels show departures of the last minute.
        disturb=on("step", "worker-1", "dies", LOOK - 1),
    )
    checkpoint = CheckpointConfig(checkpoint_frequency=2, storage="packages")
    archive = Archive(checkpoint, run.session.run_id, home, lambda line: None)
    run.coordinator.order = replace(run.coordinator.order, assignment=NewRun(archive))
    return run


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Train a run whose page, like those beside it, is scraped by Prometheus; its page is gone at the end."""
    home = tmp_path_factory.mktemp("watched")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("RAYCLOAK_HOME", str(home))
        run, exporter, looks = run_of(home), Exporter(), []
        exporter.add(LedgerCollector(lambda: metrics_view(run.session.control.actors["ledger"].handle.view())))
        exporter.add(GpuReadingCollector(lambda: READINGS))
        page = MetricsServer(exporter.registry)
        stack.callback(page.close)
        peer, service_page = service(stack, home)
        operations, training_page = training_service(stack)
        pages = {
            "training-service": training_page,
            "raycloak": page.address,
            "service": service_page,
            "ray": page_of_ray(stack),
            "loss": page_of_a_loss(stack),
            "adapter": page_of_an_adapter(stack),
        }
        prometheus = stack.enter_context(Prometheus(pages, RULES))
        prometheus.sees('raycloak_service_calls_total{method="Challenge",code="ok"} == 0')

        def admitted(manifest, evidence_class):
            metrics = made(manifest, evidence_class)
            # As the GPUs of the readings would, which no worker here has.
            metrics.gpu_memory_taken(2**30)
            exporter.add(metrics)
            prometheus.sees(f'raycloak_run_info{{run="{manifest.run_id}"}}')
            return metrics

        def stepped(report):
            if report.step == 1:
                peer.challenge()
            operations.operation_ended("optim_step", "done", 0.01, 0.1)
            # A scrape and an evaluation of the rules for each step.
            prometheus.sees(f"run:raycloak_steps_finished:max == {report.step}")
            if report.step == LOOK:
                prometheus.sees('raycloak_service_calls_total{method="Challenge",code="ok"} == 1')
                looks.append(prometheus.moment())

        order = run.coordinator.order
        made = order.reporting.metrics
        reporting = replace(order.reporting, metrics=admitted, progress=stepped)
        run.coordinator.order = replace(order, reporting=reporting)
        run.coordinator._reporter.to = reporting
        run.train()
        # Not `await_reader`, which waits for one scrape: on a busy machine that one may take longer than its timeout.
        prometheus.sees(f'raycloak_run_state{{run="{run.session.run_id}",state="complete"}} == 1')
        page.close()
        prometheus.sees('up{job="raycloak"} == 0')
        yield Watched(prometheus, run, looks[0], time.time())


QUERIES = [
    (board.file, panel.title, query.expr, panel.phase)
    for board in FILES.values()
    for row in board.rows
    for panel in row.panels
    for query in panel.queries
] + [
    (board.file, annotation.name, annotation.expr, "running")
    for board in FILES.values()
    for annotation in board.annotations
]


def test_every_query_of_every_dashboard_has_data_at_the_phase_it_is_meant_for(watched: Watched) -> None:
    silent = []
    for file, title, expr, phase in QUERIES:
        samples = watched.query(expr, phase, "by-loss" if phase == "loss" else None)
        if all(math.isnan(value) for _, value in samples):
            silent.append((file, title, expr))
    assert silent == []


def test_every_series_that_may_be_exported_is_written(watched: Watched) -> None:
    names = set(watched.prometheus.ask("label/__name__/values"))
    declared = {name for series in SERIES if series.privacy.exportable for name in sample_names(series)}
    assert declared - names == set()
    assert not {name for series in SERIES if not series.privacy.exportable for name in sample_names(series)} & names


def test_every_rule_is_evaluated_and_none_of_a_healthy_run_is_firing(watched: Watched) -> None:
    groups = watched.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == sum(len(group["rules"]) for group in yaml.safe_load(RULES.read_text())["groups"])
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
    # One failed attempt is no trend; three make the share.
    quiet = {"run:raycloak_step_attempts_failed:ratio15m"}
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    assert {name for name in recorded if not watched.query(name, "running")} == quiet


def test_a_finished_run_says_finished_though_its_page_is_gone(watched: Watched) -> None:
    (verdict,) = {expr for _, title, expr, _ in QUERIES if title == "Verdict"}
    assert watched.query(verdict, "running") == [({}, 0.0)]
    assert watched.query(verdict, "ended") == [({}, 8.0)]
    # Of this run alone: on a busy machine the scrape of another page may have failed at that moment.
    assert watched.query('raycloak_run_info{run="$run"}', "running") != []
    assert watched.query('raycloak_run_info{run="$run"}', "ended") == []
    state = 'max by (state) (last_over_time(raycloak_run_state{run="$run"}[$__range])) == 1'
    assert watched.query(state, "ended") == [({"state": "complete"}, 1.0)]
    assert watched.query('last_over_time(raycloak_steps_finished{run="$run"}[$__range])', "ended")[0][1] == STEPS


def test_every_lost_worker_and_failed_attempt_is_an_increase(watched: Watched) -> None:
    """A counter without a line of zeros would show nothing of its first event."""
    for name in ("raycloak_worker_failures_total", "raycloak_step_attempts_failed_total"):
        ((_, value),) = watched.query(f'sum(increase({name}{{run="$run"}}[$__range]))', "running")
        assert value > 0.5


def test_a_run_that_is_not_private_is_marked(watched: Watched) -> None:
    (expr,) = {expr for file, title, expr, _ in QUERIES if (file, title) == ("run.json", "Privacy")}
    assert watched.query(expr, "running") == [({}, 0.0)]
    assert watched.query(expr, "running", "by-loss") == [({}, 1.0)]


def test_the_variables_of_every_dashboard_have_values(watched: Watched) -> None:
    for board in FILES.values():
        for variable in board.variables:
            metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.query).groups()
            assert {labels.get(label) for labels, _ in watched.query(metric, "running")} - {None}
