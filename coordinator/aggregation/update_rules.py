"""The update rule as a pure function of parameters, averaged gradient, state and step.

Rules come from `torch.optim`, applied to one tensor at a time (no fused or multi-tensor kernels). A range is made of
whole tensors, and no rule couples tensors, so the bytes do not depend on the number of ranges. The process must be in
the run's numerics class: kernels of another instruction set may round differently.

Guarantee: an update, by a rule of the user's own too, costs no epsilon. It is post-processing: a function of the
released average, of parameters and state that follow from earlier ones, and of public settings. Precondition: the rule
sees released values alone. It runs in the aggregator, against which every claim is made.

| name | from the specification |
|---|---|
| ``sgd`` | momentum, weight decay |
| ``adam``, ``adamw`` | beta1, beta2, eps, weight decay (added to the gradient; decoupled) |
| ``adafactor`` | eps (the smaller of its two), weight decay; its own decay of the second moment |
| ``module:Class`` | settings; the user's own `torch.optim.Optimizer`, an instance for each tensor and step |

**Averaged weights** (`OptimizerSpec.averaged_weights`) are an exponential moving average of the weights after each
step: ``average += (weights - average) * 9 / (10 + t)`` in step t, counted from 0. So the decay is (1 + t) / (10 + t).
The average starts from the initial weights. It is float32, and each of its values is computed in float64 and rounded
once. It is part of the state, and no step reads it.

Rates, decays and settings may differ between tensors, by name (`OptimizerSpec.groups`). What applies to a tensor
follows from its own name, so it does not depend on the number of ranges either.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raycloak.metrics.errors import ConfigError, ProtocolError, RunFailedError, is_out_of_memory
from raycloak.metrics.listing import listed
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.inputs.user_code import only_from, own_words, resolve, source_digest
from raycloak.workers.terms.built_in_rules import RULES, rules_with
from raycloak.workers.terms.manifest import OptimizerSpec, TensorSpec, matches
from raycloak.workers.terms.model_digest import AVERAGED, dimension

State = dict[str, NDArray[Any]]


def _without_compiler(rule: Any) -> Any:
    """Strip a `torch.optim` rule of the wrappers that import torch's compiler, which takes over a second of CPU.

    The function that computes stays the same, and runs without gradients as before.
    """
    inner = {
        "add_param_group": inspect.unwrap(rule.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(rule.step)),
    }
    return type(rule.__name__, (rule,), inner)


_CLASSES = {name: _without_compiler(getattr(torch.optim, rule.torch_class)) for name, rule in RULES.items()}

TURN = 2**22
"""Values of a turn. A rule copies what it takes several times over, which is small beside the whole of a large range.

A multiple of what a kernel takes at once: only the last values of a tensor are taken one by one, as without a cut.
"""

# Names of tensors that an error lists.
_SHOWN = 8
_STATE_TYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)


OwnRule = Callable[[Mapping[str, torch.Tensor], float, OptimizerSpec], Any]
"""(tensors by name, learning rate, what applies to them) to the user's own rule for them."""


def own_rule(spec: OptimizerSpec, base: Path | str) -> OwnRule:
    """Return what makes the user's own rule.

    Its groups have ``param_names``, the names of ``params``, as torch has them for named parameters.

    Raises:
        ConfigError: ``module_function``; ``update_rule`` if it is no ``torch.optim.Optimizer``.
    """
    found: Any = resolve(spec.name, base)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            "update_rule",
            f"{spec.name} is no class of torch.optim.Optimizer.",
            "Derive the rule from torch.optim.Optimizer; it gets the tensors, lr, and optimizer.settings.",
        )
    if found.add_param_group is torch.optim.Optimizer.add_param_group:
        # Torch's own imports the compiler; see `_without_compiler`.
        found = type(found.__name__, (found,), {"add_param_group": inspect.unwrap(found.add_param_group)})

    def make(tensors: Mapping[str, torch.Tensor], lr: float, terms: OptimizerSpec) -> Any:
        rule = found(list(tensors.values()), lr=lr, **json.loads(terms.settings))
        names = {id(tensor): name for name, tensor in tensors.items()}
        for group in rule.param_groups:
            group["param_names"] = [names[id(each)] for each in group["params"]]
        return rule

    return make


