"""Ray's own page has the series that our rules and dashboards read of it."""

import time
import urllib.request

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S = 120.0


@pytest.mark.usefixtures("ray_cluster")
def test_ray_says_where_its_objects_are():
    node = next(node for node in ray.nodes() if node["Alive"])
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline, places = time.monotonic() + DEADLINE_S, set()
    # Ray reports every few seconds.
    while not {"SPILLED", "MMAP_DISK", "MMAP_SHM"} <= places:
        assert time.monotonic() < deadline, f"Ray's page has {places}"
        time.sleep(0.2)
        with urllib.request.urlopen(url, timeout=60) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith("ray_object_store_memory")]
        page = "\n".join(lines) + "\n"
        places = {s.labels["Location"] for family in text_string_to_metric_families(page) for s in family.samples}
