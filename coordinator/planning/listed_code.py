"""The code of a run, held against the policy's list by the driver: before any process is given it."""

from collections.abc import Sequence
from pathlib import Path

from raycloak.attestation.policy.policy import Policy
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.planning.references import named_code
from raycloak.metrics.errors import EvidenceError
from raycloak.workers.inputs.code_bundle import CodeBundle


def listed_code(policy: Policy, config: RunConfig, pickled: Sequence[str], base: Path | str) -> bytes:
    """Return the digest of the bundle that a run's own code comes from, for its manifest.

    Args:
        pickled: names of callables that were given in Python.

    Returns:
        32 bytes; empty for a run without code of its own, and under a policy that lists none.

    Raises:
        EvidenceError: ``code_unlisted``, with the code named.
        ConfigError: as `CodeBundle.read`.
    """
    if policy.code is None:
        return b""
    if pickled:
        raise EvidenceError(
            "code_unlisted",
            f"{', '.join(pickled)} was given as a callable, and the policy lists files.",
            "Name it as module:function, in a file beside the config file.",
        )
    named = named_code(config)
    if not named:
        return b""
    bundle = CodeBundle.read(base)
    bundle.require_listed(policy.code, named)
    for target in named:
        bundle.require_module(target.partition(":")[0])
    return bundle.digest
