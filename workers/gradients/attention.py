"""Multi-head attention from its own projections, so that each of them is one linear layer to a tap.

Torch's own function keeps its projections to itself. This one has its arguments, its result up to rounding, and no
dropout.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def multi_head_attention(
    linear: Linear,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return what ``functional.multi_head_attention_forward`` returns: [targets, rows, width], and weights.

    Raises:
        NotImplementedError: an option that it does not have.
    """
    odd = any(each is not None for each in (bias_k, bias_v, *others.values()))
    if odd or use_separate_proj_weight or add_zero_attn or query.ndim != 3:
        raise NotImplementedError
    if in_proj_weight is None or (dropout_p > 0 and training):
        raise NotImplementedError
    # Rows first: that is where a tap looks for them. One tensor stays one, so that it is projected once.
    self_attention = query is key and key is value
    queries, keys, values = (each.transpose(0, 1) for each in (query, key, value))
    width = embed_dim_to_check
    if self_attention:
        projected = list(linear(queries, in_proj_weight, in_proj_bias).chunk(3, -1))
    else:
        # Each through the whole matrix, of which it needs a third: a matrix is used in one piece or row by row.
        wholes = (linear(each, in_proj_weight, in_proj_bias) for each in (queries, keys, values))
        projected = [whole[..., third * width : (third + 1) * width] for third, whole in enumerate(wholes)]
    heads = [each.reshape(*each.shape[:2], num_heads, -1).transpose(1, 2) for each in projected]
    mask = _mask(attn_mask, key_padding_mask, len(queries), num_heads)
    if need_weights:
        scores = heads[0] @ heads[1].mT / heads[0].shape[-1] ** 0.5
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        mixed = weights @ heads[2]
    else:
        weights, mixed = None, functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask)
    output = linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    return output, weights


def _mask(attention: Tensor | None, padding: Tensor | None, rows: int, heads: int) -> Tensor | None:
    """Return both masks as one number to add per score, broadcast to [rows, heads, targets, sources]."""
    found = None
    if attention is not None:
        found = _additive(attention)
        found = found.view(rows, heads, *found.shape[1:]) if found.ndim == 3 else found
    if padding is not None:
        hidden = _additive(padding)[:, None, None]
        found = hidden if found is None else found + hidden
    return found


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask, float("-inf"))
