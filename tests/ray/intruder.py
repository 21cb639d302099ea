"""What Ray's user, without any capability, tries at a machine whose vaults are apart; beside `hostile`.

Its argument is JSON: ``{"folder": of the machine, "socket": with {role}, "private": path of data, "other": of data that
nobody lists, "vaults": process ids, "found": file,
"code": digest that is listed}``. It prints what each attempt gave, and copies all files that it
can read into ``found``.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from raycloak.attestation.appraisal.mutual import present_orchestrator
from raycloak.attestation.core.evidence import Challenge
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.policy.policy import load_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.planning.dry_run import mechanism_of
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.vaults.machine_vault import MachineVault
from raycloak.coordinator.vaults.openings import LedgerOpening, OrchestratorOpening, PlatformOpening, WorkerOpening
from raycloak.coordinator.vaults.platform_vault import PlatformVault
from raycloak.coordinator.vaults.run_orchestrator import RunOrchestrator
from raycloak.metrics.errors import RaycloakError
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.messages import Admission, WorkerSetup
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.train_worker import TrainWorker

_ATTACH = 16
"""``PTRACE_ATTACH``, in the kernel's ``ptrace.h``."""


def outcome(attempt: Callable[[], object]) -> str:
    """Return the code by which an attempt was refused, or what it gave."""
    try:
        return f"GOT {attempt()!r}"[:200]
    except RaycloakError as error:
        return error.code
    except OSError as error:
        return type(error).__name__


def attempts(told: dict) -> Iterator[tuple[str, str]]:
    """Yield each attempt at a vault's socket, and what came of it."""

    def at(role: str, opening, ask: Callable[[MachineVault], object]) -> str:
        def tried() -> object:
            with MachineVault(told["socket"].replace("{role}", role), opening) as vault:
                return ask(vault)

        return outcome(tried)

    ledger = LedgerOpening(url=f"sqlite:///{told['folder']}/ray/own.sqlite", create=True, witness=None)
    terms = OpeningTerms(1000.0, 1e-5, "rdp")
    yield "forged evidence", at("platform", PlatformOpening(), lambda vault: vault.ask(PlatformVault.quote, bytes(64)))
    yield "an account of his own", at("ledger", ledger, lambda vault: vault.ask(PrivacyLedger.open_account, "x", terms))
    yield "a raised cap", at("ledger", ledger, lambda vault: vault.ask(PrivacyLedger.change_cap, "hospital", 1e6))
    state = OrchestratorOpening(state_directory=f"{told['folder']}/ray/own", bind=None, simulated=False)
    secret = f"{told['folder']}/ray/secret"
    yield (
        "a run secret that he knows",
        at("orchestrator", state, lambda vault: vault.ask(RunOrchestrator.open_run, secret, None)),
    )
    listed = bytes.fromhex(told["code"])
    opening = WorkerOpening(member_id="worker-9", simulated=False, gpus=0, cpus=1)
    setups = {
        "data that nobody lists": DatasetDescriptor(kind="npz", path=told["other"]),
        "data by a path around": DatasetDescriptor(kind="npz", path=f"{told['private']}/../../ray/data.npz"),
        "private data as public": DatasetDescriptor(kind="npz", path=told["private"], public=True),
    }
    project = Path(told["folder"]) / "project"
    for name, dataset in setups.items():
        own = setup(dataset, project, "own_model:model", (listed,))
        yield name, at("worker", opening, lambda vault, own=own: vault.ask(TrainWorker.prepare, own))

    evil = Path(told["folder"]) / "open" / "evil"
    evil.mkdir()
    (evil / "own_model.py").write_text("def model():\n    raise SystemExit('examples')\n")
    private = DatasetDescriptor(kind="npz", path=told["private"])
    codes = {
        "code that nobody lists": (CodeBundle.read(evil).digest,),
        "any code": None,
        "other code under a listed name": (listed,),
    }
    for name, code in codes.items():
        own = setup(private, evil, "own_model:model", code)
        yield name, at("worker", opening, lambda vault, own=own: vault.ask(TrainWorker.prepare, own))

    def little_noise(vault: MachineVault) -> object:
        vault.ask(TrainWorker.prepare, setup(private, project, "own_model:model", (listed,)))
        # Planned for data of his own, of the same shape.
        own = demo_config() | {
            "num_workers": 2,
            "virtual_workers": 4,
            "steps": 1,
            "expected_batch_size": 80,
            "evaluation": None,
            "dataset": {"kind": "npz", "path": "data.npz"},
            "dp_config": {"target_epsilon": 500.0, "target_delta": 1e-5},
        }
        planned = mechanism_of(parse_config(own), Path(told["folder"]) / "ray")
        return vault.ask(TrainWorker.compute_known_answer, planned)

    yield "little noise", at("worker", opening, little_noise)

    (file,) = (Path(told["folder"]) / "ray").glob("raycloak/runs/*/manifest.json")
    running = Manifest.model_validate_json(file.read_bytes())
    policy = load_policy(project / "policy.yaml")
    own_key = IdentityKey.generate()
    own_platform = LocalPlatform(SimulatedVendor.load_or_create(Path(told["folder"]) / "ray" / "vendor").platform("x"))

    def joined(**changes: bytes) -> Callable[[MachineVault], object]:
        """Return how a worker is asked for evidence to a manifest of his own, by an orchestrator of his own."""

        def ask(vault: MachineVault) -> object:
            facts = vault.ask(TrainWorker.prepare, setup(private, project, "own_model:model", (listed,)))
            computation = running.computation.model_copy(update={"numerics": facts.numerics})
            planned = computation.mechanism, *computation.measurements
            known = vault.ask(TrainWorker.compute_known_answer, *planned)
            stated = {"computation": computation, "known_answer": known, **changes}
            manifest = running.model_copy(update=stated)
            admission = Admission(
                manifest=manifest,
                policy=policy,
                collateral=collateral,
                secure_aggregation=True,
                orchestrator=present_orchestrator(own_key, manifest.run_id, manifest.digest(), own_platform),
            )
            challenge = Challenge(
                nonce=bytes(32),
                run_id=manifest.run_id,
                member_id="worker-9",
                role="worker",
                manifest_digest=manifest.digest(),
                expires_at=int(time.time()) + 600,
            )
            return vault.ask(TrainWorker.present, challenge, admission)

        return ask

    with MachineVault(told["socket"].replace("{role}", "platform"), PlatformOpening()) as vault:
        collateral = vault.ask(PlatformVault.collateral)
    own_ledger = PrivacyLedger(f"sqlite:///{told['folder']}/ray/own.sqlite", create=True)
    with closing(own_ledger):
        yield "a ledger of his own", at("worker", opening, joined(ledger_key=own_ledger.public_key))
    yield "an orchestrator of his own", at("worker", opening, joined(orchestrator_key=own_key.public))


