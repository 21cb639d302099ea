"""The catalogue of built-in update rules: what each takes, keeps and is called in torch.

Configuration, plan, aggregator and benches read this one table. Another rule of `torch.optim` is another row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from raycloak.workers.terms.manifest import OptimizerSpec

_ADAFACTOR_PARAMETER_SCALE = 1e-3  # the larger of the rule's two eps, at torch's default


@dataclass(frozen=True, slots=True)
class BuiltInRule:
    """A rule of `torch.optim`. Every rule takes ``learning_rate`` and ``weight_decay``.

    Attributes:
        torch_class: its name in `torch.optim`.
        settings: the other fields of `OptimizerSpec` that it takes.
        arguments: from a specification to keyword arguments of the class, without rate and decay.
        state_tensors: tensors of state that it keeps, each as large as the parameters.
        elementwise: whether a new value follows from the values at its own place alone, so that a tensor may be cut.
    """

    torch_class: str
    settings: tuple[str, ...]
    arguments: Callable[[OptimizerSpec], dict[str, Any]]
    state_tensors: int
    elementwise: bool


def _adam(torch_class: str) -> BuiltInRule:
    return BuiltInRule(
        torch_class,
        settings=("beta1", "beta2", "eps"),
        arguments=lambda spec: {"betas": (spec.beta1, spec.beta2), "eps": spec.eps},
        state_tensors=2,
        elementwise=True,
    )


RULES: Final[Mapping[str, BuiltInRule]] = {
    "sgd": BuiltInRule(
        "SGD", ("momentum",), lambda spec: {"momentum": spec.momentum}, state_tensors=1, elementwise=True
    ),
    "adam": _adam("Adam"),
    "adamw": _adam("AdamW"),
    "adafactor": BuiltInRule(
        "Adafactor",
        settings=("eps",),
        arguments=lambda spec: {"eps": (spec.eps, _ADAFACTOR_PARAMETER_SCALE)},
        # Its second moment is a row and a column; a vector's is whole.
        state_tensors=1,
        elementwise=False,
    ),
}
"""By the name that a configuration gives."""

RULE_SETTINGS: Final = ("weight_decay", *sorted({each for rule in RULES.values() for each in rule.settings}))
"""The fields of a configuration that belong to built-in rules alone."""


def rules_with(setting: str) -> tuple[str, ...]:
    """Return the names of the rules that take ``setting``."""
    return tuple(name for name, rule in RULES.items() if setting in rule.settings)
