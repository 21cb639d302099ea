"""`raycloak doctor`: finds what on this machine stands in the way of a run, and says what to do about it.

Checks only look, except that the state folder is created as a run would create it. A ``fail`` means that a run would
stop or leak. A ``warn`` names a weaker guarantee.
"""

import os
import shutil
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from raycloak.attestation.attester.tsm import TSM_REMEDY, TSM_REPORTS, tee_nodes
from raycloak.coordinator.cluster.ray_checks import check_temp, temp_folder
from raycloak.coordinator.config import home
from raycloak.coordinator.config.secret_variables import SECRET_VARIABLES
from raycloak.coordinator.ledger.location import check_file_system, file_system, mounts
from raycloak.coordinator.ledger.store import LedgerStore
from raycloak.coordinator.planning.key_files import WHERE, keys_below
from raycloak.metrics.errors import ConfigError, RaycloakError

Status = Literal["ok", "warn", "fail"]

PYTHON = ((3, 11), (3, 13))
SUPPORTED = {"opacus": "1.6", "ray": "2.60", "torch": "2.13"}
"""The release series that the distribution is made for."""

PORTS = {6379: "Ray's control store", 8265: "Ray's dashboard and jobs", 9464: "raycloak's metrics"}
# A container's default of 64 MiB is far below; Ray then keeps objects on a disk.
SHARED_MEMORY_BYTES = 2**30
MEMORY_FILE_SYSTEMS = ("ramfs", "tmpfs")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. ``remedy`` is empty if there is nothing to do."""

    name: str
    status: Status
    finding: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Run every check on this machine, in the order in which to fix problems."""
    mounted = mounts()
    return [
        check_python(sys.version_info[:2]),
        *(check_version(name, installed_version(name)) for name in SUPPORTED),
        check_auth_mode(os.environ),
        check_token(os.environ),
        check_variables(os.environ),
        check_home(),
        check_working_folder(Path.cwd()),
        check_ledger(mounted),
        check_ray_temp(mounted),
        check_shared_memory(Path("/dev/shm")),
        check_service_memory(Path("/")),
        *map(check_port, PORTS),
        check_tee(Path("/")),
    ]


def check_python(version: tuple[int, ...]) -> Finding:
    """Check that the distribution supports the interpreter."""
    text, lowest, highest = (".".join(map(str, each)) for each in (version, *PYTHON))
    if PYTHON[0] <= version <= PYTHON[1]:
        return Finding("python", "ok", text)
    return Finding("python", "fail", f"{text} is not supported", f"Use Python {lowest} to {highest}.")


