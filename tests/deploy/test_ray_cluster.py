"""The manifests: accepted by the resource definitions of KubeRay, and as careful as docs/operations.md says."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from raycloak.version import VERSION
from raycloak_lab.bench.chaos.raylets import HEALTH_CHECKS
from tests.deploy.definitions import ROOT, accepted, complaints, repeated_keys, validator

RAYCLOAK_PORT = 9464
EVIDENCE_PORT = 7443
DEAD_NODE_S = 5
"""docs/operations.md promises that a dead node is noticed within this time."""


def load(path):
    return list(yaml.load_all((ROOT / path).read_text(), Loader=yaml.CSafeLoader))


@pytest.fixture
def cluster():
    (document,) = load("ray-cluster.yaml")
    return document


def pod_specs(cluster):
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def head_of(cluster):
    return pod_specs(cluster)[0]["containers"][0]


def environment(container):
    return {item["name"]: item.get("value") for item in container["env"]}


def mounted(spec, path):
    """Return the volume that is mounted at ``path`` in the pod's only container."""
    (name,) = [m["name"] for m in spec["containers"][0]["volumeMounts"] if m["mountPath"] == path]
    (volume,) = [v for v in spec["volumes"] if v["name"] == name]
    return volume


def test_the_cluster_is_valid(cluster):
    assert complaints("rayclusters", cluster) == []


