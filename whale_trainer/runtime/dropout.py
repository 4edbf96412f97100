"""Dropout whose mask is a function of (seed, step, module, call, global element), so that no plan changes it.

A counter-based hash: an element's index in the *global* batch and the whole tensor decides whether it is kept, whatever
rank computes it. Costs about twice torch's own generator (https://nullprogram.com/blog/2018/07/31/ for the mixing).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from whale_trainer.planning.shares import Interval


@dataclass
class DropoutState:
    """Where the run is; the executor sets it before each forward action."""

    seed: int
    step: int = 0
    first_row: int = 0
    """Position in the global batch of the first sample of the tensors at hand."""
    calls: dict[int, int] = field(default_factory=dict)

    def enter(self, step: int, first_row: int) -> None:
        self.step, self.first_row = step, first_row
        self.calls.clear()


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None


class PlanFreeDropout(nn.Module):
    """Takes the place of an `nn.Dropout`.

    `part` is this rank's part of a last dim of `size` elements where a tensor group cuts it; input of the full size is
    still taken as whole.
    """

    def __init__(self, p: float, name: str, state: DropoutState, part: Interval | None = None, size: int = 0) -> None:
        super().__init__()
        self.p = p
        self.state = state
        self.part = part
        self.size = size
        self._id = zlib.crc32(name.encode())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        call = self.state.calls.get(self._id, 0)
        self.state.calls[self._id] = call + 1
        key = _mix_key(self.state.seed, self.state.step, self._id, call)
        part = self.part if self.part is not None and x.shape[-1] == len(self.part) != self.size else None
        index = _global_index(x, self.state.first_row, part, self.size if part is not None else x.shape[-1])
        threshold = int(self.p * 2**31)
        return _Drop.apply(x, _hash(index, key).ge_(threshold).bool(), 1.0 / (1.0 - self.p))


def replace_dropouts(module: nn.Module, state: DropoutState) -> None:
    """Put a `PlanFreeDropout` in the place of every `nn.Dropout` inside `module`; names and weights stay."""
    for prefix, parent in list(module.named_modules()):
        for attribute, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                name = f"{prefix}.{attribute}" if prefix else attribute
                setattr(parent, attribute, PlanFreeDropout(child.p, name, state).train(child.training))


def _mix_key(*words: int) -> int:
    """One signed 32-bit key from several numbers (splitmix64 steps)."""
    state = 0
    for word in words:
        state = (state ^ word) * 0x9E3779B97F4A7C15 & (2**64 - 1)
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state ^= state >> 27
    return (state & 0xFFFFFFFF) - 2**31


def _global_index(x: Tensor, first_row: int, part: Interval | None, last: int) -> Tensor:
    """int32 index of each element of `x` in the tensor that the whole global batch and all shards would make."""
    if part is None:
        count = x.numel()
        start = first_row * (count // max(1, x.shape[0]))
        return torch.arange(start, start + count, device=x.device).to(torch.int32).view(x.shape)
    rows = x.numel() // x.shape[-1]
    start = first_row * (rows // max(1, x.shape[0]))
    row = torch.arange(start, start + rows, device=x.device).unsqueeze(-1) * last
    column = torch.arange(part.start, part.stop, device=x.device)
    return (row + column).to(torch.int32).view(x.shape)


def _hash(index: Tensor, key: int) -> Tensor:
    """Uniform 31-bit integers; `index` is overwritten. Products wrap in 32 bits on every backend."""
    h = index.mul_(0x27D4EB2F).bitwise_xor_(key)
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))
    return h.bitwise_and_(0x7FFFFFFF)
