"""A vault of the machine runs the code that its settings list, whatever a driver sends; asked at its socket."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raycloak.coordinator.vaults.listener import Listener
from raycloak.coordinator.vaults.machine_vault import MachineVault
from raycloak.coordinator.vaults.openings import WorkerOpening
from raycloak.coordinator.vaults.settings import read_settings
from raycloak.metrics.errors import RefusedError
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.models.models import ModelSource
from raycloak.workers.train_worker import TrainWorker
from tests.protocol import config, worker_setup

OPENING = WorkerOpening(member_id="worker-0", simulated=True, gpus=0, cpus=1)


@pytest.fixture
def setup(tmp_path: Path) -> WorkerSetup:
    found = worker_setup(config(), tmp_path)
    Path(found.base, "bundled_code.py").write_text("from torch import nn\n\ndef model():\n    return nn.Linear(6, 3)\n")
    return found.model_copy(update={"model": ModelSource.of("bundled_code:model")})


@pytest.fixture
def socket(setup: WorkerSetup, tmp_path: Path) -> Iterator[str]:
    """Yield the socket of a worker's vaults that this user may ask, and whose settings list the project's code."""
    raw = {
        "socket": str(tmp_path / "socket"),
        "peer": str(os.getuid()),
        "ledgers": [],
        "policies": [],
        "data": [{"path": setup.base, "public": True}],
        "code": [CodeBundle.read(setup.base).digest.hex()],
    }
    file = tmp_path / "worker.yaml"
    file.write_text(yaml.safe_dump(raw))
    file.chmod(0o600)
    with Listener("worker", read_settings("worker", file), file) as listener:
        thread = threading.Thread(target=listener.run)
        thread.start()
        yield raw["socket"]
        listener.close()
        thread.join()


def test_guarantee_a_vault_of_the_machine_runs_no_code_that_its_settings_do_not_list(setup, socket):
    listed = CodeBundle.read(setup.base).digest
    with MachineVault(socket, OPENING) as vault:

        def prepare(code: tuple[bytes, ...] | None, **fields) -> bytes:
            return vault.ask(TrainWorker.prepare, setup.model_copy(update={"code": code, **fields})).code

        for code in (None, (b"x" * 32,), (listed, b"x" * 32)):
            with pytest.raises(RefusedError) as refused:
                prepare(code)
            assert refused.value.code == "code_not_served"
        with pytest.raises(RefusedError) as refused:
            prepare((listed,), model=ModelSource.of("os:getcwd"))
        assert refused.value.code == "code_unlisted"
        assert prepare((listed,)) == listed
