"""Shared fixtures: every test gets a `RAYCLOAK_HOME` of its own; those that need Ray or PostgreSQL share one."""

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.memory_folder import memory_folder
from tests.postgres import PostgresServer, binaries

if TYPE_CHECKING:
    from raycloak_lab.bench.chaos.raylets import Raylets

pytest_plugins = ["tests.marks"]
ROOT = Path(__file__).resolve().parent.parent
QUICK_START = ROOT / "tests" / "quick_start"
"""On the path of Ray's processes: see `sitecustomize.py` there."""

# Half a million objects come of importing and collecting, and stay. The collector looks through them again and again,
# unless it is off until they are there and then leaves them out: a tenth of the time of a test run.
gc.disable()

# Derandomised: a failure is a change of the code, never of the draw. No example database outside the test's folder.
settings.register_profile("raycloak", deadline=None, derandomize=True, database=None)
settings.load_profile("raycloak")


@pytest.fixture(autouse=True)
def raycloak_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's own state folder, in the environment as `RAYCLOAK_HOME`; not created yet."""
    home = tmp_path / "home"
    monkeypatch.setenv("RAYCLOAK_HOME", str(home))
    return home


def _ray_environment(folder: Path) -> dict[str, str]:
    """Return variables that keep Ray's and other libraries' files in ``folder``.

    The token is a file, so `~/.ray` stays as it is.
    """
    (folder / "ray").mkdir()
    token = folder / "auth_token"
    token.touch(mode=0o600)
    token.write_text("0" * 31 + "1" + "f" * 32)
    return {
        # Nobody reads what Ray tells of machines and of log files, twice a second and in every cluster.
        "LOG_NAME_UPDATE_INTERVAL_S": "60",
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
        # The first for workers that a driver elsewhere asks for, where raycloak is not installed.
        "PYTHONPATH": f"{ROOT}{os.pathsep}{QUICK_START}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",  # nobody uses one: every actor here has an environment of its own
        "RAY_allow_out_of_band_object_ref_serialization": "0",
        # What libraries would keep in the user's folders.
        "MPLCONFIGDIR": str(folder / "matplotlib"),
        "WANDB_CACHE_DIR": str(folder / "wandb"),
        "WANDB_CONFIG_DIR": str(folder / "wandb"),
        "WANDB_DATA_DIR": str(folder / "wandb"),
    }


# Set when this file is imported, since Ray reads its authentication mode once, at its own import. The folder is short:
# a socket path below it must stay under 108 characters.
_FOLDER = tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True)
_RAY_ENVIRONMENT = _ray_environment(Path(_FOLDER.name))
os.environ.update(_RAY_ENVIRONMENT)
# For `tmp_path`: each test's ledgers and logs commit thousands of times, which took a quarter of the suite's time.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory_folder())


def pytest_collection_finish() -> None:
    """Collect garbage from now on, of what the tests make."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_unconfigure() -> None:
    """Remove Ray's temporary folder."""
    _FOLDER.cleanup()


@pytest.fixture(scope="session")
def ray_environment() -> Mapping[str, str]:
    """Return Ray's variables for a child process."""
    return _RAY_ENVIRONMENT


@dataclass(frozen=True)
class RayCluster:
    """The session's local cluster; ``environment`` lets a child process join it by a plain ``ray.init()``."""

    address: str
    environment: Mapping[str, str]


@pytest.fixture(scope="session")
def ray_cluster(ray_environment: Mapping[str, str]) -> Iterator[RayCluster]:
    """Yield one local Ray of 8 CPUs for the whole session; this process is a driver of it."""
    import ray

    context = ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=256 * 2**20)
    address = context.address_info["gcs_address"]
    yield RayCluster(address, {**ray_environment, "RAY_ADDRESS": address})
    ray.shutdown()


@pytest.fixture(scope="session")
def raylets(ray_environment: Mapping[str, str]) -> Iterator["Raylets"]:
    """Yield a cluster of nodes for the whole session: a head without CPUs, to which a test adds the nodes it needs.

    No process is a driver of it but the children that tests start with its ``environment``.
    """
    from raycloak_lab.bench.chaos.raylets import Raylets

    with Raylets(ray_environment) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def postgres_binaries() -> Path:
    """Return where PostgreSQL's programs are; skips where they, or its driver, are not installed."""
    pytest.importorskip("psycopg", reason="needs psycopg (pip install 'raycloak[postgresql]')", exc_type=ImportError)
    folder = binaries()
    if folder is None:
        pytest.skip("needs a PostgreSQL server (apt-get install postgresql)")
    return folder


@pytest.fixture(scope="session")
def postgres(postgres_binaries: Path) -> Iterator[PostgresServer]:
    """Yield one durable server for the whole session. A test that kills or reconfigures one starts its own."""
    server = PostgresServer(postgres_binaries)
    yield server
    server.stop()


@dataclass(frozen=True)
class Finished:
    """The traces of a child process: exit code and both streams."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Runner:
    """A runner of this interpreter in a folder outside the repository, with the repository's packages importable."""

    folder: Path

    def __call__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, path: Path = ROOT, deadline_s: float = 600
    ) -> Finished:
        """Run ``python *arguments`` with ``path`` as PYTHONPATH.

        Raises:
            subprocess.TimeoutExpired: after ``deadline_s`` seconds.
        """
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(path), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run_python(tmp_path: Path) -> Runner:
    """Start a child interpreter in an empty folder ``run_python.folder``."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return Runner(folder)


@pytest.fixture(scope="session")
def run_python_in() -> type[Runner]:
    """Return the runner of `run_python`, for a folder that the caller gives."""
    return Runner


@pytest.fixture
def own_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test take a bundle of code, which a process keeps for good, and take it back afterwards."""
    from raycloak.workers.inputs import user_code
    from raycloak.workers.inputs.code_bundle import CodeBundle

    taken: list[CodeBundle] = []
    monkeypatch.setattr(user_code, "_TAKEN", taken)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    own = {Path(name).parts[0].removesuffix(".py") for bundle in taken for name in bundle.files}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in own or (file and Path(file).is_relative_to(tmp_path)):
            del sys.modules[name]
