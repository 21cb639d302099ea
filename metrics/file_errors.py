"""Errors of files that cannot be used: the fact, and the remedy that fits the system's reason."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raycloak.metrics.errors import ConfigError

_REMEDIES = {
    errno.ENOENT: "Check the path.",
    errno.ENOTDIR: "A part of the path is a file; check the path.",
    errno.EISDIR: "Name a file; this is a folder.",
    errno.EACCES: "Let this user in, or name another place.",
    errno.EPERM: "Let this user in, or name another place.",
    errno.EROFS: "Name a place that can be written to.",
    errno.ENOSPC: "Make room on its disk, then try again.",
    errno.EDQUOT: "Make room within the quota, then try again.",
    errno.EEXIST: "Choose another name, or remove what is there.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.EMFILE: "Allow more open files: ulimit -n.",
}


def file_error(
    code: str, verb: str, path: Path | str, error: OSError, kind: type[ConfigError] = ConfigError
) -> ConfigError:
    """Return the error to raise where ``path`` cannot be used.

    Args:
        verb: the attempt that failed: ``read``, ``write``, ``use`` ...
        error: the system's own; its number chooses the remedy.
        kind: class of the error.
    """
    remedy = _REMEDIES.get(error.errno or 0, "Check the path and the disk.")
    # A file that is to be written need not exist, but its folder must.
    if error.errno == errno.ENOENT and verb != "read":
        remedy = "Make its folder first, or check the path."
    return kind(code, f"cannot {verb} {path}: {error.strerror or error}.", remedy)


@contextmanager
def file_errors(code: str, verb: str, path: Path | str, kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Turn what the system says of ``path`` into the error of :func:`file_error`."""
    try:
        yield
    except OSError as error:
        raise file_error(code, verb, path, error, kind) from None


def require_absent(path: Path) -> None:
    """Require that nothing is at ``path``, where a command will write; ConfigError ``out_exists``."""
    if path.exists():
        raise ConfigError("out_exists", f"{path} already exists.", "Choose another name, or remove it.")
