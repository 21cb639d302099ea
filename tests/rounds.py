"""How often a test repeats what differs only by chance: a tenth as often, unless ``RAYCLOAK_ALL_ROUNDS=1``.

A bug that such a test is there for shows in one of the first rounds. All of them are for a change of what is tested.
"""

import os

ALL = os.environ.get("RAYCLOAK_ALL_ROUNDS", "")


def rounds(every: int) -> int:
    """Return how many of ``every`` rounds are made."""
    return every if ALL else max(every // 10, 1)