def own_schedule(spec: OptimizerSpec, base: Path | str) -> Callable[[int, int], float]:
    """Return the user's own schedule, which gives the factor of the learning rate.

    Guarantee: the factor is rounded to 2^-40, so that math libraries that differ in the last bit agree.

    Raises:
        ConfigError: ``module_function``; ``schedule``, when it is called, if it fails or gives anything but a finite
            number of at least 0.
    """
    function = resolve(spec.schedule, base)

    def factor(step: int, steps: int) -> float:
        try:
            found = function(step, steps)
        except Exception as error:
            raise ConfigError(
                "schedule",
                f"at step {step} of {steps}, {spec.schedule} fails with {own_words(error)}",
                "It is called with (step, steps), from step 0.",
            ) from error
        is_number = isinstance(found, int | float | np.integer | np.floating) and not isinstance(found, bool)
        if not is_number or not 0 <= found < math.inf:
            raise ConfigError(
                "schedule",
                f"{spec.schedule} gives {found!r:.60} at step {step} of {steps}, not a finite number of at least 0.",
                "Return the factor of optimizer.learning_rate.",
            )
        return math.ldexp(round(math.ldexp(float(found), 40)), -40)

    return factor


def require_source(spec: OptimizerSpec, base: Path | str, code: bytes = b"") -> None:
    """Require that the user's own rule and schedule have the source that ``spec`` states.

    Args:
        code: digest of the bundle that they come from, where the manifest states one.

    Raises:
        ConfigError: ``module_function``; as `raycloak.workers.inputs.user_code.only_from`.
        ProtocolError: ``manifest_mismatch``.
        EvidenceError: ``code_unlisted`` if the files in ``base`` are another bundle.
    """
    own = [name for name in (spec.name, spec.schedule) if ":" in name]
    if code and own:
        bundle = CodeBundle.read(base)
        bundle.require_listed([code], own)
        only_from(bundle)
    for name, stated in ((spec.name, spec.code), (spec.schedule, spec.schedule_code)):
        if ":" in name and source_digest(name, base) != stated:
            raise ProtocolError("manifest_mismatch", f"the source of {name} is not the one that the manifest states")


def by_terms(spec: OptimizerSpec, tensors: Sequence[TensorSpec]) -> dict[OptimizerSpec, list[TensorSpec]]:
    """Return the tensors to which the same settings apply, by these settings.

    Raises:
        ConfigError: ``parameter_groups`` if a pattern of a group matches none of the tensors.
    """
    for pattern in (pattern for group in spec.groups for pattern in group.params):
        if not any(matches(pattern, tensor.name) for tensor in tensors):
            raise ConfigError(
                "parameter_groups",
                f"optimizer.groups: no trained tensor has a name like '{pattern}'; there are {shown_names(tensors)}.",
                "A pattern matches a whole name; * stands for any text. `raycloak model check` lists the layers.",
            )
    found: dict[OptimizerSpec, list[TensorSpec]] = {}
    for tensor in tensors:
        found.setdefault(spec.of_tensor(tensor.name), []).append(tensor)
    return found


