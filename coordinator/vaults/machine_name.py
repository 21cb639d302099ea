"""The name of a machine, which its simulated platform stands for."""

import re
from pathlib import Path
from typing import Any, Final

from raycloak.attestation.core.canonical import digest, length_prefixed

_MACHINE_ID: Final = Path("/etc/machine-id")


def machine_name(_: Any, label: str | None) -> str:
    """Return the name of the machine of the asked actor, for its simulated platform: the same for all who ask there.

    Not guaranteed: that nobody on the machine can change the name. Simulated evidence proves nothing about a machine.
    It stays when Ray or the machine is started again. ``label``, the operator's name for it, comes first. The next is
    the id that the system keeps, hashed, as it should not get around. Nodes without either share one name: they count
    as one machine, since two counts for one machine would let it have too many keys.

    Args:
        label: the node's label `MACHINE_LABEL`; None if it has none.
    """
    if label is not None:
        return f"label {label}"
    try:
        found = _MACHINE_ID.read_text(encoding="utf-8").strip()
    except OSError:
        found = ""
    if not re.fullmatch("[0-9a-f]{32}", found):
        return "unnamed"
    return f"machine id {digest(length_prefixed('raycloak/simulated-machine/v1', found)).hex()}"
