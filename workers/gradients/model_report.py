"""The report on a model: layer by layer, what is trained, what is refused and why, and which line fixes it.

All layers are judged by their type. Then the model runs as `raycloak.workers.gradients.model_checks` says, on a copy
with the mechanical fixes made. It runs again without a layer's gradient, because a run reports one layer at a time.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.models.model_fixes import fix, fix_of
from raycloak.workers.models.models import layer_problem

Status = Literal["trained", "frozen", "refused", "no parameters"]

WHOLE = "model"
"""The name of the model itself among its layers."""

# As checks name a layer or a parameter in their messages.
_NAMED = re.compile(r"(layer|parameter) '([^']*)'")


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer that has its own parameters, or that the report has something to say about.

    Attributes:
        parameters: trained ones of its own; those of the layers inside it are theirs.
        reason: why it is refused; empty if it is not.
        remedy: one line that mends it.
        mechanical: what `raycloak.fix` does to it; empty if nothing.
    """

    name: str
    kind: str
    status: Status
    parameters: int
    reason: str = ""
    remedy: str = ""
    mechanical: str = ""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """All layers of a model that the report has something to say about.

    Attributes:
        was_run: whether the model was also run, which finds what no type tells.
    """

    layers: tuple[LayerReport, ...]
    was_run: bool

    @property
    def refused(self) -> tuple[LayerReport, ...]:
        """The layers for which a run would be refused."""
        return tuple(layer for layer in self.layers if layer.status == "refused")

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return sum(layer.parameters for layer in self.layers)


def report_on(model: nn.Module, check: Callable[[nn.Module], None] | None = None) -> ModelReport:
    """Report on a model as its author wrote it; ``model`` is not changed.

    Args:
        check: runs a model on synthetic data and raises the ModelError of a layer; None without data.
    """
    layers = {name or WHOLE: _judged(name, layer) for name, layer in model.named_modules()}
    for problem in [] if check is None else _problems_in_a_run(model, check):
        name = _place(problem, layers)
        # What a type tells is told already, and better.
        if layers[name].status != "refused":
            layers[name] = replace(
                layers[name], status="refused", reason=f"{problem.code}: {problem.message}", remedy=problem.remedy
            )
    said = (each for each in layers.values() if each.status != "no parameters" or each.mechanical)
    return ModelReport(tuple(said), check is not None)


def _judged(name: str, layer: nn.Module) -> LayerReport:
    """Return what the type of a layer and its own parameters tell."""
    own = list(layer.named_parameters(recurse=False))
    trained = [(own_name, tensor) for own_name, tensor in own if tensor.requires_grad]
    report = LayerReport(
        name=name or WHOLE,
        kind=type(layer).__name__,
        status="trained" if trained else "frozen" if own else "no parameters",
        parameters=sum(tensor.numel() for _, tensor in trained),
        mechanical=fix_of(layer) or "",
    )
    problem = layer_problem(name, layer)
    if problem is None and (wrong := [tensor for _, tensor in trained if tensor.dtype != torch.float32]):
        problem = ModelError(
            "parameter_dtype",
            f"trained parameters must be float32, not {wrong[0].dtype}.",
            "Convert the module with .float(), as raycloak.fix(model) does, or freeze it.",
        )
    if problem is None:
        return report
    return replace(report, status="refused", reason=f"{problem.code}: {problem.message}", remedy=problem.remedy)


def _problems_in_a_run(model: nn.Module, check: Callable[[nn.Module], None]) -> list[ModelError]:
    """Run the mended model, and again with what was refused frozen, until nothing more is found."""
    probe, found = fix(model)[0], []
    while any(tensor.requires_grad for tensor in probe.parameters()):
        try:
            check(probe)
        except ModelError as problem:
            found.append(problem)
            if not _freeze(probe, problem):
                break
        else:
            break
    return found


def _freeze(probe: nn.Module, problem: ModelError) -> bool:
    """Freeze what a problem names, so that the next one shows; return whether that changes anything."""
    named = _NAMED.search(problem.message)
    # A layer that mixes examples does so frozen as well.
    if named is None or problem.code != "unsupported_layer":
        return False
    tensors = [
        tensor
        for name, tensor in probe.named_parameters()
        if tensor.requires_grad and (name == named[2] or name.startswith(f"{named[2]}."))
    ]
    for tensor in tensors:
        tensor.requires_grad_(False)
    return bool(tensors)


def _place(problem: ModelError, layers: dict[str, LayerReport]) -> str:
    """Return the layer that a problem is about; the model itself if it names none."""
    named = _NAMED.search(problem.message)
    name = "" if named is None else named[2]
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name or WHOLE
