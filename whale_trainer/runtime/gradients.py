"""Gradient sums: each segment of each parameter over the ranks that hold it, in buckets, during the backward pass.

A bucket's sum starts as soon as the last backward action that adds to it is over on this rank; buckets start in one
order on all ranks. Gradients live in the buckets' flat buffers wherever a parameter is a single contiguous segment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale_trainer.planning.pieces import Bucket, ParameterLayout, gradient_buckets
from whale_trainer.runtime.mesh import Mesh
from whale_trainer.runtime.pace import OwnPace, Pace
from whale_trainer.runtime.shards import Pieces


@dataclass
class _Slot:
    """A segment's place in a flat buffer. `outside` is set where the gradient is not that place itself."""

    parameter: nn.Parameter
    place: Tensor
    outside: tuple[int, int, int] | None
    """(dim, start, length) inside the parameter, when the segment must be copied in and out."""


@dataclass
class _LiveBucket:
    number: int
    """Among those of all ranks."""
    flat: Tensor
    group: dist.ProcessGroup
    slots: list[_Slot]
    pending: set[int] = field(default_factory=set)
    """ids of parameters whose gradient is not final yet."""
    work: dist.Work | None = None


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that keeps nothing alive: autograd's own are out of the garbage collector's sight, and with the sums the
    process groups would stay."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(parameter)

    return hook


class GradientSums:
    """The sums of one rank. Use: `begin`, then for each last backward action `expect` / `settle`, then `finish`."""

    def __init__(
        self, layouts: tuple[ParameterLayout, ...], pieces: Pieces, mesh: Mesh, pace: Pace | None = None
    ) -> None:
        self._layouts = layouts
        self._pieces = {key: p for key, p in pieces.items() if p.requires_grad}
        self._mesh = mesh
        self._pace = pace or OwnPace()
        self._buckets: list[_LiveBucket] = []
        self._home: dict[int, Tensor] = {}
        """Gradient storage of each parameter that is in some bucket, by id."""
        self._in_buckets: dict[int, list[_LiveBucket]] = {}
        self._final: set[int] = set()
        self._next = 0
        self._may_start = False
        self._kept: list[Tensor | None] = []
        for number, bucket in enumerate(gradient_buckets(layouts)):
            if mesh.rank in bucket.ranks:
                self._add(number, bucket)
        self.parameters = list(self._pieces.values())
        hook = _weakly(self._on_gradient)
        for parameter in self.parameters:
            if id(parameter) in self._home:
                parameter.register_post_accumulate_grad_hook(hook)

    def _add(self, number: int, bucket: Bucket) -> None:
        rank = self._mesh.rank
        entries: list[tuple[nn.Parameter, torch.Size, tuple[int, int, int] | None]] = []
        for entry in bucket.entries:
            layout, interval = self._layouts[entry.parameter], entry.segment.interval
            index = layout.piece_of(rank, interval)
            parameter = self._pieces[layout.parameter.name, index]
            piece = layout.pieces(rank)[index]
            if piece == interval:
                entries.append((parameter, parameter.shape, None))
            else:
                shape = list(parameter.shape)
                shape[layout.dim] = len(interval)
                outside = (layout.dim, interval.start - piece.start, len(interval))
                entries.append((parameter, torch.Size(shape), outside))
        sizes = [shape.numel() for _, shape, _ in entries]
        flat = torch.zeros(sum(sizes), dtype=entries[0][0].dtype, device=entries[0][0].device)
        live = _LiveBucket(number, flat, self._mesh.sum_group(bucket.ranks), [])
        for (parameter, size, where), part in zip(entries, flat.split(sizes), strict=True):
            slot = _Slot(parameter, part.view(size), where)
            live.slots.append(slot)
            if where is None:
                self._home[id(parameter)] = slot.place
            else:
                self._home.setdefault(id(parameter), torch.zeros_like(parameter))
            self._in_buckets.setdefault(id(parameter), []).append(live)
        self._buckets.append(live)

    def begin(self) -> None:
        """Clear all gradients for a new step."""
        self._next = 0
        self._may_start = not (self._mesh.sums_wait or self._pace.sums_wait)
        self._final.clear()
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.pending = {id(slot.parameter) for slot in bucket.slots}
            bucket.work = None
        for parameter in self.parameters:
            home = self._home.get(id(parameter))
            parameter.grad = home
            if home is not None and self._is_outside(parameter):
                home.zero_()

    def _is_outside(self, parameter: nn.Parameter) -> bool:
        return any(
            s.outside is not None for b in self._in_buckets[id(parameter)] for s in b.slots if s.parameter is parameter
        )

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """The backward action that starts now is the last to add to these parameters on this rank."""
        self._final = {id(p) for p in parameters}

    def settle(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing more comes for these parameters, whether or not a gradient did."""
        for parameter in parameters:
            self._close(parameter)
        self._final.clear()

    def _on_gradient(self, parameter: Tensor) -> None:
        if id(parameter) in self._final:
            self._close(parameter)

    def _close(self, parameter: Tensor) -> None:
        for bucket in self._in_buckets.get(id(parameter), ()):
            bucket.pending.discard(id(parameter))
        while self._may_start and self._next < len(self._buckets) and not self._buckets[self._next].pending:
            self._start(self._next)
            self._next += 1

    def _start(self, index: int) -> None:
        bucket = self._buckets[index]
        for slot in bucket.slots:
            if slot.outside is not None:
                slot.place.copy_(self._home[id(slot.parameter)].narrow(*slot.outside))
        self._pace.sum_started(bucket.number)
        bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)

    def finish(self) -> None:
        """Start what is left, wait for every sum, and leave the sums in the parameters' gradients."""
        self._may_start = True
        self.settle(self.parameters)
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            for slot in bucket.slots:
                if slot.outside is not None:
                    self._home[id(slot.parameter)].narrow(*slot.outside).copy_(slot.place)

    def gradients(self) -> list[Tensor]:
        """The gradients there are, each tensor once."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def keep(self) -> None:
        """Remember the gradients: Lightning's closure clears them between the training step and the backward call."""
        self._kept = [p.grad for p in self.parameters]

    def restore(self) -> None:
        """Give the gradients that `keep` remembered back to the parameters, and forget them."""
        for parameter, grad in zip(self.parameters, self._kept, strict=True):
            parameter.grad = grad
        self._kept = []

    def owned_square_sum(self) -> Tensor:
        """float64 sum of squares of the gradients that this rank owns; over all ranks, every element counts once."""
        wholes: list[Tensor] = []
        for layout in self._layouts:
            for index, piece in enumerate(layout.pieces(self._mesh.rank)):
                parameter = self._pieces.get((layout.parameter.name, index))
                if parameter is None or parameter.grad is None:
                    continue
                owned = [
                    s.interval for s in layout.segments if piece.contains(s.interval) and s.owner == self._mesh.rank
                ]
                if sum(map(len, owned)) == len(piece):
                    wholes.append(parameter.grad)
                else:
                    grad = parameter.grad
                    wholes += [grad.narrow(layout.dim, i.start - piece.start, len(i)) for i in owned]
        if not wholes:
            return torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        norms = torch.stack(torch._foreach_norm(wholes)).double()  # type: ignore[arg-type]
        return norms.square().sum()
