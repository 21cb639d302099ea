"""`raycloak doctor --boundary`: finds what on this machine lets Ray's user into its vaults, and what mends it.

Root sees all of it. For another user, what cannot be looked at is a warning.
"""

import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from raycloak.attestation.attester.tsm import TSM_REPORTS
from raycloak.attestation.processes.channel import PeerProcess
from raycloak.coordinator.cli.doctor import Finding
from raycloak.coordinator.cluster.processes import process_table
from raycloak.coordinator.vaults.settings import ROLES, PlatformSettings, VaultSettings, read_settings, uid_of
from raycloak.metrics.errors import RaycloakError

_EVIDENCE_CAPABILITY: Final = 1 << 1
"""``CAP_DAC_OVERRIDE``: entries of the kernel's report interface are root's, whoever made them."""
_UNIT: Final = "in the unit of the vault; deploy/systemd has one"


def examine_boundary(folder: Path, root: Path = Path("/")) -> list[Finding]:
    """Check the vaults whose settings are in a folder, as ``ROLE.yaml``, and Ray's processes here.

    Args:
        root: of the file systems that are looked at.
    """
    found: list[Finding] = []
    listeners: dict[str, PeerProcess] = {}
    peers: set[int] = set()
    for role in ROLES:
        path = folder / f"{role}.yaml"
        if not path.exists():
            continue
        owner = path.stat().st_uid
        try:
            settings = read_settings(role, path, owner)
            peers.add(uid_of(settings.peer))
        except RaycloakError as error:
            found.append(Finding(f"{role} settings", "fail", error.message, error.remedy))
            continue
        listener = _listener(settings)
        if owner not in (0, None if listener is None else listener.uid):
            mended = f"chown root {path}"
            found.append(Finding(f"{role} settings", "fail", f"{path} belongs to another user than its vaults", mended))
        else:
            found.append(Finding(f"{role} settings", "ok", f"{path} can be changed by its user and root alone"))
        if listener is None:
            remedy = f"systemctl start raycloak-vault@{role}"
            found.append(Finding(f"{role} socket", "fail", f"nobody listens at {settings.socket}", remedy))
            continue
        listeners[role] = listener
        found += _of_listener(role, settings, listener)
    if not listeners and not found:
        missing = f"{folder} has no settings of a vault"
        return [Finding("settings", "fail", missing, "Write ROLE.yaml there; see docs/boundary.md.")]
    found.append(_apart(listeners))
    found += _of_rays_processes(peers)
    return [*found, check_swap(root), check_reports(root, peers), *check_devices(root, peers)]