@pytest.mark.parametrize(
    "path",
    [
        ("spec",),
        ("spec", "authOptions"),
        ("spec", "headGroupSpec"),
        ("spec", "headGroupSpec", "template", "spec"),
        ("spec", "headGroupSpec", "template", "spec", "containers", 0),
        ("spec", "headGroupSpec", "template", "spec", "volumes", 0, "persistentVolumeClaim"),
        ("spec", "workerGroupSpecs", 0),
        ("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "securityContext"),
    ],
    ids=lambda path: "/".join(map(str, path)),
)
def test_an_unknown_field_makes_it_invalid(cluster, path):
    changed = copy.deepcopy(cluster)
    node = changed
    for key in path:
        node = node[key]
    node["replicaCount"] = 1
    assert accepted("rayclusters", cluster)
    assert not accepted("rayclusters", changed)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("authOptions", "mode"), "tokens"),
        (("rayVersion",), 2.6),
        (("headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("headGroupSpec", "template", "spec", "containers", 0, "resources", "limits", "memory"), "16 GB"),
        (("workerGroupSpecs", 0, "replicas"), "3"),
    ],
    ids=lambda item: "/".join(map(str, item)) if isinstance(item, tuple) else repr(item),
)
def test_a_wrong_value_makes_it_invalid(cluster, path, value):
    changed = copy.deepcopy(cluster)
    node = changed["spec"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert not accepted("rayclusters", changed)


def test_a_repeated_port_makes_it_invalid(cluster):
    changed = copy.deepcopy(cluster)
    ports = head_of(changed)["ports"]
    for port in ports:
        port["protocol"] = "TCP"
    ports.append(copy.deepcopy(ports[0]))
    assert repeated_keys(validator("rayclusters").schema, changed)


def test_the_access_token_is_required_everywhere(cluster):
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "raycloak-auth"}
    for spec in pod_specs(cluster):
        assert environment(spec["containers"][0])["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" not in environment(spec["containers"][0])


def test_state_outlives_the_cluster(cluster):
    head = pod_specs(cluster)[0]
    home = environment(head["containers"][0])["RAYCLOAK_HOME"]
    assert Path(home).is_absolute()
    claim, *_ = load("deploy/base/prerequisites.yaml")
    assert mounted(head, home)["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def selects(selector, cluster, role):
    """Return whether a selector names the pods of a group; KubeRay adds the label of the role."""
    spec = cluster["spec"]
    group = spec["headGroupSpec"] if role == "head" else spec["workerGroupSpecs"][0]
    labels = {**group["template"]["metadata"]["labels"], "ray.io/node-type": role}
    return selector["matchLabels"].items() <= labels.items()


def test_evictions_leave_the_head_and_as_many_workers_as_the_run_needs(cluster):
    """A whole minAvailable: RayCluster has no scale subresource, without which Kubernetes takes nothing else."""
    _, head, workers = load("deploy/base/prerequisites.yaml")
    assert head["spec"]["minAvailable"] == 1
    assert workers["spec"]["minAvailable"] == cluster["spec"]["workerGroupSpecs"][0]["minReplicas"]
    assert [selects(each["spec"]["selector"], cluster, "head") for each in (head, workers)] == [True, False]
    assert [selects(each["spec"]["selector"], cluster, "worker") for each in (head, workers)] == [False, True]


def test_the_head_and_a_worker_never_share_a_machine(cluster):
    """The orchestrator is in the head, and aggregators are in the workers' pods: see actors.off_this_node."""
    for spec, role, other in zip(pod_specs(cluster), ("head", "worker"), ("worker", "head"), strict=True):
        (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert selects(term["labelSelector"], cluster, other)
        assert not selects(term["labelSelector"], cluster, role)


def test_workers_go_to_the_pool_of_gpus(cluster):
    worker = pod_specs(cluster)[1]
    assert worker["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert worker["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_what_ray_writes_to_disk_is_memory(cluster):
    for spec in pod_specs(cluster):
        for path in ("/tmp", "/tmp/ray", "/dev/shm"):
            assert mounted(spec, path)["emptyDir"]["medium"] == "Memory"
    for worker in pod_specs(cluster)[1:]:
        assert all("persistentVolumeClaim" not in volume for volume in worker["volumes"])


UNITS = {"Gi": 2**30, "Mi": 2**20}


def bytes_of(quantity):
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def test_the_object_store_fits_its_shared_memory_and_the_volumes_fit_the_limit(cluster):
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group, spec in zip(groups, pod_specs(cluster), strict=True):
        shared = bytes_of(mounted(spec, "/dev/shm")["emptyDir"]["sizeLimit"])
        assert int(group["rayStartParams"]["object-store-memory"]) < shared
        in_memory = sum(bytes_of(v["emptyDir"]["sizeLimit"]) for v in spec["volumes"] if "emptyDir" in v)
        assert in_memory < bytes_of(spec["containers"][0]["resources"]["limits"]["memory"])


def test_no_pod_runs_as_root_or_can_become_root(cluster):
    for spec in pod_specs(cluster):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_requests_equal_limits(cluster):
    for spec in pod_specs(cluster):
        for container in spec["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]


def test_only_the_workers_compute(cluster):
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (group,) = cluster["spec"]["workerGroupSpecs"]
    worker = group["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "utility" in environment(worker)["NVIDIA_DRIVER_CAPABILITIES"]
    assert group["minReplicas"] >= 2


def test_a_dead_node_is_noticed_within_seconds(cluster):
    settings = environment(head_of(cluster))
    assert {name: value for name, value in settings.items() if "health_check" in name} == HEALTH_CHECKS
    period_ms, timeout_ms, failures = (
        int(HEALTH_CHECKS[f"RAY_health_check_{name}"]) for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    assert failures >= 3
    assert failures * period_ms + timeout_ms <= 1000 * DEAD_NODE_S
    grace = pod_specs(cluster)[0]["terminationGracePeriodSeconds"]
    assert int(settings["RAY_JOB_STOP_WAIT_TIME_S"]) < grace


def test_prometheus_finds_and_reaches_every_metrics_port(cluster):
    ports = {port["name"]: port["containerPort"] for port in head_of(cluster)["ports"]}
    assert ports["raycloak"] == RAYCLOAK_PORT
    (monitor,) = load("deploy/pod-monitor.yaml")
    scraped = {ports[endpoint["port"]] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert scraped == {8080, 44217, 44227, RAYCLOAK_PORT}
    (policy,) = load("deploy/base/network-policy.yaml")
    opened = [{p["port"] for p in rule["ports"]} for rule in policy["spec"]["ingress"] if "ports" in rule]
    assert ports["evidence"] == EVIDENCE_PORT
    assert opened == [scraped, {ports["dashboard"]}, {ports["evidence"]}]
    for rule in policy["spec"]["ingress"] + policy["spec"]["egress"]:
        assert rule.get("from") or rule.get("to"), "a rule without a peer opens the pods to everyone"


def test_manifests_speak_of_one_cluster_one_image_and_the_pinned_ray(cluster):
    (policy,) = load("deploy/base/network-policy.yaml")
    (monitor,) = load("deploy/pod-monitor.yaml")
    for role in ("head", "worker"):
        assert selects(policy["spec"]["podSelector"], cluster, role)
        assert selects(policy["spec"]["ingress"][0]["from"][0]["podSelector"], cluster, role)
        assert selects(monitor["spec"]["selector"], cluster, role)
    # A name alone: every site puts a digest of its own registry in its place.
    assert {c["image"] for spec in pod_specs(cluster) for c in spec["containers"]} == {"raycloak"}
    pinned = re.search(r"^ray(?:\[\w+\])?==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["spec"]["rayVersion"] == pinned[1]


def test_the_cluster_stands_at_the_top_of_the_repository():
    assert (ROOT / "ray-cluster.yaml").resolve() == ROOT / "deploy" / "base" / "ray-cluster.yaml"


def test_the_image_has_the_wheel_of_this_version_on_a_base_that_its_builder_names():
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    # Without a default no build takes a tag, which can be moved to another image.
    assert text.split("\n\n")[0].splitlines()[-2:] == ["ARG BASE", "FROM ${BASE}"]
    assert f"/src/dist/raycloak-{VERSION}-py3-none-any.whl[" in text
    assert re.findall(r"^COPY (\S+)", text, re.MULTILINE) == ["examples"]
    assert "USER 1000" in text
