"""The kustomizations, built by kubectl: one run in plain pods, the same in confidential guests, and a site's own."""

import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import typer.main
import yaml

from raycloak.attestation.collateral.files import load_collateral
from raycloak.attestation.policy.policy import load_policy
from raycloak.coordinator.cli.app import app
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.service.settings import load_settings
from tests.deploy.definitions import ROOT, complaints

KUBECTL = shutil.which("kubectl")
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}\Z")
CONFIDENTIAL = {
    r"ConfigMap/raycloak-evidence/.*",
    r"NetworkPolicy/raycloak/spec/egress/\d+/.*",
    r"RayJob/raycloak-digits/spec/entrypoint",
    *(
        rf"RayJob/raycloak-digits/spec/rayClusterSpec/{group}/template/{field}"
        for group in ("headGroupSpec", r"workerGroupSpecs/0")
        for field in (
            r"metadata/annotations/io\.katacontainers\..*",
            r"spec/runtimeClassName",
            r"spec/nodeSelector/[\w.~-]+",
            r"spec/volumes/(reports|evidence)/.*",
            r"spec/containers/[\w-]+/volumeMounts/(reports|evidence)/.*",
            r"spec/containers/ray-worker/resources/(limits|requests)/nvidia\.com~1p?gpu",
        )
    ),
}
"""The fields in which the overlay may differ from its base."""


SERVICE = {
    r"ConfigMap/raycloak-service/.*",
    r"Service/raycloak-training/.*",
    r"NetworkPolicy/raycloak/spec/ingress/\d+/.*",
    r"RayJob/raycloak/(metadata/name|spec/(entrypoint|activeDeadlineSeconds|backoffLimit))",
    *(
        rf"RayJob/raycloak/spec/rayClusterSpec/headGroupSpec/template/spec/{field}"
        for field in (
            r"volumes/service(-tls)?/.*",
            r"containers/ray-head/ports/training/.*",
            r"containers/ray-head/volumeMounts/service(-tls)?/.*",
        )
    ),
}
"""The fields in which the service may differ from a run."""

VAULTS = {
    r"RayJob/raycloak-digits/spec/entrypoint",
    r"PersistentVolumeClaim/raycloak-(ledger|orchestrator)/.*",
    r"RayJob/raycloak-digits/spec/rayClusterSpec/workerGroupSpecs/0/rayStartParams/num-gpus",
    *(
        rf"RayJob/raycloak-digits/spec/rayClusterSpec/{group}/template/spec/{field}"
        for group, roles in (("headGroupSpec", "ledger|orchestrator"), (r"workerGroupSpecs/0", "aggregator|worker"))
        for field in (
            rf"initContainers/vault-({roles})/.*",
            rf"volumes/({roles})-(socket|memory|state)/.*",
            rf"containers/[\w-]+/volumeMounts/({roles})-socket/.*",
            r"containers/[\w-]+/volumeMounts/reports/.*",
            r"containers/ray-worker/resources/(limits|requests)/nvidia\.com~1pgpu",
        )
    ),
}
"""The fields in which a run with vaults of the machine may differ from a confidential one."""


@cache
def built(folder):
    """Return the documents of a kustomization, by kind and name."""
    if KUBECTL is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False, timeout=60)
    assert made.returncode == 0, made.stderr
    documents = yaml.load_all(made.stdout, Loader=yaml.CSafeLoader)
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in documents}