def installed_version(distribution: str) -> str | None:
    """Read the version of an installed distribution from its metadata, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_version(distribution: str, installed: str | None) -> Finding:
    """Check that ``installed`` is of the supported release series."""
    series = SUPPORTED[distribution]
    if installed is not None and f"{installed}.".startswith(f"{series}."):
        return Finding(distribution, "ok", installed)
    found = f"{installed} is not of series {series}" if installed else "not installed"
    return Finding(distribution, "fail", found, f"pip install '{distribution}=={series}.*'")


def check_auth_mode(environ: Mapping[str, str]) -> Finding:
    """Check that Ray asks its clients for a token. Otherwise any client of a Ray port may run code in every worker."""
    mode = environ.get("RAY_AUTH_MODE")
    if mode == "token":
        return Finding("ray auth", "ok", "RAY_AUTH_MODE=token")
    if mode is None:
        finding = "RAY_AUTH_MODE is not set; a local Ray turns tokens on, one started by ray start may not"
        return Finding("ray auth", "warn", finding, "export RAY_AUTH_MODE=token")
    finding = f"RAY_AUTH_MODE={mode}: anybody who reaches a port of Ray can run code in every worker"
    return Finding("ray auth", "fail", finding, "export RAY_AUTH_MODE=token")


def check_token(environ: Mapping[str, str]) -> Finding:
    """Check that only its owner can read the token file that Ray uses."""
    if environ.get("RAY_AUTH_TOKEN"):
        finding = "RAY_AUTH_TOKEN is in the environment, which child processes and exported events inherit"
        return Finding("ray token", "warn", finding, "Use RAY_AUTH_TOKEN_PATH and a file of mode 0600.")
    setting = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(setting) if setting else Path.home() / ".ray" / "auth_token"
    if not path.exists():
        if setting:
            return Finding("ray token", "fail", f"RAY_AUTH_TOKEN_PATH names {path}, which does not exist", "Create it.")
        return Finding("ray token", "ok", f"{path} does not exist yet; Ray makes it, readable by all: look again after")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return Finding("ray token", "fail", f"{path} has mode {mode:04o}: others can read it", f"chmod 600 {path}")
    return Finding("ray token", "ok", f"{path} has mode {mode:04o}")


def check_variables(environ: Mapping[str, str]) -> Finding:
    """Check that no secret is in the environment, which a Ray that is started here hands to all its processes."""
    # The token has a check of its own.
    found = [name for name in SECRET_VARIABLES if name in environ and name != "RAY_AUTH_TOKEN"]
    if not found:
        return Finding("environment", "ok", "no secret that ray start would hand on")
    finding = f"{', '.join(found)}: ray start would hand them to every process; a run's own Ray gets none"
    return Finding("environment", "warn", finding, f"{SECRET_VARIABLES[found[0]]}, before ray start.")


def check_home() -> Finding:
    """Check that the state folder is absolute, ours to write, and closed to others."""
    try:
        path = home.home()
    except RaycloakError as error:
        return Finding("state", "fail", error.message, error.remedy)
    mode = stat.S_IMODE(path.stat().st_mode)
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding("state", "fail", f"{path} is not writable", f"Set {home.HOME_VARIABLE} to a folder of your own.")
    if mode & 0o077:
        return Finding("state", "warn", f"{path} has mode {mode:04o}: others can look into it", f"chmod 700 {path}")
    return Finding("state", "ok", str(path))


def check_working_folder(folder: Path) -> Finding:
    """Check that no key lies below the folder that a job would be submitted from, nor the state folder."""
    path, what = next(keys_below(folder), (None, ""))
    if path is None:
        return Finding("working folder", "ok", f"no key of a known form is below {folder}")
    finding = f"{path} is {what}: ray job submit --working-dir . uploads it, unless .gitignore or .rayignore lists it"
    return Finding("working folder", "warn", finding, f"Keep it in {WHERE}.")


def check_ledger(mounts: str) -> Finding:
    """Check that the embedded ledger opens, or could be made in its place."""
    try:
        url = home.ledger_url()
        path = Path(url.removeprefix("sqlite:///"))
        check_file_system(path, mounts)
        if not path.exists():
            return Finding("ledger", "ok", f"none yet at {path}; the file system is local")
        LedgerStore(url, create=False).close()
    except RaycloakError as error:
        return Finding("ledger", "fail", error.message, error.remedy)
    return Finding("ledger", "ok", f"{path} opens, is private and on a local file system")


def check_ray_temp(mounts: str) -> Finding:
    """Check that Ray can use its temporary folder, and that it is in memory: Ray spills objects as plain files."""
    try:
        check_temp()
    except ConfigError as error:
        return Finding("ray temp", "fail", error.message, error.remedy)
    folder, _ = temp_folder()
    kind = file_system(folder.resolve(), mounts)
    if kind in MEMORY_FILE_SYSTEMS:
        return Finding("ray temp", "ok", f"{folder} is on {kind}")
    finding = f"{folder} is on {kind}: masked vectors and parameters that Ray spills stay there as plain files"
    return Finding("ray temp", "warn", finding, "Set RAY_TMPDIR to a short path on tmpfs or an encrypted volume.")


def check_shared_memory(folder: Path) -> Finding:
    """Check that the object store fits into shared memory. Otherwise Ray puts it on a disk."""
    if not folder.is_dir():
        missing = f"{folder} is missing: Ray keeps objects on disk"
        return Finding("object store", "warn", missing, "Mount a tmpfs there.")
    free = shutil.disk_usage(folder).free
    if free < SHARED_MEMORY_BYTES:
        finding = f"{folder} has {free / 2**20:.0f} MiB free: Ray keeps on disk what does not fit"
        return Finding("object store", "warn", finding, "Give the container more shared memory (--shm-size).")
    return Finding("object store", "ok", f"{folder} has {free / 2**30:.1f} GiB free")


def check_service_memory(root: Path) -> Finding:
    """Check that a training service for one tenant and an evidence service start here with their default limits."""
    # Here, as nothing else of this command needs gRPC.
    from raycloak.attestation.service.limits import ServiceLimits
    from raycloak.attestation.service.memory import SHARE, mebibytes, process_memory
    from raycloak.coordinator.service.limits import LimitsConfig

    name, given = "memory of services", process_memory(root) // SHARE
    evidence, tenant = ServiceLimits().most_bytes, LimitsConfig().most_bytes(1)
    finding = (
        f"calls may take {mebibytes(given)}; an evidence service takes {mebibytes(evidence)} at most, "
        f"and a training service {mebibytes(tenant)} for one tenant"
    )
    if max(evidence, tenant) > given:
        return Finding(name, "warn", finding, "Serve elsewhere, or with lower limits, such as connections.")
    return Finding(name, "ok", finding)


def check_port(port: int) -> Finding:
    """Check that a server could take ``port`` on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A port that a server has just left is free, although the kernel still holds it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            finding = f"not free for {PORTS.get(port, 'a server')}: {error.strerror}"
            return Finding(f"port {port}", "warn", finding, "Nothing to do if that server already runs here.")
    return Finding(f"port {port}", "ok", "free")


def check_tee(root: Path) -> Finding:
    """Check which interface and device nodes of a trusted execution environment exist below ``root``."""
    found = tee_nodes(root)
    named = ", ".join(f"/{node} ({meaning})" for node, meaning in found.items())
    if TSM_REPORTS in found:
        return Finding("tee", "ok", named)
    if found:
        missing = f"{named}, but /{TSM_REPORTS} is missing: no evidence can be collected"
        return Finding("tee", "warn", missing, TSM_REMEDY)
    finding = "no device of a trusted execution environment: evidence of workers here is SIMULATED"
    return Finding("tee", "warn", finding, "Run the workers in Intel TDX or AMD SEV-SNP guests for hardware evidence.")
