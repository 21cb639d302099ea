"""The schedule of the chaos bench: which role is hit, by which signal, and when within a step. Pure and seeded.

Guarantee: the same arguments give the same signals. With at least `ALL_ROLES` kills every role is hit.
Not guaranteed: which process or step a signal meets. That depends on the speed of the machine.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from raycloak.metrics.errors import ConfigError

Role = Literal["worker", "aggregator", "ledger", "orchestrator", "driver", "node"]
SignalName = Literal["SIGKILL", "SIGSTOP"]

KILLED_ROLES: tuple[Role, ...] = get_args(Role)[:-1]
ALL_ROLES = len(KILLED_ROLES)
STOPPED_SHARE = 0.15
"""The share of kills that only stop a process. The run's deadlines must then notice it."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One planned signal.

    Attributes:
        moment: share of the usual time from one commit to the next at which it is sent, in [0, 1).
        pick: process of the role, as a share of their number, in [0, 1).
    """

    role: Role
    signal: SignalName
    moment: float
    pick: float


def make_schedule(kills: int, seed: int, processes: Mapping[Role, int], nodes_lost: int = 0) -> tuple[Strike, ...]:
    """Draw ``kills`` strikes at roles, by number of ``processes``, and ``nodes_lost`` at nodes, in random order.

    A role's weight is its number of processes. If there are enough kills, each role is first taken once.
    Nodes are killed, never stopped. About `STOPPED_SHARE` of the kills are stops.

    Raises:
        ConfigError: ``chaos_kills`` for a number of kills below 1 or of nodes below 0.
    """
    if kills < 1 or nodes_lost < 0:
        raise ConfigError(
            "chaos_kills", f"{kills} kills and {nodes_lost} lost nodes are not possible.", "Give --kills 10."
        )
    draw = random.Random(seed)
    certain = list(KILLED_ROLES) if kills >= ALL_ROLES else []
    weights = [processes[role] for role in KILLED_ROLES]
    roles = certain + draw.choices(KILLED_ROLES, weights, k=kills - len(certain))
    signals: list[SignalName] = ["SIGKILL"] * kills
    for index in draw.sample(range(kills), round(STOPPED_SHARE * kills)):
        signals[index] = "SIGSTOP"
    planned: list[tuple[Role, SignalName]] = list(zip(roles, signals, strict=True))
    planned += [("node", "SIGKILL")] * nodes_lost
    draw.shuffle(planned)
    return tuple(Strike(role, signal, draw.random(), draw.random()) for role, signal in planned)
