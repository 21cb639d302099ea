"""How soon a cluster takes a node for dead: one table, for the shipped manifest, tests and benches.

Ray's own settings need about 15 s; a run should learn of a dead node within 5 s (`DEAD_NODE_S`). Shorter periods than
these take a busy node for a dead one: the run survives that, but its virtual workers move for nothing. The head reads
them when it starts, so a cluster that is already there keeps its own. A dead process is learnt of from its closed
socket, within `DEAD_PROCESS_S` whatever these settings are.
"""

from collections.abc import Mapping
from types import MappingProxyType

HEALTH_CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }
)
"""Environment of the head."""

DEAD_PROCESS_S = 2.0
DEAD_NODE_S = 5.0
