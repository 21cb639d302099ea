"""The command ``raycloak audit``."""

import math
from dataclasses import asdict
from typing import Annotated

import typer

from raycloak.coordinator.cli.options import ConfigFile, Overrides, SmallEpsilon
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import RefusedError


def audit_command(
    output: Output,
    config: ConfigFile,
    canaries: Annotated[int, typer.Option(help="Canaries to insert; more can show a larger epsilon.")] = 1000,
    confidence: Annotated[float, typer.Option(help="Chance that the bound holds.")] = 0.95,
    overrides: Overrides = None,
    yes: SmallEpsilon = False,
) -> int:
    """Train CONFIG with canaries, charged like a run, and bound epsilon from below. Exit code 3 if the bound exceeds
    what the ledger says."""
    from raycloak.coordinator.runs.progress import ProgressDisplay

    loaded = load_config(config, overrides)
    with ProgressDisplay(output.progress, f"{loaded.name}-audit") as display:
        display.phase("loading libraries")
        from raycloak.coordinator.audit.audit import audit

        display.phase("trying the model")
        result = audit(
            loaded,
            config.parent,
            canaries=canaries,
            confidence=confidence,
            progress=display,
            phase=display.phase,
            small_epsilon=yes,
        )
    verdict = "CONTRADICTS the ledger" if result.contradicted else "consistent with the ledger"
    charged = f"{result.steps} steps, sample rate {result.sample_rate:.4g}"
    rows = [
        ("ε, shown", f"at least {_down(result.epsilon_lower)} with confidence {result.confidence:g}: {verdict}"),
        ("ε, charged", f"{epsilon_text(result.epsilon)} at δ = {result.delta:g}, by the ledger"),
        ("ε, ceiling", f"{_down(result.epsilon_ceiling)}: what so many canaries can show at most"),
        ("sensitivity", f"{_up(result.sensitivity)} C moved by one synthetic example at most; noise is made for 1"),
        ("guesses", f"{result.correct} of {result.guesses} right, by {result.score}"),
        ("canaries", f"{result.canaries}, {result.included} of them in, beside {result.examples:,} examples"),
        ("mechanism", f"{charged}, noise multiplier {result.noise_multiplier:.4g}"),
        ("account", result.account or "none: the data is public, and the ledger was thrown away"),
        ("run directory", str(result.run_dir)),
    ]
    output.show(f"Audit ({result.evidence_class.upper()} evidence, all actors in this process)", asdict(result), rows)
    if not result.contradicted:
        return 0
    if result.sensitivity > 1:
        shown = f"taking one example away moves a clipped sum by {result.sensitivity:.3f} C"
    else:
        lower, epsilon = _down(result.epsilon_lower), epsilon_text(result.epsilon)
        shown = f"the released model shows an epsilon of at least {lower}, but the ledger charged {epsilon}"
    output.note(f"error: claim_contradicted: {shown}. Do not rely on this build's epsilon.")
    return RefusedError.exit_code


def _up(value: float) -> str:
    """Format three decimals, rounded up: a move is never stated smaller than it is."""
    return f"{math.ceil(value * 1000) / 1000:.3f}"


def _down(value: float) -> str:
    """Format three decimals, rounded down: a lower bound is never stated larger than it is."""
    return f"{math.floor(value * 1000) / 1000:.3f}"
