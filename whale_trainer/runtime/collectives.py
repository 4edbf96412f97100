"""Collectives that autograd can pass through: what a cut layer does at its edges.

The names say what happens to the activation; the gradient gets the adjoint. All tensors keep their shape on every rank,
except in `gather_last_dim`, whose parts may be of unequal size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale_trainer.planning.shares import Interval


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, part: Interval, size: int) -> Tensor:
        ctx.part = part
        full = x.new_zeros(*x.shape[:-1], size)
        full[..., part.start : part.stop] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return grad[..., ctx.part.start : ctx.part.stop], None, None, None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x` itself, about to be used by differing parts of a layer: its gradient is the sum over the group's parts.

    The ranks of the group must agree on whether they meet in the backward pass. One whose `x` needs no gradient
    (another rank trains the uncut layers before it) takes part all the same.
    """
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()
    return _CopyToGroup.apply(x, group)


def sum_over_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of the group's partial results; each rank has the whole gradient already. May overwrite `x`."""
    return _SumOverGroup.apply(x, group)


def gather_last_dim(x: Tensor, group: dist.ProcessGroup, part: Interval, size: int) -> Tensor:
    """The whole last dim of `size` elements, of which this rank computed `part`.

    Sums zero-filled copies, which is exact and takes parts of any size (gloo's all_gather wants equal ones).
    """
    return _GatherLastDim.apply(x, group, part, size)
