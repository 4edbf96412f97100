"""Autocast for tensors on the meta device, which torch's own leaves as they are.

The lists are those of https://docs.pytorch.org/docs/2.9/amp.html#autocast-op-reference, by what Python code calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LOWER_NAMES = (
    "addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d "
    "conv_transpose3d einsum gru gru_cell lstm lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh rnn_tanh_cell"
)
_LOWER_OTHERS = (torch._C._nn.linear, F.scaled_dot_product_attention, Tensor.__matmul__, Tensor.__rmatmul__)
_LOSSES = (
    "binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss hinge_embedding_loss huber_loss "
    "kl_div l1_loss margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss poisson_nll_loss "
    "smooth_l1_loss soft_margin_loss triplet_margin_loss"
)
_FLOAT32_ON_GPUS = (
    "acos asin cosh cosine_similarity cumprod cumsum erfinv exp expm1 group_norm layer_norm log log10 log1p log2 "
    "log_softmax norm normalize pow prod reciprocal renorm rsqrt sinh softmax softmin softplus sum tan"
)


def _named(names: str) -> set[Any]:
    """Functions of these names, of torch, of `torch.nn.functional` and of tensors."""
    return {getattr(home, name) for name in names.split() for home in (torch, F, Tensor) if hasattr(home, name)}


_LOWER = _named(_LOWER_NAMES) | set(_LOWER_OTHERS)
_FLOAT32 = {"cpu": _named(_LOSSES), "cuda": _named(f"{_LOSSES} {_FLOAT32_ON_GPUS}")}


class MetaAutocast(TorchFunctionMode):
    """Casts what `torch.autocast(device_type, dtype, cache_enabled=False)` casts on a real device."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._float32 = _FLOAT32[device_type]

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = self._dtype if func in _LOWER else torch.float32 if func in self._float32 else None
        if dtype is None:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda leaf: _cast(leaf, dtype), (args, kwargs or {}))
        return func(*args, **kwargs)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    is_cast = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
    return leaf.to(dtype) if is_cast else leaf
