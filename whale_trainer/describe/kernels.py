"""Attention and LSTMs on the meta device, as the fused kernels of real devices compute them.

There attention would fall back to the form that keeps the matrix of all scores, and an LSTM to a loop over its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import sdpa_flop_count, shape_wrapper

from whale_trainer.describe.recurrent import is_plain_lstm, lstm_at_once

FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def fused_form(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What to call in place of `func(*args, **kwargs)`; None where it may be called as it is."""
    # with dropout it falls back to the form that draws, which no plan can repeat
    drops = kwargs.get("dropout_p") or (len(args) > 4 and args[4])
    if func is F.scaled_dot_product_attention and len(args) == 3 and kwargs.get("attn_mask") is None and not drops:
        return lambda: _attention(*args, is_causal=kwargs.get("is_causal", False))
    if func is torch.lstm and not kwargs and is_plain_lstm(args):
        return lambda: lstm_at_once(*args)
    return None


def _attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Keeps its inputs, its output and one number a query; several query heads may share a key and value head."""
    if q.dim() != 4:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    out: Tensor = FUSED_ATTENTION(q, k, v, 0.0, is_causal)[0]
    return out


@shape_wrapper
def attention_flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **_options: Any) -> int:
    """FLOPs of `FUSED_ATTENTION`, in the form that `torch.utils.flop_counter` asks for."""
    heads = q_shape[1]
    k_shape, v_shape = ((shape[0], heads, *shape[2:]) for shape in (k_shape, v_shape))
    flops: int = sdpa_flop_count(q_shape, k_shape, v_shape)
    return flops
