"""The health checks that decide how soon a cluster declares a node dead: one table, for manifest, tests and benches.

Ray's own settings need about 15 s. A run should learn of a dead node within 5 s (`DEAD_NODE_S`). Shorter periods than
these would take a busy node for dead: the run survives that, but its virtual workers move for nothing. The head reads
them when it starts, so an existing cluster keeps its own. A closed socket reveals a dead process within
`DEAD_PROCESS_S`, whatever these settings are.
"""

from collections.abc import Mapping
from types import MappingProxyType

HEALTH_CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "RAY_health_check_initial_delay_ms": "1000",
        # Three missed checks, a second apart: a dead node is noticed in about 3 s.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }
)
"""The environment variables of the head."""

DEAD_PROCESS_S = 2.0
DEAD_NODE_S = 5.0