def _listener(settings: VaultSettings) -> PeerProcess | None:
    """Return the process that listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        try:
            end.connect(settings.socket)
        except OSError:
            return None
        return PeerProcess.of(end)


def _of_listener(role: str, settings: VaultSettings, listener: PeerProcess) -> Iterator[Finding]:
    process, uid = listener
    others = [settings.peer, *(settings.vaults if isinstance(settings, PlatformSettings) else ())]
    if uid == 0 or uid in map(uid_of, others):
        what = "root" if uid == 0 else "the user of a relay or another vault"
        yield Finding(f"{role} user", "fail", f"its vaults run as {what}", f"Give it a user of its own {_UNIT}.")
    else:
        yield Finding(f"{role} user", "ok", f"its vaults run as user {uid}")
    yield from _closed(role, process, _EVIDENCE_CAPABILITY)
    # The kernel gives it to root once the process has closed its memory.
    if Path(f"/proc/{process}/mem").stat().st_uid == uid:
        traced = "other processes of its user can trace it"
        yield Finding(f"{role} memory", "fail", traced, f"systemctl restart raycloak-vault@{role}")
    else:
        yield Finding(f"{role} memory", "ok", "the kernel closes it to other processes of its user")


def _closed(name: str, process: int, allowed: int) -> Iterator[Finding]:
    """Check capabilities, ``no_new_privs`` and user namespace of a process."""
    status = _status(process)
    capabilities = int(status.get("CapEff", "0"), 16) | int(status.get("CapPrm", "0"), 16)
    if capabilities & ~allowed:
        remedy = f"CapabilityBoundingSet= {_UNIT}"
        yield Finding(f"{name} capabilities", "fail", f"it has capabilities {capabilities:#x}", remedy)
    else:
        yield Finding(f"{name} capabilities", "ok", "none that a vault has no use for")
    if status.get("NoNewPrivs") != "1":
        yield Finding(f"{name} privileges", "fail", "a program of root's gives it more", f"NoNewPrivileges=yes {_UNIT}")
    else:
        yield Finding(f"{name} privileges", "ok", "no program gives it more")
    try:
        shares = Path(f"/proc/{process}/ns/user").readlink() == Path("/proc/self/ns/user").readlink()
    except OSError:
        yield Finding(f"{name} namespace", "warn", "its user namespace cannot be looked at", "Run this as root.")
        return
    if not shares:
        yield Finding(f"{name} namespace", "fail", "it is in another user namespace", f"PrivateUsers=no {_UNIT}")
    else:
        yield Finding(f"{name} namespace", "ok", "it is in this user namespace")


def _apart(listeners: Mapping[str, PeerProcess]) -> Finding:
    """Check that no two roles have one user."""
    by_user: dict[int, list[str]] = {}
    for role, listener in listeners.items():
        by_user.setdefault(listener.uid, []).append(role)
    shared = next((roles for roles in by_user.values() if len(roles) > 1), None)
    if shared is not None:
        return Finding("users", "fail", f"{' and '.join(shared)} have one user", f"Give each role its own {_UNIT}.")
    return Finding("users", "ok", "each role has a user of its own")


def _of_rays_processes(peers: set[int]) -> Iterator[Finding]:
    """Check that Ray has no capability, and that its processes are those of the settings' user."""
    raylets = [each.pid for each in process_table() if Path(each.title.partition(" ")[0]).name == "raylet"]
    if not raylets:
        yield Finding("ray", "warn", "Ray does not run here: its user and capabilities are unknown", "Look again then.")
    for process in raylets:
        uid = int(_status(process).get("Uid", "-1").split()[0])
        if uid in peers and uid != 0:
            yield Finding("ray user", "ok", f"Ray runs as user {uid}, which the settings name")
        else:
            remedy = "Run Ray as the peer of the settings, in a unit of its own."
            yield Finding("ray user", "fail", f"Ray runs as user {uid}, whom no settings name, or as root", remedy)
        yield from _closed("ray", process, 0)


def check_swap(root: Path) -> Finding:
    """Check that no memory is written to a disk."""
    try:
        areas = (root / "proc" / "swaps").read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        areas = []
    if areas:
        finding = f"{areas[0].split()[0]} may hold the memory of a vault"
        return Finding("swap", "warn", finding, f"swapoff -a, or MemorySwapMax=0 {_UNIT}")
    return Finding("swap", "ok", "there is none")


def check_reports(root: Path, peers: set[int]) -> Finding:
    """Check that Ray's user cannot have evidence made: whoever can enrols keys of its own."""
    path = root / TSM_REPORTS
    if not path.exists():
        return Finding("reports", "ok", f"/{TSM_REPORTS} is not there: nobody has reports made")
    found = path.stat()
    if found.st_uid in peers or found.st_mode & stat.S_IWOTH:
        mended = f"chown root /{TSM_REPORTS} && chmod 755 /{TSM_REPORTS}"
        return Finding("reports", "fail", f"Ray's user can have reports made in /{TSM_REPORTS}", mended)
    return Finding("reports", "ok", f"Ray's user can have no report made in /{TSM_REPORTS}")


def check_devices(root: Path, peers: set[int]) -> list[Finding]:
    """Check that Ray's user cannot open the GPUs, which hold what workers compute."""
    nodes = sorted((root / "dev").glob("nvidia*[0-9]"))
    opened = [each for each in nodes if each.stat().st_uid in peers or each.stat().st_mode & 0o006]
    if opened:
        mended = f"chown root:raycloak-worker {opened[0]} && chmod 660 {opened[0]}"
        return [Finding("devices", "fail", f"Ray's user can open {opened[0]}", mended)]
    return [Finding("devices", "ok", "Ray's user can open no GPU")]


def _status(process: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
