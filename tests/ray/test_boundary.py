"""A run on a machine whose vaults are apart, by real users: what Ray's user gets of it, and what comes out of it."""

import json
import os
import re
import shutil
import signal
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import yaml

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.cluster.processes import Process, process_table
from raycloak.coordinator.ledger.store import LedgerStore
from raycloak.coordinator.runs.demo import demo_config
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.terms.manifest import Manifest
from tests.attestation.serving import eventually
from tests.ray import apart, leaks, planted
from tests.ray.apart import RAY, USERS, machine, result

DEADLINE_S = 300
STEPS = 60
MODEL = "from raycloak.coordinator.runs.demo import digits_model\n\n\ndef model():\n    return digits_model()\n"
EVIDENCED = ("orchestrator", "aggregator", "worker")


@pytest.fixture
def folder():
    if (reason := apart.missing()) is not None:
        pytest.skip(reason)
    # Short, because of Ray's sockets below it; and such that every user may enter it.
    made = Path(tempfile.mkdtemp(prefix="rb", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


class Boundary:
    """A machine with data, a ledger, an account and listeners of all roles.

    Attributes:
        config: of a run at its vaults.
    """

    def __init__(self, made: apart.Machine) -> None:
        self.machine, self.folder = made, made.folder
        self.ledger = f"sqlite:///{self.folder}/ledger/ledger.sqlite"
        self.data, self.other = (self.folder / "worker" / name for name in ("data.npz", "other.npz"))
        for path in (self.data, self.other):
            np.savez(path, images=planted.examples(), labels=np.arange(240) % 10)
            made.own(path, "worker")
        np.savez(self.folder / "ray" / "data.npz", images=np.ones((240, 64), np.float32), labels=np.arange(240) % 10)
        secrets = self.folder / "orchestrator" / "secrets"
        secrets.mkdir()
        made.own(secrets, "orchestrator", 0o700)
        self.secret = secrets / "run"
        self.secret.write_text(planted.RUN_SECRET.hex())
        made.own(self.secret, "orchestrator")
        account = ("budget", "open", "hospital", "--epsilon-cap", "8", "--ledger", self.ledger)
        result(made.run(USERS["ledger"], "-m", "raycloak", *account, "--json"))
        self.project = self.folder / "project"
        self.project.mkdir()
        # Of Ray's user, and readable for vaults.
        (self.folder / "open").mkdir()
        os.chown(self.folder / "open", RAY, RAY)
        (self.project / "own_model.py").write_text(MODEL)
        self.code = CodeBundle.read(self.project).digest
        self.config = demo_config() | {
            "num_workers": 2,
            "virtual_workers": 4,
            "steps": STEPS,
            "expected_batch_size": 80,
            "evaluation": None,
            "dataset": {"kind": "npz", "path": str(self.data)},
            "dp_config": {"target_epsilon": 8.0, "target_delta": 1e-5, "accountant": "rdp"},
            "ledger": {"account": "hospital"},
            "model": "own_model:model",
            "policy": "policy.yaml",
            "boundary": {"socket": made.socket},
            "secret_retention": "keep",
        }

    def listen(self) -> None:
        """Start the vaults of every role."""
        made, platform = self.machine, {"platform": self.machine.socket.replace("{role}", "platform")}
        state = {role: str(self.folder / role / "state") for role in ("platform", "orchestrator")}
        vaults = [str(USERS[each]) for each in EVIDENCED]
        made.listen("platform", state=state["platform"], vaults=vaults, sessions=8)
        vendor = SimulatedVendor.load_or_create(Path(state["platform"]))
        accepted = simulated_policy(vendor, code_measurement()).model_copy(update={"code": (self.code,)})
        (self.project / "policy.yaml").write_text(yaml.safe_dump(accepted.model_dump(mode="json")))
        policy = accepted.digest().hex()
        made.listen("ledger", url=self.ledger, sessions=3)
        with closing(LedgerStore(self.ledger, create=False)) as store:
            key = store.public_key.hex()
        secrets = str(self.secret.parent)
        made.listen(
            "orchestrator", state=state["orchestrator"], policies=[policy], secrets=secrets, sessions=2, **platform
        )
        made.listen("aggregator", sessions=3, **platform)
        place = {"path": str(self.data), "account": "hospital", "least_noise": 0.5}
        code = [self.code.hex()]
        made.listen("worker", ledgers=[key], policies=[policy], code=code, data=[place], sessions=6, **platform)

    def command(self, *more: str) -> tuple[str, ...]:
        """Return the command of the run."""
        (self.project / "run.yaml").write_text(yaml.safe_dump(self.config))
        return ("-m", "raycloak", "run", str(self.project / "run.yaml"), "--json", *more)

    @property
    def runs(self) -> Path:
        """The run directories of Ray's user."""
        return self.folder / "ray" / "raycloak" / "runs"


def _steps(runs: Path) -> list[str]:
    """Return the digests of the steps of the one run."""
    lines = [line for file in runs.glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
    return [event["model_digest"] for event in map(json.loads, lines) if event["event"] == "step"]


def _without_boundary(boundary: Boundary) -> str:
    """Return the model that the same run ends with where nothing is apart, as root, on a copy of the ledger."""
    home = boundary.folder / "root"
    home.mkdir(mode=0o700)
    shutil.copy(boundary.folder / "ledger" / "ledger.sqlite", home / "ledger.sqlite")
    shutil.copytree(boundary.folder / "platform" / "state", home / "simulator")
    (home / "simulator").chmod(0o700)
    config = {key: value for key, value in boundary.config.items() if key != "boundary"}
    for file in ("own_model.py", "policy.yaml"):
        shutil.copy(boundary.project / file, home / file)
    (home / "run.yaml").write_text(yaml.safe_dump(config))
    done = boundary.machine.run(
        0, "-m", "raycloak", "run", str(home / "run.yaml"), "--json", "--run-secret", str(boundary.secret),
        RAYCLOAK_HOME=str(home), RAY_TMPDIR=str(home),
    )  # fmt: skip
    return result(done)["model_digest"]


def _needles(boundary: Boundary) -> dict[str, bytes]:
    (manifest,) = (Manifest.model_validate_json(each.read_bytes()) for each in boundary.runs.glob("*/manifest.json"))
    with closing(LedgerStore(boundary.ledger, create=False)) as store:
        key = store.key._key.private_bytes_raw()
    dataset = DatasetDescriptor(kind="npz", path=str(boundary.data)).open("/")
    vendor = planted.vendor_key(boundary.folder / "platform" / "state")
    return {
        **leaks.key_needles("key of the ledger", key),
        **leaks.key_needles("run secret", planted.RUN_SECRET),
        **leaks.key_needles("key of the simulated platforms", vendor),
        **leaks.array_needles("first example", planted.examples()[0]),
        **leaks.array_needles("last example", planted.examples()[-1]),
        **leaks.run_needles(manifest, dataset, Secret(planted.RUN_SECRET), [manifest.computation.initial_parameters]),
    }


def _restored(made: apart.Machine, role: str) -> None:
    """Have the user of a role copy its folder, lose it, and put the copy back."""
    own, kept = made.folder / role, made.folder / "backup" / role
    kept.parent.mkdir(mode=0o755, exist_ok=True)
    kept.mkdir()
    made.own(kept, role, 0o700)
    script = "import pathlib, shutil, sys; own, kept = sys.argv[1:]\n"
    copies = "shutil.copytree(own, kept, dirs_exist_ok=True)\n"
    loses = "[shutil.rmtree(p) if p.is_dir() else p.unlink() for p in pathlib.Path(own).iterdir()]\n"
    puts_back = "shutil.copytree(kept, own, dirs_exist_ok=True)\n"
    done = made.run(USERS[role], "-c", script + copies + loses + puts_back, str(own), str(kept))
    assert done.returncode == 0, done.stderr


def _vaults(folder: Path) -> list[int]:
    """Return the processes of a run's vaults; those of the platform live for a quote."""
    serving = "vaults.hosted:serve_machine"
    roles = [f"{role} {folder / role}.yaml" for role in USERS if role != "platform"]
    return [
        each.pid
        for each in process_table()
        if serving in each.title and any(role in each.title for role in roles) and each.state != "Z"
    ]


def _user(process: Process) -> int | None:
    with suppress(FileNotFoundError):  # it has just ended
        return Path(f"/proc/{process.pid}").stat().st_uid
    return None


def _of_rays_user(driver: int) -> list[Process]:
    """Return the processes of Ray's user that a run's content passes through: its relays and its driver."""
    found = [each for each in process_table() if _user(each) == RAY]
    relays = [each for each in found if re.match(r"ray::\w+Actor", each.title)]
    assert len(relays) >= 5
    return [*relays, *(each for each in found if each.pid == driver)]


def test_guarantee_rays_user_gets_nothing_of_a_run_that_is_apart_and_its_model_is_the_same(folder):
    """Also after ledger and orchestrator were restored from copies, by their own users."""
    with machine(folder) as made:
        boundary = Boundary(made)
        boundary.listen()
        expected = _without_boundary(boundary)
        secret = ("--run-secret", str(boundary.secret))
        run = made.start(RAY, *boundary.command(*secret), log=folder / "run.log", RAY_TMPDIR=str(folder / "ray"))
        eventually(lambda: run.poll() is not None or len(_steps(boundary.runs)) >= 3, DEADLINE_S)
        assert run.poll() is None, (folder / "run.log").read_text()
        # Held in the middle, with all its keys in use.
        os.kill(run.pid, signal.SIGSTOP)
        vaults = _vaults(folder)
        found = folder / "ray" / "found"
        told = {
            "folder": str(folder), "socket": made.socket, "private": str(boundary.data), "other": str(boundary.other),
            "vaults": vaults, "found": str(found), "code": boundary.code.hex(),
        }  # fmt: skip
        done = made.run(RAY, "-m", "tests.ray.intruder", json.dumps(told))
        assert done.returncode == 0, done.stderr[-3000:]
        tried = json.loads(done.stdout)
        # A vault that was asked a moment before the run was held has ended since.
        lived = set(vaults) & set(_vaults(folder))
        assert len(lived) >= 5
        held = [part for each in _of_rays_user(run.pid) for part in leaks.memory_of(each)]
        assert len(held) > 5 * 10, "the memory of relays and driver"
        leaked = leaks.leaks(_needles(boundary), [("what Ray's user can read", found.read_bytes()), *held])
        # Its first step ends, and the run with it.
        for number in (signal.SIGTERM, signal.SIGCONT):
            os.kill(run.pid, number)
        eventually(lambda: run.poll() is not None, DEADLINE_S)
        assert 3 <= len(_steps(boundary.runs)) < STEPS
        for role in ("ledger", "orchestrator"):
            _restored(made, role)
        ended = result(made.run(RAY, *boundary.command("--resume"), RAY_TMPDIR=str(folder / "ray")))
    assert tried["attempts"] == {
        "forged evidence": "vault_peer",
        "an account of his own": "account_of_its_owner",
        "a raised cap": "account_of_its_owner",
        "a run secret that he knows": "secret_not_served",
        "data that nobody lists": "data_not_served",
        "data by a path around": "data_not_served",
        "private data as public": "data_not_served",
        "code that nobody lists": "code_not_served",
        "any code": "code_not_served",
        "other code under a listed name": "code_unlisted",
        "little noise": "noise_not_served",
        "a ledger of his own": "ledger_not_served",
        "an orchestrator of his own": "root_unknown",
    }
    assert {outcome for process, _, outcome in tried["reached"] if process in lived} == {"PermissionError"}
    assert leaked == []
    assert ended["model_digest"] == expected
    assert ended["boundary"] == "vaults"
