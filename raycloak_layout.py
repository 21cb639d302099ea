"""The distribution's version, and a check against a user's file that shadows one of its packages.

raycloak installs four packages with plain names (`coordinator`, `workers`, `attestation`, `metrics`). A script's
own directory comes first on `sys.path`, so a `metrics.py` beside it would be imported in place of ours and fail
far away with a confusing message. Every package calls :func:`check_siblings` when it is imported. This module has
a name of its own because none of the four can be relied on to be ours.
"""

from importlib.util import find_spec
from pathlib import Path

VERSION = "0.1.0"
PACKAGES = ("coordinator", "workers", "attestation", "metrics")


class PackageShadowedError(ImportError):
    """A file outside the raycloak distribution takes the name of one of its packages."""


def check_siblings() -> None:
    """Raise :class:`PackageShadowedError` unless every package that imports would find stands beside this file."""
    root = Path(__file__).resolve().parent
    for name in PACKAGES:
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        expected = root / name / "__init__.py"
        if found != expected:
            raise PackageShadowedError(
                f"import of '{name}' finds {found or 'no file'} instead of raycloak's {expected}. "
                f"Rename your own '{name}', or start the script from another directory."
            )
