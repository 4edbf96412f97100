"""Logits that are cut by vocabulary rows, and their cross entropy without gathering them.

The user's `loss(output, batch)` stays as written: `VocabShard` stands for the whole logits. `F.cross_entropy` on it is
computed from the parts; any other function gets the gathered logits, which is slower and equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from whale_trainer.planning.shares import Interval
from whale_trainer.runtime.collectives import gather_last_dim

_KEEPS_LAST_DIM = ("float", "double", "half", "bfloat16", "to", "contiguous", "clone", "detach")


class VocabShard:
    """Stands for logits of shape `(..., size)` of which this rank holds the columns `part`."""

    def __init__(self, local: Tensor, group: dist.ProcessGroup, part: Interval, size: int) -> None:
        self.local = local
        self.group = group
        self.part = part
        self.vocabulary = size

    def full(self) -> Tensor:
        """The whole logits, on every rank of the group."""
        return gather_last_dim(self.local, self.group, self.part, self.vocabulary)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.local.shape[:-1], self.vocabulary))

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    def _wrap(self, local: Tensor) -> VocabShard:
        return VocabShard(local, self.group, self.part, self.vocabulary)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.local.dim()

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = self.local.dim() - 1
        if end_dim % self.local.dim() < last:
            return self._wrap(self.local.flatten(start_dim, end_dim))
        return self.full().flatten(start_dim, end_dim)

    def reshape(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        if (len(sizes) > 1 and sizes[-1] == self.vocabulary) or (sizes[-1] == -1 and -1 not in sizes[:-1]):
            rows = self.local.reshape(*sizes[:-1], -1) if sizes[-1] != -1 else None
            if rows is not None and rows.shape[-1] == self.local.shape[-1]:
                return self._wrap(rows)
        return self.full().reshape(*sizes)

    view = reshape

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _KEEPS_LAST_DIM:
            return lambda *args, **kwargs: self._wrap(getattr(self.local, name)(*args, **kwargs))
        return getattr(self.full(), name)

    def __getitem__(self, index: Any) -> Any:
        dims = index if isinstance(index, tuple) else (index,)
        leading = [d for d in dims if d is not Ellipsis and d is not None]
        if Ellipsis not in dims and len(leading) < self.local.dim() and all(isinstance(d, slice | int) for d in dims):
            return self._wrap(self.local[index])
        return self.full()[index]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.cross_entropy and isinstance(args[0], VocabShard) and _is_plain(args, kwargs):
            target = args[1] if len(args) > 1 else kwargs["target"]
            return _cross_entropy(args[0], target, kwargs.get("ignore_index", -100), kwargs.get("reduction", "mean"))
        return func(*map(_gathered, args), **{k: _gathered(v) for k, v in kwargs.items()})


def _gathered(value: Any) -> Any:
    return value.full() if isinstance(value, VocabShard) else value


def _is_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True for class indices as targets, without class weights or label smoothing."""
    target = args[1] if len(args) > 1 else kwargs.get("target")
    return (
        len(args) <= 2
        and args[0].local.dim() == 2
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        # F.cross_entropy hands on all that it may be told, said or not
        and all(kwargs.get(name) is None for name in ("weight", "size_average", "reduce"))
        and not kwargs.get("label_smoothing")
        and set(kwargs)
        <= {"target", "ignore_index", "reduction", "weight", "label_smoothing", "size_average", "reduce"}
    )


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, shard: VocabShard) -> Tensor:
        # logits (rows, part), target (rows,): three small collectives instead of one of rows x vocabulary
        peak = logits.max(dim=-1).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
        shifted = logits - peak.unsqueeze(-1)
        exp = shifted.exp()
        column = target - shard.part.start
        is_ours = (column >= 0) & (column < len(shard.part)) & (target != ignore_index)
        column = column.clamp(0, len(shard.part) - 1)
        picked = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1) * is_ours
        sums = torch.stack((exp.sum(dim=-1), picked))
        dist.all_reduce(sums, group=shard.group)
        losses = (sums[0].log() - sums[1]) * (target != ignore_index)
        ctx.save_for_backward(exp.div_(sums[0].unsqueeze(-1)), column, is_ours, target != ignore_index)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        softmax, column, is_ours, is_counted = ctx.saved_tensors
        result = softmax * (grad * is_counted).unsqueeze(-1)
        result.scatter_add_(-1, column.unsqueeze(-1), -(grad * is_ours).unsqueeze(-1))
        return result, None, None, None


def _cross_entropy(logits: VocabShard, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    losses: Tensor = _ShardedCrossEntropy.apply(logits.local, target, ignore_index, logits)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()
