"""Storages that appear while a layer runs on the meta device: when they come and go, and what their size follows.

A `Record` is entered around a layer's forward and backward pass and gives its `Footprint`; `Dims` reads off the size of
a storage whether it grows with the samples and with a rank's part of a dim, by the primes in it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whale_trainer.model_spec import Bytes, Footprint, SplitDim
from whale_trainer.planning.shares import KV_HEADS, kv_dim

SAMPLES = 10007
"""Samples of the micro-batch: a prime, so that what is no multiple of it does not grow with the samples."""
PARTS = (20011, 20021, 20023, 20029, 20047, 20051, 20063, 20071)
"""Units of a rank's part of each dim; of heads, groups of them that share a key and value head."""
GROUP = 211
"""Heads of such a group."""
_WIDE_RESULTS = (torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default)
"""Losses that on real devices (torch 2.13) give their sum in a storage of the size of their first argument."""
Vector = np.ndarray[Any, np.dtype[np.float64]]
"""Bytes by what they grow with, [2, 1 + dims]: fixed ones and those of each sample; those of no dim come first."""


class Dims:
    """The dims that a layer is cut along, with parts of prime size in place of a rank's.

    Dims of equally many units, as heads and what is made for each head, are cut alike and share a prime. Where several
    heads share a key and value head, what follows the latter is told apart by a second prime.
    """

    def __init__(self, dims: tuple[SplitDim, ...]) -> None:
        groups: dict[int, int] = {}
        for dim in dims:
            groups[dim.units] = max(groups.get(dim.units, 1), dim.units // (dim.num_kv_heads or dim.units))
        shared = tuple(kv for dim in dims if (kv := kv_dim(dim)) is not None)
        self.dims = (*dims, *shared)
        """Those that storages may follow."""
        self._parts: list[tuple[int, int, int]] = []
        """(units of a rank's part, real units, place among the dims), the coarser ones of a prime first."""
        units_of: dict[int, tuple[int, int]] = {}
        for prime, (units, group) in zip(PARTS, groups.items(), strict=False):
            per_group = GROUP if group > 1 else 1
            units_of[units] = prime, prime * per_group
            place = next(i for i, dim in enumerate(dims) if dim.units == units)
            self._parts.append((prime * per_group, units, place))
            if group > 1:
                kv = SplitDim(KV_HEADS, units // group)
                self._parts.append((prime, units // group, self.dims.index(kv)))
        self.enlarged = {
            dim: SplitDim(dim.name, 2 * units_of[dim.units][1], self._kv_heads(dim, *units_of[dim.units]))
            for dim in dims
        }
        """Each dim as a tensor group of two even shards would have it."""

    @staticmethod
    def _kv_heads(dim: SplitDim, prime: int, part: int) -> int | None:
        if dim.num_kv_heads is None:
            return None
        return 2 * (part if dim.num_kv_heads == dim.units else prime)

    def size(self, num_bytes: int) -> Vector:
        """What a storage of this size grows with."""
        found = np.zeros((2, 1 + len(self.dims)))
        row, column, value = 0, 0, float(num_bytes)
        if num_bytes and num_bytes % SAMPLES == 0:
            row, value = 1, value / SAMPLES
        for part, units, place in self._parts:
            if num_bytes and num_bytes % part == 0:
                column, value = 1 + place, value / part * units
                break
        found[row, column] = value
        return found

    def bytes_of(self, vector: Vector) -> Bytes:
        (fixed, *cut_fixed), (each, *cut_each) = vector.tolist()
        cut = zip(self.dims, cut_fixed, cut_each, strict=True)
        return Bytes(fixed, each, tuple((d, f, e) for d, f, e in cut if f or e))


class Record(TorchDispatchMode):
    """Every storage that comes and goes, in order, from the forward pass over the turn to the backward pass."""

    def __init__(self, dims: Dims, own: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        super().__init__()
        self._dims = dims
        self._sizes: list[Vector] = []
        self._events: list[tuple[int, int]] = []
        """(storage, 1 or -1)"""
        self._turn = 0
        self._added: dict[int, int] = {}
        """By storage that became a parameter's gradient, the number of events before."""
        self._roles: dict[str, set[int]] = defaultdict(set)
        self._alive: dict[int, tuple[int, Any]] = {}
        self._weights = {t.untyped_storage()._cdata for t in own}
        self._others = {t.untyped_storage()._cdata for t in others}
        for parameter in own:
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._add)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf, args[0].nbytes if func in _WIDE_RESULTS else leaf.untyped_storage().nbytes())
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights:
            self.mark("cast", [out])
        return out

    def _see(self, tensor: Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._weights or key in self._others:
            return
        number = len(self._sizes)
        self._sizes.append(self._dims.size(num_bytes))
        self._events.append((number, 1))
        self._alive[key] = (number, weakref.ref(storage, lambda _: self._drop(key)))

    def _drop(self, key: int) -> None:
        self._events.append((self._alive.pop(key)[0], -1))

    def _add(self, parameter: Tensor) -> None:
        if parameter.grad is None:  # its gradient waits
            return
        found = self._alive.get(parameter.grad.untyped_storage()._cdata)
        if found is not None:
            self._added.setdefault(found[0], len(self._events))

    def mark(self, role: str, leaves: Iterable[Any]) -> None:
        """Give the storages of these tensors a role."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self._alive:
                self._roles[role].add(self._alive[leaf.untyped_storage()._cdata][0])

    def turn(self) -> None:
        """The forward pass is over."""
        self._turn = len(self._events)

    def footprint(self) -> Footprint:
        kept = self._live(self._turn)
        inputs, outputs, gradients = (self._roles[r] for r in ("input", "output", "gradient"))
        outputs = outputs - inputs
        backward = [self._backward(kept, leaves, later) for leaves in (set(), gradients) for later in (False, True)]
        return Footprint(
            kept=self._sum(kept - inputs - outputs),
            casts=self._sum(kept & self._roles["cast"]),
            kept_input=self._sum(kept & inputs),
            kept_output=self._sum(kept & outputs),
            output=self._sum(self._roles["output"]),
            output_gradient=self._sum(gradients),
            forward=self._peaks(self._events[: self._turn], inputs),
            first=backward[0],
            later=backward[1],
            first_held=backward[2],
            later_held=backward[3],
        )

    def of(self, role: str) -> Bytes:
        """The storages of a role."""
        return self._sum(self._roles[role])

    def _live(self, stop: int) -> set[int]:
        """Storages that are there after the first `stop` events."""
        alive: set[int] = set()
        for number, change in self._events[:stop]:
            (alive.add if change > 0 else alive.discard)(number)
        return alive

    def _sum(self, numbers: Iterable[int]) -> Bytes:
        return self._dims.bytes_of(sum((self._sizes[n] for n in numbers), self._dims.size(0)))

    def _backward(self, kept: set[int], left_out: set[int], later: bool) -> tuple[Bytes, ...]:
        """Peaks beyond what is kept; the input stays, since the layer before may hold it too."""
        events = [*enumerate(self._events)][self._turn :]
        if later:
            # a gradient that is added to another goes away at once
            events = [(i, e) for i, e in events if not (e[0] in self._added and i >= self._added[e[0]])]
            ends = [(self._added[n], (n, -1)) for n in self._added]
            events = sorted([*events, *ends], key=lambda item: item[0])
        inputs = self._roles["input"]
        left_out = left_out | {n for n in kept if n in inputs}
        return self._peaks([e for _, e in events], left_out)

    def _peaks(self, events: Sequence[tuple[int, int]], left_out: set[int]) -> tuple[Bytes, ...]:
        """What is there each time that it was more than before, where that may be the most of the pass."""
        current = self._dims.size(0)
        peaks = [current]
        for number, change in events:
            if number not in left_out:
                current = current + change * self._sizes[number]
                if change > 0:
                    peaks.append(current)
        return tuple(self._dims.bytes_of(v) for v in _highest(np.array(peaks)))


def _highest(peaks: Vector) -> Vector:
    """Those of the peaks that are the highest for some number of samples and some even part of the dims."""
    numbers = 2.0 ** np.arange(0, 17, 0.5)
    parts = 1 / np.array([1, 4 / 3, 2, 3, 4, 6, 8, 16, 32, 64])
    # [samples, parts, peaks] of bytes
    fixed, each = (peaks[:, row, 0] + np.multiply.outer(parts, peaks[:, row, 1:].sum(axis=1)) for row in (0, 1))
    found = fixed + np.multiply.outer(numbers, each)
    return peaks[np.unique(found.argmax(axis=2))]