def leaves(value, path=""):
    """Yield (path, value) of every leaf; an item of a list goes by its name where it has one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}/{key.replace('/', '~1')}")
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            name = inner.get("name", index) if isinstance(inner, dict) else index
            yield from leaves(inner, f"{path}/{name}")
    else:
        yield path, value


def leaves_of(documents):
    return {f"{name}{path}": value for name, each in documents.items() for path, value in leaves(each)}


@pytest.fixture(params=["base", "confidential", "vaults"])
def run(request):
    """The RayJob of each kustomization of one run."""
    return built(ROOT / "deploy" / request.param)["RayJob/raycloak-digits"]


def test_a_run_is_valid_and_brings_its_own_cluster(run):
    assert complaints("rayjobs", run) == []
    assert "clusterSelector" not in run["spec"], "KubeRay refuses retries on a cluster that the job does not own"


def test_the_base_is_the_cluster_of_the_manifest():
    documents = built(ROOT / "deploy" / "base")
    cluster = yaml.load((ROOT / "ray-cluster.yaml").read_text(), Loader=yaml.CSafeLoader)
    assert documents["RayJob/raycloak-digits"]["spec"]["rayClusterSpec"] == cluster["spec"]
    assert "RayCluster/raycloak" not in documents


def test_the_overlay_differs_from_its_base_in_what_makes_it_confidential_alone():
    base, overlay = (leaves_of(built(ROOT / "deploy" / name)) for name in ("base", "confidential"))
    changed = {path for path in base.keys() | overlay.keys() if base.get(path) != overlay.get(path)}
    unwanted = [path for path in sorted(changed) if not any(re.fullmatch(each, path) for each in CONFIDENTIAL)]
    assert unwanted == []
    # The head has no GPU, and a worker reads no policy: of the rest, each is there.
    used = {each for each in CONFIDENTIAL if any(re.fullmatch(each, path) for path in changed)}
    assert all("headGroupSpec" in each and "nvidia" in each for each in CONFIDENTIAL - used)


def job_leaves(folder):
    """Return the leaves of a kustomization, with its RayJob by one name whatever it is called."""
    return {
        re.sub(r"^RayJob/[\w-]+", "RayJob/raycloak", path): value for path, value in leaves_of(built(folder)).items()
    }


def test_the_service_differs_from_a_run_in_what_makes_it_a_service_alone():
    base, overlay = (job_leaves(ROOT / "deploy" / name) for name in ("base", "service"))
    changed = {path for path in base.keys() | overlay.keys() if base.get(path) != overlay.get(path)}
    assert [path for path in sorted(changed) if not any(re.fullmatch(each, path) for each in SERVICE)] == []
    assert [each for each in SERVICE if not any(re.fullmatch(each, path) for path in changed)] == []


def test_the_service_is_valid_and_reached_on_one_port_under_tls():
    documents = built(ROOT / "deploy" / "service")
    job = documents["RayJob/raycloak-service"]
    assert complaints("rayjobs", job) == []
    head, _ = pods(job)
    (container,) = head["spec"]["containers"]
    settings = yaml.safe_load(documents["ConfigMap/raycloak-service"]["data"]["service.yaml"])
    port = int(settings["bind"].rpartition(":")[2])
    assert {each["name"]: each["containerPort"] for each in container["ports"]}["training"] == port
    (address,) = documents["Service/raycloak-training"]["spec"]["ports"]
    assert (address["port"], address["targetPort"]) == (port, "training")
    # KubeRay adds the label of the role.
    labels = {**head["metadata"]["labels"], "ray.io/node-type": "head"}
    assert documents["Service/raycloak-training"]["spec"]["selector"].items() <= labels.items()
    rule = documents["NetworkPolicy/raycloak"]["spec"]["ingress"][-1]
    assert rule["ports"] == [{"protocol": "TCP", "port": port}]
    assert rule["from"][0]["podSelector"]["matchLabels"] == {"raycloak.io/uses-training": "true"}
    mounts = {each["name"]: Path(each["mountPath"]) for each in container["volumeMounts"]}
    assert shlex.split(job["spec"]["entrypoint"])[2:] == ["raycloak", "serve", str(mounts["service"] / "service.yaml")]
    assert {Path(settings["tls"][each]) for each in ("certificate", "key")} == {
        mounts["service-tls"] / "tls.crt",
        mounts["service-tls"] / "tls.key",
    }
    (secret,) = [each["secret"] for each in head["spec"]["volumes"] if each["name"] == "service-tls"]
    assert secret["defaultMode"] == 0o440, "for the container's group alone"


def test_nobody_has_a_token_of_the_service_before_its_site_makes_one():
    settings = load_settings(ROOT / "deploy" / "service" / "service.yaml")
    assert [each.sha256 for tenant in settings.tenants.values() for each in tenant.token_sha256] == ["0" * 64]


def test_the_example_of_a_service_fits_its_cluster():
    settings = load_settings(ROOT / "deploy" / "service" / "service.yaml")
    (group,) = built(ROOT / "deploy" / "service")["RayJob/raycloak-service"]["spec"]["rayClusterSpec"][
        "workerGroupSpecs"
    ]
    assert settings.limits.active_clients * settings.run["num_workers"] <= group["maxReplicas"]


def pods(run):
    spec = run["spec"]["rayClusterSpec"]
    return spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]


def test_the_overlay_puts_every_pod_into_a_guest_that_knows_its_trustee():
    documents = built(ROOT / "deploy" / "confidential")
    head, worker = pods(documents["RayJob/raycloak-digits"])
    assert head["spec"]["runtimeClassName"] == "kata-qemu-snp"
    assert worker["spec"]["runtimeClassName"] == "kata-qemu-nvidia-gpu-snp"
    assert worker["spec"]["nodeSelector"] == {"nvidia.com/cc.mode.state": "on"}
    resources = worker["spec"]["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["nvidia.com/pgpu"] == "1"
    parameters = {
        pod["metadata"]["annotations"]["io.katacontainers.config.hypervisor.kernel_params"] for pod in (head, worker)
    }
    (trustee,) = (re.fullmatch(r"agent\.aa_kbc_params=cc_kbc::http://([\w.-]+):(\d+)", each) for each in parameters)
    rule = documents["NetworkPolicy/raycloak"]["spec"]["egress"][-1]
    namespace = rule["to"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert trustee[1] == f"kbs-service.{namespace}"
    assert rule["ports"] == [{"protocol": "TCP", "port": int(trustee[2])}]


def test_the_overlays_policy_admits_nothing_before_it_has_measurements(tmp_path):
    documents = built(ROOT / "deploy" / "confidential")
    for name, text in documents["ConfigMap/raycloak-evidence"]["data"].items():
        (tmp_path / name).write_text(text)
    policy = load_policy(tmp_path / "policy.yaml")
    assert not policy.accepts_simulated
    assert (policy.sev_snp.measurements, policy.tdx.measurements) == ((), ())
    assert policy.gpus_per_worker == 1
    load_collateral(tmp_path / "collateral.yaml")


def overrides(arguments):
    return [arguments[index + 1] for index, word in enumerate(arguments) if word == "--set"]


def test_the_entrypoint_is_a_command_that_a_retry_may_repeat(run):
    """A retry that started a second run would pay for it again."""
    python, _, name, *arguments = shlex.split(run["spec"]["entrypoint"])
    assert (python, name) == ("python", "raycloak")
    command = typer.main.get_command(app).commands["run"]
    context = command.make_context("run", list(arguments[1:]))
    assert context.params["once"]
    assert 1 <= run["spec"]["backoffLimit"] <= 5
    image = Path(context.params["config"])
    config = load_config(ROOT / image.relative_to("/opt/raycloak"), overrides(arguments))
    assert config.metrics.bind == "0.0.0.0:9464"
    assert config.attestation.bind == "0.0.0.0:7443"
    mounts = {mount["mountPath"]: mount["name"] for mount in pods(run)[0]["spec"]["containers"][0]["volumeMounts"]}
    if config.policy is not None:
        assert mounts[str(Path(config.policy).parent)] == "evidence"


def test_no_cluster_outlives_its_run_and_nothing_deletes_the_state(run):
    rules = run["spec"]["deletionStrategy"]["deletionRules"]
    ends = {("jobStatus", "SUCCEEDED"), ("jobStatus", "FAILED"), ("jobDeploymentStatus", "Failed")}
    by_end = {end: {} for end in ends}
    for rule in rules:
        (condition,) = ((key, value) for key, value in rule["condition"].items() if key != "ttlSeconds")
        by_end[condition][rule["policy"]] = rule["condition"]["ttlSeconds"]
    for end, policies in by_end.items():
        # The GPUs are free within minutes; nobody's look at a failed head's logs keeps them.
        assert min(policies.values()) <= 300, end
        # A head that stays holds the volume of the state.
        assert policies["DeleteCluster"] <= 3600
    assert "shutdownAfterJobFinishes" not in run["spec"], "KubeRay takes rules in its place, never beside it"
    for template in pods(run):
        owned = [each for each in template["spec"]["volumes"] if "ephemeral" in each]
        assert owned == [], "such a claim would be deleted with its pod"


def test_the_vaults_differ_from_a_confidential_run_in_what_makes_them_vaults_alone():
    base, overlay = (leaves_of(built(ROOT / "deploy" / name)) for name in ("confidential", "vaults"))
    changed = {path for path in base.keys() | overlay.keys() if base.get(path) != overlay.get(path)}
    assert [path for path in sorted(changed) if not any(re.fullmatch(each, path) for each in VAULTS)] == []
    # The head has no GPU.
    used = {each for each in VAULTS if any(re.fullmatch(each, path) for path in changed)}
    assert all("headGroupSpec" in each and "nvidia" in each for each in VAULTS - used)


VAULT_PODS = {"head": ("ledger", "orchestrator"), "worker": ("aggregator", "worker")}


@pytest.fixture(params=VAULT_PODS)
def vault_pod(request):
    """The specification of a pod with vaults, and their roles."""
    head, worker = pods(built(ROOT / "deploy" / "vaults")["RayJob/raycloak-digits"])
    return {"head": head, "worker": worker}[request.param]["spec"], VAULT_PODS[request.param]


def volumes_of(container):
    return {each["name"] for each in container["volumeMounts"]}


def test_a_vault_has_a_user_of_its_own_and_no_right_beyond_it(vault_pod):
    users = dict(
        re.findall(r"useradd --uid (\d+) .* (?:raycloak-)?(\w+) ", (ROOT / "deploy" / "Dockerfile").read_text())
    )
    spec, roles = vault_pod
    assert users[str(spec["securityContext"]["runAsUser"])] == "ray"
    for role, vault in zip(roles, spec["initContainers"], strict=True):
        assert vault["command"] == ["raycloak", "vault", role, f"/etc/raycloak/vaults/{role}.yaml"]
        own = vault["securityContext"]
        assert users[str(own["runAsUser"])] == role
        assert own["runAsGroup"] == own["runAsUser"]
        assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert vault["resources"]["requests"] == vault["resources"]["limits"]


def test_a_vault_starts_before_ray_and_shares_a_socket_with_it_alone(vault_pod):
    """Containers of a pod have process namespaces of their own unless the pod says otherwise."""
    spec, roles = vault_pod
    assert not {"shareProcessNamespace", "hostPID", "hostIPC"} & spec.keys()
    (ray,) = spec["containers"]
    mounts = {each["name"]: each for each in ray["volumeMounts"]}
    memory = {each["name"] for each in spec["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory"}
    for role, vault in zip(roles, spec["initContainers"], strict=True):
        assert vault["restartPolicy"] == "Always"
        assert volumes_of(vault) & volumes_of(ray) == {f"{role}-socket"}
        assert mounts[f"{role}-socket"]["readOnly"], "Ray could put a socket of its own there"
        assert {f"{role}-socket", f"{role}-memory"} <= memory
        paths = {each["mountPath"]: each["name"] for each in vault["volumeMounts"]}
        assert paths["/tmp"] == paths["/dev/shm"] == f"{role}-memory"
    first, second = spec["initContainers"]
    assert volumes_of(first) & volumes_of(second) <= {"reports"}


def test_ray_reaches_neither_the_report_interface_nor_a_gpu_of_a_vault(vault_pod):
    spec, _ = vault_pod
    (ray,) = spec["containers"]
    assert "reports" not in volumes_of(ray)
    # The ledger presents no evidence.
    with_reports = {each["name"] for each in spec["initContainers"] if "reports" in volumes_of(each)}
    assert with_reports == {each["name"] for each in spec["initContainers"]} - {"vault-ledger"}
    with_gpu = [
        each["name"]
        for each in (ray, *spec["initContainers"])
        if any("gpu" in resource for resource in each["resources"]["limits"])
    ]
    assert with_gpu in ([], ["vault-worker"])


def test_a_site_names_the_image_of_vaults_by_its_digest_too(tmp_path):
    shutil.copytree(ROOT / "deploy", tmp_path / "raycloak" / "deploy")
    folder = tmp_path / "site"
    folder.mkdir()
    text = site().replace("deploy/confidential", "deploy/vaults")
    (folder / "kustomization.yaml").write_text(re.sub(r"^components:.*\n", "", text, flags=re.MULTILINE))
    for name in ("policy.yaml", "collateral.yaml"):
        (folder / name).write_text(f"# {name} of the site\n")
    for template in pods(built(folder)["RayJob/raycloak-digits"]):
        assert all(DIGEST.search(each["image"]) for each in template["spec"]["initContainers"])


def site():
    """Return the kustomization of a site's own that docs/operations.md shows."""
    text = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if "kind: Kustomization" in block]
    return found


def test_the_documented_site_names_digests_and_mounts_its_data(tmp_path):
    shutil.copytree(ROOT / "deploy", tmp_path / "raycloak" / "deploy")
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(site())
    for name in ("policy.yaml", "collateral.yaml"):
        (folder / name).write_text(f"# {name} of the site\n")
    documents = built(folder)
    job = documents["RayJob/raycloak-digits"]
    assert complaints("rayjobs", job) == []
    assert documents["ConfigMap/raycloak-evidence"]["data"]["policy.yaml"] == "# policy.yaml of the site\n"
    for template in pods(job):
        (container,) = template["spec"]["containers"]
        assert DIGEST.search(container["image"])
        (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/data"]
        assert mount["readOnly"]
        (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == mount["name"]]
        claim = volume["persistentVolumeClaim"]["claimName"]
        assert documents[f"PersistentVolumeClaim/{claim}"]["spec"]["accessModes"] == ["ReadOnlyMany"]
    assert {each["metadata"].get("namespace") for each in documents.values()} == {"training"}
