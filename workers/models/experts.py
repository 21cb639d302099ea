"""Mixtures of experts, evaluated so that no row of a batch meets another.

`transformers` sorts the tokens of a batch by expert, so that each expert computes on the tokens of all rows that chose
it. Places and shapes then tell what other rows chose. Here every expert computes on every token in its place, and a
token adds up the outputs of all experts, with weight 0 for those that it did not choose.

It costs the experts' computation as often as there are experts for each one that a token chooses.

An adapter of PEFT on a parameter, such as the matrices of all experts, leaves its layer as it is. PEFT itself would
write the sum of both into the layer in each forward pass.
"""

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from raycloak.workers.inputs.hub_files import library

EXPERTS = "raycloak_every_expert"
"""The name of this evaluation among those of `transformers`."""


def evaluate_every_expert(model: Any) -> None:
    """Let the experts of a `transformers` model compute as this module says; any other model stays as it is."""
    library("transformers.integrations.moe").ExpertsInterface.register(EXPERTS, _every_expert)
    model.set_experts_implementation(EXPERTS)
    # Nobody has an adapter of a library that was never loaded.
    peft: Any = sys.modules.get("peft.tuners.lora.layer")
    for layer in () if peft is None else model.modules():
        kind: Any = type(layer)
        if kind is peft.ParamWrapper:
            layer.__class__ = _beside(kind)


def _every_expert(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted outputs of all experts, [tokens, width].

    Args:
        experts: a layer with the weights of all, one below the other, as `transformers` describes it.
        hidden_states: [tokens, width].
        top_k_index: the experts that each token chose, [tokens, k]; a number that is no expert's adds nothing.
        top_k_weights: of these, [tokens, k].
    """
    output = torch.zeros_like(hidden_states)
    for expert in range(experts.num_experts):
        share = torch.where(top_k_index == expert, top_k_weights, 0.0).sum(1, keepdim=True)
        inner = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", expert, hidden_states)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        outer = _linear(experts, "down_proj", expert, inner)
        if experts.has_post_expert_norm:
            outer = experts.post_expert_norm(outer)
        output = output + (outer * share).to(output.dtype)
    return output


def _linear(experts: Any, name: str, expert: int, tokens: Tensor) -> Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    output = functional.linear(tokens, weight.T if experts.is_transposed else weight, bias)
    wrapper = _ADAPTERS.get().get(name)
    if wrapper is None:
        return output
    (adapter,) = wrapper.active_adapters
    rank = wrapper.r[adapter]
    # The experts' matrices lie one below the other in A, and column by column between each other in B.
    down = wrapper.lora_A[adapter].weight[expert * rank : (expert + 1) * rank]
    up = wrapper.lora_B[adapter].weight
    up = up.reshape(len(up), rank, -1)[:, :, expert]
    added: Tensor = functional.linear(functional.linear(tokens.to(down.dtype), down), up) * wrapper.scaling[adapter]
    return output + added.to(tokens.dtype)


# By the parameter that it adapts, the adapters around the layer of experts that computes now.
_ADAPTERS: ContextVar[Mapping[str, Any]] = ContextVar("raycloak_expert_adapters", default=MappingProxyType({}))


@cache
def _beside(wrapper: type) -> type:
    """Return PEFT's layer around a parameter, as one that leaves the parameter as it is."""

    class Beside(wrapper):  # type: ignore[misc]
        """An adapter of one parameter."""

        def forward(self, *args: Any, **named: Any) -> Any:
            if self.disable_adapters or self.merged:
                return super().forward(*args, **named)
            base, parameter = self.get_base_layer(), self.parameter_name
            if parameter not in stacks_of(base):
                # What an object holds itself is found before its parameters.
                base.__dict__[parameter] = self.get_param() + self.get_delta_weight(*self.active_adapters)
            entered = _ADAPTERS.set({**_ADAPTERS.get(), parameter: self})
            try:
                return self.base_layer(*args, **named)
            finally:
                _ADAPTERS.reset(entered)
                base.__dict__.pop(parameter, None)

    return Beside


def stacks_of(layer: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a layer of experts that are all their matrices; none for other layers."""
    if not (hasattr(layer, "has_gate") and hasattr(layer, "num_experts")):
        return ()
    return ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj")
