"""The state folder: ``RAYCLOAK_HOME``, and the paths below it.

The home is absolute because the working directory of a Ray job is temporary: a ledger there would start the budget
at zero. Layout: ``ledger.sqlite``, ``data.key``, ``ray.token``, ``simulator/``, ``signer/``,
``orchestrator/<run_id>.sqlite``, ``packages/<run_id>/``, ``checks/<fingerprint>``, ``runs/<name>-<run_id>[-k]/``,
``service/``, ``training-service/``, ``collateral/``.
"""

import itertools
import os
import secrets
from pathlib import Path

from raycloak.attestation.files.private import publish
from raycloak.attestation.orchestrator.state import state_file
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_errors

HOME_VARIABLE = "RAYCLOAK_HOME"


def home() -> Path:
    """Return the state folder, created with mode 0700 if it is missing.

    Raises:
        ConfigError: ``relative_home`` if ``RAYCLOAK_HOME`` is not absolute, ``home_unusable`` if it cannot be made.
    """
    return private_folder(home_path())


def home_path() -> Path:
    """Return the path of the state folder, which need not be there; ConfigError ``relative_home``."""
    setting = os.environ.get(HOME_VARIABLE)
    path = Path(setting) if setting else Path.home() / ".local" / "share" / "raycloak"
    if not path.is_absolute():
        raise ConfigError(
            "relative_home",
            f"{HOME_VARIABLE} is '{path}', which is relative to a folder that may be temporary.",
            "Set it to an absolute path.",
        )
    return path


def ledger_url() -> str:
    """Return the URL of the embedded ledger."""
    return f"sqlite:///{home() / 'ledger.sqlite'}"


def simulator_folder() -> Path:
    """Return the folder of the simulated platform's root and keys, mode 0700."""
    return private_folder(home() / "simulator")


def service_folder() -> Path:
    """Return the folder of the standalone evidence service: its orchestrator's state and contracts, mode 0700."""
    return private_folder(home() / "service")


def training_service_folder() -> Path:
    """Return the folder of the training service: its store, its key, and what clients sent, mode 0700."""
    return private_folder(home() / "training-service")


def collateral_folder() -> Path:
    """Return the folder of collateral that was fetched from policies' collateral services, mode 0700."""
    return private_folder(home() / "collateral")


def data_key_file() -> Path:
    """Return the file of the key that examples given in memory are fingerprinted with; made, mode 0600, if missing."""
    return random_key(home() / "data.key")


def ray_token_file() -> Path:
    """Return the file of the token of the local Ray clusters that runs start; made, mode 0600, if missing."""
    return random_key(home() / "ray.token")


def random_key(path: Path) -> Path:
    """Return the file of a random key of 64 hexadecimal digits; made, mode 0600, if missing.

    Raises:
        ConfigError: ``home_unusable``.
    """
    with file_errors("home_unusable", "write", path):
        publish(path, secrets.token_hex(32).encode() + b"\n")
    return path


def run_lock_file(run_id: str) -> Path:
    """Return the file whose lock the one process that executes the run holds."""
    return private_folder(home() / "orchestrator") / f"{run_id}.lock"


def lock_file_beside(run_dir: Path, run_id: str) -> Path:
    """Return the lock file of a run in the state folder that ``run_dir`` lies in, whichever it is; makes nothing."""
    return run_dir.resolve().parent.parent / "orchestrator" / f"{run_id}.lock"


def orchestrator_file(run_id: str) -> Path:
    """Return the file of a run's orchestrator."""
    return state_file(private_folder(home() / "orchestrator"), run_id)


def packages_folder(run_id: str) -> Path:
    """Return the folder of a run's sealed packages, the same for all its run directories, mode 0700."""
    return private_folder(private_folder(home() / "packages") / run_id)


def check_file(fingerprint: bytes) -> Path:
    """Return the file that records the check of the data with this fingerprint; nothing is created."""
    return home() / "checks" / fingerprint.hex()


def runs_folder() -> Path:
    """Return the folder of all run directories, mode 0700."""
    return private_folder(home() / "runs")


def create_run_folder(name: str, run_id: str) -> Path:
    """Make and return ``runs/<name>-<run_id>``; a repeat of the run gets the first free ``-2``, ``-3`` ... suffix.

    Guarantee: the folder is new and empty, also when several processes ask at once.
    """
    base = runs_folder() / f"{name}-{run_id}"
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(mode=0o700)
        # Making is the test: between a look and the making another process could take the name.
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable: the count does not end")


def private_folder(path: Path) -> Path:
    """Return a folder below the state folder, made with mode 0700 if missing; ConfigError ``home_unusable``."""
    with file_errors("home_unusable", "create the state folder", path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