def shown_names(tensors: Sequence[TensorSpec]) -> str:
    """Return the names of tensors for a sentence, the first ones of many."""
    return listed([tensor.name for tensor in tensors], _SHOWN)


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """Return the learning rate of ``step`` (counted from 0) outside of groups, a pure function of its arguments.

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
        base: folder that names of the user's own rule and schedule start from.

    Raises:
        ConfigError: ``optimizer`` if a rule without momentum is given one, or the warm-up exceeds the run; as
            :func:`own_rule` and :func:`own_schedule`.
    """

    def __init__(
        self, spec: OptimizerSpec, tensors: Sequence[TensorSpec], total_steps: int, base: Path | str = "."
    ) -> None:
        if spec.momentum and spec.name not in rules_with("momentum"):
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
        self._terms = {tensor.name: spec.of_tensor(tensor.name) for tensor in self._tensors}
        self._own = own_rule(spec, base) if ":" in spec.name else None
        self._factor = own_schedule(spec, base) if ":" in spec.schedule else None
        self._turns = tuple(_turns(self._tensors, cuts=spec.name in RULES and RULES[spec.name].elementwise))

    def rates(self, step: int) -> dict[str, float]:
        """Return the learning rate of each tensor in ``step``, by the schedule of the run.

        Raises:
            ConfigError: ``schedule`` as :func:`own_schedule`.
        """
        if self._factor is None:
            return {name: learning_rate(terms, step, self._total_steps) for name, terms in self._terms.items()}
        factor = self._factor(step, self._total_steps)
        return {name: terms.learning_rate * factor for name, terms in self._terms.items()}

    def initial_state(self) -> State:
        """Return the state before the first step: empty. The first :meth:`update` fills it."""
        return {}

    def update(
        self,
        parameters: NDArray[np.float32],
        averaged_gradient: NDArray[np.floating[Any]],
        state: Mapping[str, NDArray[Any]],
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
            RunFailedError: ``non_finite_parameters`` if a new parameter or state is not finite; ``update_rule`` if a
                rule of the user's own fails or keeps anything but arrays, in its own words: it saw released values.
            ConfigError: ``schedule`` as :func:`own_schedule`.
        """
        size = dimension(self._tensors)
        require_bound(parameters.shape == averaged_gradient.shape == (size,), "an update has the size of its range")
        updated, rates = np.empty(size, np.float32), self.rates(step)
        new_state: State = {}
        for pieces in self._turns:
            leaves = [_copied(parameters, piece) for piece in pieces]
            # A value beyond float32 becomes infinite here, and is refused below.
            with np.errstate(over="ignore"):
                for leaf, piece in zip(leaves, pieces, strict=True):
                    leaf.grad = _copied(averaged_gradient, piece)
            rules = self._stepped(leaves, pieces, state, rates, step)
            for leaf, piece, rule in zip(leaves, pieces, rules, strict=True):
                leaf.grad = None
                self._require_finite(leaf, step)
                updated[piece.start : piece.start + piece.size] = leaf.numpy().reshape(-1)
                self._keep(rule.state.get(leaf, {}), piece, new_state, step)
        if self._spec.averaged_weights:
            new_state |= self._averages(parameters, updated, state, step)
        return updated, new_state

    def _averages(
        self,
        before: NDArray[np.float32],
        updated: NDArray[np.float32],
        state: Mapping[str, NDArray[Any]],
        step: int,
    ) -> State:
        """Return the average of each tensor, float32 in its shape, once the weights of ``step`` are in it.

        Guarantee: each value follows from its own former ones, so no byte depends on ranges or pieces. It costs no
        epsilon, as an update.
        """
        found: State = {}
        start = 0
        for tensor in self._tensors:
            key, own = f"{tensor.name}/{AVERAGED}", slice(start, start + tensor.size)
            former = state[key].reshape(-1) if key in state else before[own]
            average = np.empty(tensor.size, np.float32)
            # In pieces, because float64 copies of a large tensor would not fit.
            for begin in range(0, tensor.size, TURN):
                piece = slice(begin, begin + TURN)
                old = former[piece].astype(np.float64)
                average[piece] = old + (updated[own][piece] - old) * (9 / (10 + step))
            found[key] = average.reshape(tensor.shape)
            start += tensor.size
        return found

    def _stepped(
        self,
        leaves: list[torch.Tensor],
        pieces: Sequence["_Piece"],
        state: Mapping[str, NDArray[Any]],
        rates: Mapping[str, float],
        step: int,
    ) -> list[Any]:
        """Return the rule of each leaf, after its step."""
        if self._own is None:
            spec = self._spec
            groups: dict[tuple[float, float], list[torch.Tensor]] = {}
            for leaf, piece in zip(leaves, pieces, strict=True):
                name = piece.tensor.name
                groups.setdefault((rates[name], self._terms[name].weight_decay), []).append(leaf)
            given = [{"params": each, "lr": rate, "weight_decay": decay} for (rate, decay), each in groups.items()]
            if spec.name not in RULES:
                raise ConfigError("optimizer", f"there is no update rule '{spec.name}'.", "See docs/configuration.md.")
            # One tensor at a time, so that the bytes do not depend on the cut into ranges.
            rules = [_CLASSES[spec.name](given, **RULES[spec.name].arguments(spec), foreach=False)] * len(leaves)
            self._restore(rules, leaves, pieces, state)
            rules[0].step()
            return rules
        try:
            # One for each tensor, so that no rule can couple tensors and ranges change no byte.
            names = [piece.tensor.name for piece in pieces]
            rules = [
                self._own({name: leaf}, rates[name], self._terms[name])
                for name, leaf in zip(names, leaves, strict=True)
            ]
            self._restore(rules, leaves, pieces, state)
            with torch.no_grad():
                for rule in rules:
                    rule.step()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise RunFailedError(
                "update_rule",
                f"in step {step}, {self._spec.name} fails with {own_words(error)}",
                "It is made with the tensors, lr and optimizer.settings; then its step() is called.",
                step=step,
            ) from error
        return rules

    def _restore(
        self,
        rules: list[Any],
        leaves: list[torch.Tensor],
        pieces: Sequence["_Piece"],
        state: Mapping[str, NDArray[Any]],
    ) -> None:
        fields: dict[str, dict[str, NDArray[Any]]] = {}
        for key, value in state.items():
            name, _, field = key.rpartition("/")
            if field != AVERAGED:
                fields.setdefault(name, {})[field] = value
        for rule, leaf, piece in zip(rules, leaves, pieces, strict=True):
            for field, value in fields.get(piece.tensor.name, {}).items():
                # Copied, because torch updates the state in place and no argument may change.
                rule.state[leaf][field] = torch.from_numpy(piece.of(value).copy())

    def _keep(self, kept: Mapping[Any, Any], piece: "_Piece", state: State, step: int) -> None:
        """Write what a rule keeps for a piece into the new ``state``, without unused fields.

        Raises:
            RunFailedError: ``non_finite_parameters``; ``update_rule`` if a rule of the user's own keeps anything else.
        """
        for field, value in sorted(kept.items(), key=lambda each: str(each[0])):
            if self._own is not None:
                # What a sealed package can hold: a resume would lose the rest.
                if not isinstance(field, str) or "/" in field or field == AVERAGED:
                    raise RunFailedError(
                        "update_rule",
                        f"{self._spec.name} names its state {field!r:.60}.",
                        f"Name it by text without a slash, and not {AVERAGED}.",
                    )
                if not isinstance(value, torch.Tensor) or value.dtype not in _STATE_TYPES:
                    kind = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
                    raise RunFailedError(
                        "update_rule",
                        f"{self._spec.name} keeps '{field}' as {kind}, which a resume would lose: no sealed package "
                        "holds it.",
                        "Keep tensors in self.state[parameter], also the number of the step: torch.tensor(0.0).",
                    )
                value = value.detach().clone()
            if not isinstance(value, torch.Tensor):
                continue
            self._require_finite(value, step)
            key, whole = f"{piece.tensor.name}/{field}", piece.is_whole or value.ndim == 0
            if whole:
                state[key] = value.numpy()
            else:
                state.setdefault(key, np.empty(piece.tensor.shape, value.numpy().dtype)).reshape(-1)[
                    piece.offset : piece.offset + piece.size
                ] = value.numpy()

    @staticmethod
    def _require_finite(values: torch.Tensor, step: int) -> None:
        if not np.isfinite(values.numpy()).all():
            raise RunFailedError(
                "non_finite_parameters",
                f"the update of step {step} made a parameter or its moments infinite or not a number.",
                "Lower optimizer.learning_rate, or raise expected_batch_size.",
                step=step,
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of the range, or a stretch of one.

    Attributes:
        start: its place among the range's values. offset: among its tensor's.
    """

    tensor: TensorSpec
    start: int
    offset: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Return whether it is all of its tensor."""
        return self.size == self.tensor.size

    def of(self, value: NDArray[Any]) -> NDArray[Any]:
        """Return the piece of a state array; a number belongs to all pieces."""
        if self.is_whole or value.ndim == 0:
            return value
        return value.reshape(-1)[self.offset : self.offset + self.size]


def _turns(tensors: Sequence[TensorSpec], *, cuts: bool) -> Iterator[tuple[_Piece, ...]]:
    """Yield the pieces that are updated together: up to `TURN` values, or one tensor that may not be cut."""
    turn: list[_Piece] = []
    start = held = 0
    for tensor in tensors:
        stretch = TURN if cuts else tensor.size
        for offset in range(0, max(tensor.size, 1), max(stretch, 1)):
            size = min(stretch, tensor.size - offset)
            if turn and held + size > TURN:
                yield tuple(turn)
                turn, held = [], 0
            turn.append(_Piece(tensor, start + offset, offset, size))
            held += size
        start += tensor.size
    if turn:
        yield tuple(turn)


def _copied(flat: NDArray[np.floating[Any]], piece: _Piece) -> torch.Tensor:
    """Copy a piece into memory of its own, so that kernels see the same alignment for any range."""
    part = flat[piece.start : piece.start + piece.size].astype(np.float32)
    return torch.from_numpy(part.reshape(piece.tensor.shape) if piece.is_whole else part)
