"""The trial of an update rule and a schedule of the user's own, before anything is charged.

Hides how a rule is found to be repeatable: it is run twice, and compared with torch's own loop, on small tensors of
the model's ranks. A built-in rule is not tried.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from raycloak.coordinator.aggregation.update_rules import Optimizer, by_terms, own_rule, own_schedule, shown_names
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.workers.terms.manifest import OptimizerSpec, TensorSpec

_TRIED_STEPS = 3  # the first makes the state, the second uses it, the third uses what the second made of it
_LARGEST_EXTENT = 16  # bounds what a trial costs for a model of any size


def try_rule(spec: OptimizerSpec, tensors: Sequence[TensorSpec], total_steps: int, base: Path | str) -> tuple[str, ...]:
    """Refuse a rule or schedule of the user's own that a run could not repeat, and groups that match no tensor.

    The rule is tried with the settings of each group.

    Guarantee: returns only if two runs of the rule on the same synthetic tensors gave the same bytes. After each step
    their state is taken out as arrays and put into another instance. One instance that keeps all tensors gave these
    bytes too, so a run computes what ``rule.step()`` does in a loop of torch's own. A schedule gave the same factor
    twice for every step. Not guaranteed: what the rule does on other values.

    Returns:
        For the reader: what differs, by the groups, for which tensors.

    Raises:
        ConfigError: ``update_rule``, ``schedule``, ``module_function`` or ``parameter_groups``.
    """
    if ":" in spec.schedule:
        factor = own_schedule(spec, base)
        once, again = ([factor(step, total_steps) for step in range(total_steps)] for _ in range(2))
        for step, (one, other) in enumerate(zip(once, again, strict=True)):
            if one != other:
                raise ConfigError(
                    "schedule",
                    f"{spec.schedule} gives {one:g} and then {other:g} for step {step} of {total_steps}.",
                    "Let it depend on its two arguments alone.",
                )
    parts = by_terms(spec, tensors)
    for terms, members in parts.items():
        if ":" in spec.name:
            _try_own(terms, _small(members), total_steps, base)
    found = ((_differences(spec, terms), members) for terms, members in parts.items())
    return tuple(
        f"{differences} for {shown_names(members)} ({len(members)} of {len(tensors)} tensors)"
        for differences, members in found
        if differences
    )


def _differences(spec: OptimizerSpec, terms: OptimizerSpec) -> str:
    values = {
        "learning rate": (spec.learning_rate, f"{terms.learning_rate:g}", terms.learning_rate),
        "weight decay": (spec.weight_decay, f"{terms.weight_decay:g}", terms.weight_decay),
        "settings": (spec.settings, terms.settings, terms.settings),
    }
    return ", ".join(f"{name} {text}" for name, (before, text, after) in values.items() if before != after)


def _try_own(spec: OptimizerSpec, small: Sequence[TensorSpec], total_steps: int, base: Path | str) -> None:
    try:
        first, second = (_by_parts(spec, small, total_steps, base) for _ in range(2))
    except RunFailedError as error:
        raise ConfigError("update_rule", f"in its trial, {error.message}", error.remedy) from error
    if first != second:
        raise ConfigError(
            "update_rule",
            f"{spec.name} gives other bytes for the same input when it is run twice.",
            "Let it depend on parameters, gradients, state and settings alone: no random numbers, no time, no globals.",
        )
    if first != _by_one(spec, small, total_steps, base):
        raise ConfigError(
            "update_rule",
            f"{spec.name} keeps state outside self.state, or lets one tensor's update depend on another tensor.",
            "Keep all of a tensor's state in self.state[parameter], as tensors, and update each tensor by itself.",
        )


def _small(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return two small tensors for each shape and last part of a name: a rule may couple tensors of one shape."""
    found: dict[tuple[tuple[int, ...], str], str] = {}
    for tensor in tensors:
        shape = tuple(min(extent, _LARGEST_EXTENT) for extent in tensor.shape)
        found.setdefault((shape, tensor.name.rpartition(".")[2]), tensor.name)
    named = [(name, shape) for (shape, _), name in found.items()]
    # A rule may look at how a name ends, so the second one ends alike.
    named += [(f"another.{name}", shape) for name, shape in named]
    return tuple(TensorSpec(name=name, shape=shape) for name, shape in named)


def _start(tensors: Sequence[TensorSpec]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return parameters and the gradient of each step, float32 [size]."""
    generator, size = np.random.default_rng(0), sum(tensor.size for tensor in tensors)
    drawn = generator.standard_normal((1 + _TRIED_STEPS, size)).astype(np.float32)
    return drawn[0], list(drawn[1:])


def _by_parts(spec: OptimizerSpec, tensors: Sequence[TensorSpec], total_steps: int, base: Path | str) -> bytes:
    """Return the parameters after the tried steps, as an aggregator makes them."""
    rule = Optimizer(spec, tensors, total_steps, base)
    parameters, gradients = _start(tensors)
    state = rule.initial_state()
    for step, gradient in enumerate(gradients):
        parameters, state = rule.update(parameters, gradient, state, min(step, total_steps - 1))
    return parameters.tobytes()


def _by_one(spec: OptimizerSpec, tensors: Sequence[TensorSpec], total_steps: int, base: Path | str) -> bytes:
    """Return the parameters after the tried steps, as one instance makes them that lives all along."""
    schedule, name = Optimizer(spec, tensors, total_steps, base), tensors[0].name
    parameters, gradients = _start(tensors)
    leaves = _leaves(parameters, tensors)
    named = {tensor.name: leaf for tensor, leaf in zip(tensors, leaves, strict=True)}
    rule = own_rule(spec, base)(named, schedule.rates(0)[name], spec)
    for step, gradient in enumerate(gradients):
        for group in rule.param_groups:
            group["lr"] = schedule.rates(min(step, total_steps - 1))[name]
        for leaf, part in zip(leaves, _leaves(gradient, tensors), strict=True):
            leaf.grad = part
        with torch.no_grad():
            rule.step()
    return b"".join(leaf.numpy().tobytes() for leaf in leaves)


def _leaves(flat: np.ndarray, tensors: Sequence[TensorSpec]) -> list[torch.Tensor]:
    cuts = np.cumsum([tensor.size for tensor in tensors])[:-1]
    parts = np.split(flat, cuts)
    return [torch.from_numpy(part.copy().reshape(each.shape)) for part, each in zip(parts, tensors, strict=True)]
