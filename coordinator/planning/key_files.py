"""Key files that lie where they must not: below a folder that `ray job submit --working-dir` uploads.

Ray keeps such a folder in its control store, unpacks it on every node, and gives the copies no mode of their own. So a
key in it has been shown to whoever reaches the cluster. A key is known by its content, since any file may hold one.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from raycloak.coordinator.config import home
from raycloak.metrics.errors import ConfigError

WHERE = "a folder of the machines that need it, mode 0700, such as /etc/raycloak; name it by its absolute path"

_LARGEST = 2**14
"""Bytes of the longest file that is looked into: every key of ours is shorter."""
# As a line of its own: a program that names the words holds no key.
_PEM = re.compile(rb"^-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----\s*$", re.MULTILINE)
_HEX = re.compile(rb"\s*[0-9a-fA-F]{64}\s*")
_DIGESTS = (".sha256", ".sha256sum", ".digest")
_PRIVATE = (
    {"name", "mlkem", "x25519"},
    {"name", "ed25519"},
    {"ed25519", "ml_dsa_65"},
    {"root", "platform_ca", "tcb_signer"},
)
"""The fields of the private files that raycloak writes: of a recipient, an authority, a signer, a simulated vendor."""
_UNSENT = {".git", ".venv", "venv", "__pycache__"}
"""Folders that Ray leaves out by itself."""


def require_none_in_job(folder: Path) -> None:
    """Refuse a job in whose working directory a key lies, or the state folder.

    Args:
        folder: the job's copy of its working directory.

    Raises:
        ConfigError: ``key_in_job``.
    """
    for path, what in keys_below(folder):
        raise ConfigError(
            "key_in_job",
            f"{path} is {what}, and was uploaded with the job's working directory: Ray keeps and spreads it in the "
            "clear.",
            f"Take a new one, and keep it in {WHERE}.",
        )


def keys_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the state folder if it lies below ``folder``, then each file there that holds a key; and what it is.

    A link to a file counts as the file, which Ray uploads in its place.
    """
    state = home.home_path()
    if state.is_relative_to(folder) or state.resolve().is_relative_to(folder.resolve()):
        yield state, "the state folder, with the ledger and its keys"
    for inner, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _UNSENT)
        if "ledger.sqlite" in names:
            yield Path(inner), "a state folder, with a ledger and its keys"
            folders.clear()
            continue
        for name in sorted(names):
            if (what := _key_in(Path(inner, name))) is not None:
                yield Path(inner, name), what


def _key_in(path: Path) -> str | None:
    """Return which key a file holds; None for no key of a known form, or a file that cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    if _HEX.fullmatch(content) and path.suffix not in _DIGESTS:
        return "a run secret, a data owner's key or a fingerprint key"
    if _PEM.search(content):
        return "a private key in PEM"
    try:
        found = json.loads(content) if content.lstrip().startswith(b"{") else None
    except (ValueError, RecursionError):
        found = None
    return "a private key" if isinstance(found, dict) and set(found) in _PRIVATE else None