def setup(dataset: DatasetDescriptor, base: Path, model: str, code: tuple[bytes, ...] | None) -> WorkerSetup:
    """Return the setup of a run of his own."""
    loss = LossSpec.of("cross_entropy")
    return WorkerSetup(
        model=ModelSource(name=model), loss=loss, dataset=dataset, base=str(base), seed=0, device="cpu", code=code
    )


def reached(vaults: list[int]) -> Iterator[tuple[int, str, str]]:
    """Yield each process of a vault, each way into it, and what came of that."""
    libc = ctypes.CDLL(None, use_errno=True)

    def attached(process: int) -> object:
        if libc.ptrace(_ATTACH, process, None, None) != 0:
            raise PermissionError
        return "attached"

    for process in vaults:
        proc = Path(f"/proc/{process}")
        yield process, "ptrace", outcome(lambda process=process: attached(process))
        for name in ("mem", "environ", "maps", "auxv"):
            yield process, f"/proc/PID/{name}", outcome(lambda file=proc / name: len(file.read_bytes()))
        for name in ("fd", "map_files"):
            yield process, f"/proc/PID/{name}", outcome(lambda folder=proc / name: len(list(folder.iterdir())))
        yield process, "a signal", outcome(lambda process=process: os.kill(process, 0))


def readable(folder: Path, found: Path) -> list[str]:
    """Copy all that this user can read below a folder into one file; return what it cannot enter or read."""
    refused = []
    with found.open("wb") as copied:
        for here, folders, files in os.walk(folder, onerror=lambda error: refused.append(str(error.filename))):
            del folders
            for path in (Path(here) / name for name in files if Path(here) / name != found):
                with suppress(OSError):
                    if path.is_file():
                        if os.access(path, os.R_OK):
                            copied.write(path.read_bytes())
                        else:
                            refused.append(str(path))
    return refused


def main() -> None:
    told = json.loads(sys.argv[1])
    done = {
        "user": os.getuid(),
        "attempts": dict(attempts(told)),
        "reached": list(reached(told["vaults"])),
        "refused": readable(Path(told["folder"]), Path(told["found"])),
    }
    sys.stdout.write(json.dumps(done))


if __name__ == "__main__":
    main()
