"""The bounds within which a guarantee is proved: an error where one does not hold, in every interpreter.

An ``assert`` states what cannot happen. It is no check: ``python -O`` drops it.
"""

import sys

from raycloak.metrics.errors import ConfigError, RefusedError


def require_bound(holds: bool, bound: str) -> None:
    """Refuse what a proof is not for; RefusedError ``proof_bound``.

    Args:
        bound: what has to hold, as a clause without a number that depends on data.
    """
    if not holds:
        raise RefusedError(
            "proof_bound",
            f"{bound}: a guarantee is proved for nothing else.",
            "This is a defect, or a message was changed on its way. Please report it.",
        )


def require_assertions() -> None:
    """Refuse an interpreter that drops assertions; ConfigError ``assertions_off``.

    To be called where a process begins to compute or to charge: nobody has tried such a process.
    """
    if sys.flags.optimize:
        raise ConfigError(
            "assertions_off",
            "Python runs with -O or PYTHONOPTIMIZE, so checks of this program are left out.",
            "Unset PYTHONOPTIMIZE where this process and the cluster's nodes start, and leave out -O.",
        )
