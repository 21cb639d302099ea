import socket
import threading
import time
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from raycloak.metrics.collectors import LedgerCollector, LedgerFigures
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.exporter import Exporter
from raycloak.metrics.server import MetricsServer, parse_bind

SOON_S = 15.0
"""Less than a page waits for a reader whose interval it does not know, and more than a busy machine takes."""


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
        return response.read().decode()


def scrape(server):
    return get(server.url, **{"X-Prometheus-Scrape-Timeout-Seconds": "10"})


@pytest.fixture
def exporter():
    exporter = Exporter()
    exporter.add(LedgerCollector(lambda: LedgerFigures((), entries=4, fencing=2)))
    return exporter


def test_the_page_shows_our_registry_and_nothing_of_the_default_one(exporter):
    with MetricsServer(exporter.registry) as server:
        page = get(server.url)
    assert "raycloak_ledger_up 1.0" in page
    assert "python_info" not in page
    assert "process_" not in page


def test_a_scrape_may_ask_for_single_series(exporter):
    with MetricsServer(exporter.registry) as server:
        page = get(server.url + "?name[]=raycloak_ledger_fencing")
    assert "raycloak_ledger_fencing 2.0" in page
    assert "raycloak_ledger_up" not in page


def test_port_zero_takes_a_free_port_and_the_address_names_it():
    with MetricsServer(CollectorRegistry()) as a, MetricsServer(CollectorRegistry()) as b:
        assert a.address != b.address
        assert a.address.startswith("127.0.0.1:")
        assert int(a.address.rpartition(":")[2]) > 0


def test_close_releases_the_port_and_ends_the_thread(exporter):
    before = set(threading.enumerate())
    server = MetricsServer(exporter.registry)
    host, port = parse_bind(server.address)
    server.close()
    server.close()
    assert set(threading.enumerate()) - before == set()
    with socket.socket() as client:
        assert client.connect_ex((host, port)) != 0
    with MetricsServer(exporter.registry, server.address) as again:
        assert again.address == server.address


@pytest.mark.parametrize(
    "bind", ["", "9464", ":9464", "localhost", "localhost:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1", "::1:80"]
)
def test_a_bind_that_is_no_address_is_refused(bind):
    with pytest.raises(ConfigError) as caught:
        MetricsServer(CollectorRegistry(), bind)
    assert caught.value.code == "metrics_bind"
    assert caught.value.exit_code == 2


def test_a_taken_port_is_refused_with_a_way_out():
    with MetricsServer(CollectorRegistry()) as server, pytest.raises(ConfigError) as caught:
        MetricsServer(CollectorRegistry(), server.address)
    assert caught.value.code == "metrics_bind"
    assert server.address in str(caught.value)
    assert caught.value.remedy


def test_ipv6_addresses_are_written_in_brackets():
    assert parse_bind("[::1]:9464") == ("::1", 9464)
    assert parse_bind("0.0.0.0:9464") == ("0.0.0.0", 9464)


def awaited(server):
    """Return the thread that waits for the reader."""
    thread = threading.Thread(target=server.await_reader)
    thread.start()
    return thread


def test_guarantee_a_page_waits_for_the_next_scrape_of_a_prometheus_that_reads_it(exporter):
    with MetricsServer(exporter.registry) as server:
        scrape(server)
        thread = awaited(server)
        get(server.url)  # a person's browser is not waited for, and does not end the wait
        thread.join(0.1)
        assert thread.is_alive()
        scrape(server)
        thread.join(60)
        assert not thread.is_alive()


def test_guarantee_a_page_that_no_prometheus_reads_waits_for_nobody(exporter):
    with MetricsServer(exporter.registry) as server:
        get(server.url)
        began = time.monotonic()
        server.await_reader()
        assert time.monotonic() - began < SOON_S


def test_guarantee_a_prometheus_that_is_overdue_is_not_waited_for(exporter):
    with MetricsServer(exporter.registry) as server:
        scrape(server)
        scrape(server)  # a few milliseconds later, which is its interval then
        began = time.monotonic()
        server.await_reader()
        assert time.monotonic() - began < SOON_S
