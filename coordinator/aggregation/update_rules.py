"""The update rule as a pure function of parameters, averaged gradient, state and step.

Rules come from `torch.optim`, applied to one tensor at a time (no fused or multi-tensor kernels). A range is made of
whole tensors, and no rule couples tensors, so the bytes do not depend on the number of ranges. The process must be in
the run's numerics class: kernels of another instruction set may round differently.

| name | from the specification |
|---|---|
| ``sgd`` | momentum, weight decay |
| ``adam``, ``adamw`` | beta1, beta2, eps, weight decay (added to the gradient; decoupled) |
| ``adafactor`` | eps (the smaller of its two), weight decay; its own decay of the second moment |
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.workers.terms.manifest import OptimizerSpec, TensorSpec
from raycloak.workers.terms.parameter_digest import dimension

State = dict[str, NDArray[np.float32]]
_ADAFACTOR_PARAMETER_SCALE = 1e-3  # the larger of the rule's two eps, at torch's default


def _without_compiler(rule: Any) -> Any:
    """Strip a `torch.optim` rule of the wrappers that import torch's compiler, which takes over a second of CPU.

    The function that computes stays the same, and runs without gradients as before.
    """
    inner = {
        "add_param_group": inspect.unwrap(rule.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(rule.step)),
    }
    return type(rule.__name__, (rule,), inner)


_SGD, _ADAM, _ADAMW, _ADAFACTOR = (
    _without_compiler(rule) for rule in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor)
)


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """Return the learning rate of ``step`` (counted from 0), a pure function of its arguments.

    Warm-up rises linearly and reaches the full rate at step ``warmup_steps - 1``. Then ``constant`` stays there.
    ``linear`` and ``cosine`` fall towards zero, which they would reach at ``total_steps``.
    """
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(total_steps - spec.warmup_steps, 1)
    if spec.schedule == "linear":
        return spec.learning_rate * max(1.0 - progress, 0.0)
    if spec.schedule == "cosine":
        # Round to 2^-40, so that math libraries that differ in the last bit agree.
        factor = math.ldexp(round(math.ldexp(0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0)), 40)), -40)
        return spec.learning_rate * factor
    return spec.learning_rate


class Optimizer:
    """The update rule of one parameter range.

    Args:
        spec: rule and schedule.
        tensors: the range's whole tensors, in canonical order.
        total_steps: planned steps, for the schedule.

    Raises:
        ConfigError: ``optimizer`` if a rule without momentum is given one, or the warm-up exceeds the run.
    """

    def __init__(self, spec: OptimizerSpec, tensors: Sequence[TensorSpec], total_steps: int) -> None:
        if spec.momentum and spec.name != "sgd":
            raise ConfigError(
                "optimizer",
                f"momentum belongs to sgd; {spec.name} has no such setting.",
                "Remove it, or set name: sgd.",
            )
        if spec.warmup_steps > total_steps:
            raise ConfigError(
                "optimizer",
                f"warmup_steps ({spec.warmup_steps}) exceeds steps ({total_steps}).",
                "Lower optimizer.warmup_steps.",
            )
        self._spec = spec
        self._tensors = tuple(tensors)
        self._total_steps = total_steps

    def initial_state(self) -> State:
        """Return the state before the first step: empty. The first :meth:`update` fills it."""
        return {}

    def update(
        self,
        parameters: NDArray[np.float32],
        averaged_gradient: NDArray[np.floating[Any]],
        state: Mapping[str, NDArray[np.float32]],
        step: int,
    ) -> tuple[NDArray[np.float32], State]:
        """Compute parameters and state after one step.

        Guarantee: no argument is changed, and the result's bytes depend on the arguments alone. A tensor's bytes do not
        depend on which other tensors share its range.

        Args:
            parameters: float32 [size of the range].
            averaged_gradient: float32 or float64 of the same shape; rounded to float32.
            state: result of :meth:`initial_state` or the previous update; keys are ``tensor name/field``.
            step: counted from 0.

        Raises:
            RunFailedError: ``non_finite_parameters`` if a new parameter or state is not finite.
        """
        size = dimension(self._tensors)
        assert parameters.shape == averaged_gradient.shape == (size,), "vectors have the range's size"
        # A value beyond float32 becomes infinite here, and is refused below.
        with np.errstate(over="ignore"):
            gradients = self._cut(averaged_gradient)
        # The last reference, if the caller has kept none.
        del averaged_gradient
        leaves = self._cut(parameters)
        rule = self._rule(leaves, learning_rate(self._spec, step, self._total_steps))
        leaf_of = dict(zip((tensor.name for tensor in self._tensors), leaves, strict=True))
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        for key, value in state.items():
            name, _, field = key.rpartition("/")
            # Copied, because torch updates the state in place and no argument may change.
            rule.state[leaf_of[name]][field] = torch.from_numpy(value.copy())
        rule.step()
        for leaf in leaves:
            leaf.grad = None
        del gradients
        updated = np.concatenate([leaf.numpy().reshape(-1) for leaf in leaves])
        new_state = self._state_of(rule, leaves)
        if not all(np.isfinite(vector).all() for vector in (updated, *new_state.values())):
            raise RunFailedError(
                "non_finite_parameters",
                f"the update of step {step} made a parameter or its moments infinite or not a number.",
                "Lower optimizer.learning_rate, or raise expected_batch_size.",
                step=step,
            )
        return updated, new_state

    def _cut(self, flat: NDArray[np.floating[Any]]) -> list[torch.Tensor]:
        """Copy each tensor into memory of its own, so that kernels see the same alignment for any range."""
        parts, start = [], 0
        for tensor in self._tensors:
            part = flat[start : start + tensor.size].reshape(tensor.shape)
            parts.append(torch.from_numpy(part.astype(np.float32)))
            start += tensor.size
        return parts

    def _rule(self, leaves: list[torch.Tensor], rate: float) -> Any:
        spec = self._spec
        decay, betas = spec.weight_decay, (spec.beta1, spec.beta2)
        # One tensor at a time, so that the bytes do not depend on the cut into ranges.
        kernels = {"foreach": False, "fused": False}
        match spec.name:
            case "sgd":
                return _SGD(leaves, lr=rate, momentum=spec.momentum, weight_decay=decay, **kernels)
            case "adam":
                return _ADAM(leaves, lr=rate, betas=betas, eps=spec.eps, weight_decay=decay, **kernels)
            case "adamw":
                return _ADAMW(leaves, lr=rate, betas=betas, eps=spec.eps, weight_decay=decay, **kernels)
            case "adafactor":
                epsilons = (spec.eps, _ADAFACTOR_PARAMETER_SCALE)
                return _ADAFACTOR(leaves, lr=rate, eps=epsilons, weight_decay=decay, foreach=False)

    def _state_of(self, rule: Any, leaves: list[torch.Tensor]) -> State:
        """Return all state tensors by ``tensor name/field``, without unused fields."""
        return {
            f"{tensor.name}/{field}": value.numpy()
            for tensor, leaf in zip(self._tensors, leaves, strict=True)
            for field, value in sorted(rule.state[leaf].items())
            if isinstance(value, torch.Tensor)
        }
