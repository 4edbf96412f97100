"""What each layer holds in memory while it trains, measured by running it once on the meta device as a tile runs it.

    spec = with_footprints(describe(model, batch), model, batch, precision="bf16-mixed")

The layer is copied, gets the runtime's dropout, and for its cut form the runtime's collectives, whose group has no
peers. Every storage that appears is recorded until it goes away. The micro-batch, and a rank's part of each dim, have
prime sizes, so that the size of a storage tells what it grows with: 5 x 10007 x 20011 elements are five for each sample
and unit. Nothing is computed, so the sizes cost nothing.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from whale_trainer.cluster import Cluster
from whale_trainer.describe import first_inputs, layers_of, model_loss
from whale_trainer.describe.autocast import MetaAutocast
from whale_trainer.describe.costs import on_meta, structure_of
from whale_trainer.describe.kernels import fused_form
from whale_trainer.describe.meta import without_compiler
from whale_trainer.errors import ConfigError
from whale_trainer.model_spec import Bytes, Footprint, LayerMemory, ModelSpec, ModuleSplit, SplitDim
from whale_trainer.planning.plan import Shard, Tile
from whale_trainer.planning.shares import KV_HEADS, Interval, cut_elements, cut_units, kv_dim
from whale_trainer.runtime.dropout import DropoutState, PlanFreeDropout
from whale_trainer.runtime.precision import Precision
from whale_trainer.runtime.shards import cut_module
from whale_trainer.runtime.vocab import VocabShard

SAMPLES = 10007
"""Samples of the micro-batch: a prime, so that what is no multiple of it does not grow with the samples."""
PARTS = (20011, 20021, 20023, 20029, 20047, 20051, 20063, 20071)
"""Units of a rank's part of each dim; of heads, groups of them that share a key and value head."""
GROUP = 211
"""Heads of such a group."""
_WIDE_RESULTS = (torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default)
"""Losses that on real devices (torch 2.13) give their sum in a storage of the size of their first argument."""
EVEN = (1, 1)
"""Weights of the tensor group of which a cut layer is the first shard."""

Vector = np.ndarray[Any, np.dtype[np.float64]]
"""Bytes by what they grow with, [2, 1 + dims]: fixed ones and those of each sample; those of no dim come first."""


@without_compiler()
def with_footprints(
    spec: ModelSpec, model: nn.Module, batch: Any, *, precision: str = "32-true", device_type: str = "cpu"
) -> ModelSpec:
    """`spec` with the footprint of each layer under `precision` on devices of this type.

    Without one for a layer that does not run on the meta device, as some that look at values, and for all after it.
    """
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not leaves:
        return spec
    count = len(leaves[0])
    size = sum(leaf.nbytes for leaf in leaves if len(leaf) == count) / count
    formats = _Formats(Precision(precision), device_type)
    try:
        found = _memories(spec, on_meta(model).train(), _enlarged(batch, count, formats), formats)
    except ConfigError:  # only a model of one layer comes here with a mistake in it: nothing else was asked of it
        found = [None] * spec.num_layers
    layers = tuple(replace(layer, memory=memory) for layer, memory in zip(spec.layers, found, strict=True))
    return replace(spec, layers=layers, batch_bytes=size)


def device_type_of(cluster: Cluster) -> str:
    """`cuda` where any of the devices is a GPU, else `cpu`."""
    return "cuda" if any(d.kind.is_gpu for d in cluster.devices) else "cpu"


@dataclass(frozen=True)
class _Formats:
    """Number formats of the run, on the meta device."""

    precision: Precision
    device_type: str

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """Of a parameter or an input that is given as `dtype`."""
        return self.precision.parameter_dtype if dtype.is_floating_point else dtype

    def context(self) -> AbstractContextManager[Any]:
        lower = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.precision.name)
        return nullcontext() if lower is None else MetaAutocast(self.device_type, lower)


def _enlarged(batch: Any, count: int, formats: _Formats) -> Any:
    """The batch on the meta device, with `SAMPLES` samples in place of `count`."""

    def grown(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = (SAMPLES, *leaf.shape[1:]) if leaf.dim() and len(leaf) == count else leaf.shape
        return torch.empty(shape, dtype=formats.of(leaf.dtype), device="meta")

    return tree_map(grown, batch)


def _memories(spec: ModelSpec, model: nn.Module, batch: Any, formats: _Formats) -> list[LayerMemory | None]:
    """Of each layer; None for one that fails and for all after it."""
    layers = layers_of(model)
    names = {id(m): name for name, m in model.named_modules()}
    known: dict[tuple[Any, ...], tuple[LayerMemory, Any]] = {}
    found: list[LayerMemory | None] = []
    boundary = first_inputs(model, batch)
    assert len(layers) == spec.num_layers
    for index, (name, layer) in enumerate(layers):
        splits = [s for s in spec.splits if s.layer == index]
        is_last = index == len(layers) - 1
        key = (structure_of(layer, names.get(id(layer), name), splits), str(tree_map(_form, boundary)), is_last)
        if key not in known:
            runs = _Runs(spec, model, layer, splits, formats, batch if is_last else None)
            try:
                known[key] = runs.memory(boundary)
            except Exception:  # a layer may look at values, which the meta device has not
                return found + [None] * (len(layers) - index)
        memory, boundary = known[key]
        found.append(memory)
    return found


@dataclass(frozen=True)
class _Form:
    """A tensor without its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _form(leaf: Any) -> Any:
    return _Form(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _built(leaf: Any) -> Any:
    if not isinstance(leaf, _Form):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


@dataclass(frozen=True)
class _Runs:
    """A layer to be run in each of its forms; the last one with the loss of `batch`."""

    spec: ModelSpec
    model: nn.Module
    layer: nn.Module
    splits: Sequence[ModuleSplit]
    formats: _Formats
    batch: Any

    def memory(self, boundary: Any) -> tuple[LayerMemory, Any]:
        """Its footprints for this input, and its output."""
        whole, out = self._with_loss(boundary, ())
        cut = None
        if self.splits:
            try:
                cut, _ = self._with_loss(boundary, self.splits)
            except Exception:  # it may know its sizes by heart, and a part has others
                cut = None
        return LayerMemory(self.formats.precision.name, whole, cut), out

    def _with_loss(self, boundary: Any, splits: Sequence[ModuleSplit]) -> tuple[Footprint, Any]:
        if self.batch is not None:
            try:
                return self._run(boundary, splits, self.batch)
            except Exception:  # no loss, or one that looks at values
                pass
        return self._run(boundary, splits, None)

    def _run(self, boundary: Any, splits: Sequence[ModuleSplit], batch: Any) -> tuple[Footprint, Any]:
        dims = _Dims(tuple(dict.fromkeys(s.split for s in splits if s.split is not None)))
        copied = _copied(self.spec, self.model, self.layer, splits, dims, self.formats)
        own = [*copied.parameters(), *copied.buffers()]
        others = [t for t in tree_leaves((boundary, batch)) if isinstance(t, Tensor)]
        record = _Record(dims, own, others)
        with ExitStack() as stack:
            stack.enter_context(record)
            stack.enter_context(_Fused())
            x = boundary
            if any(t.requires_grad for t in tree_leaves(x) if isinstance(t, Tensor)):
                x = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, x)
                record.mark("input", tree_leaves(x))
            with self.formats.context():
                out = copied(x)
                del x
                loss = None if batch is None else model_loss(self.model, out, batch)[0] * 1.0
            if isinstance(out, VocabShard):
                out = out.local
            form = tree_map(_form, out)
            record.mark("output", tree_leaves(out))
            ends = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            del out
            if loss is None:
                loss = _End.apply(record, *ends) if ends else None
            ends.clear()
            record.turn()
            if loss is not None and loss.requires_grad:
                torch.autograd.backward(loss)
        return record.footprint(), tree_map(_built, form)


class _End(torch.autograd.Function):
    """Stands for all that comes after a layer: takes its output, and gives back a gradient that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, record: _Record, *outputs: Tensor) -> Tensor:
        ctx.record = record
        ctx.forms = [(t.shape, t.dtype) for t in outputs]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:  # type: ignore[override]
        gradients = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.forms]
        ctx.record.mark("gradient", gradients)
        return (None, *gradients)


class _Fused(TorchFunctionMode):
    """Attention and LSTMs as real devices compute them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused = fused_form(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if fused is None else fused()


class _NoPeers:
    """Takes the place of a tensor group: the sums of its ranks are there already."""

    def allreduce(self, _tensors: Any, _options: Any) -> None:
        return None


class _Dims:
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


def _copied(
    spec: ModelSpec,
    model: nn.Module,
    layer: nn.Module,
    splits: Sequence[ModuleSplit],
    dims: _Dims,
    formats: _Formats,
) -> nn.Module:
    """The layer with parameters of its own, of which the cut ones have the size of a rank's part."""
    cuts = {p.name: p.cut for p in spec.parameters}
    memo: dict[int, Any] = {id(b): b.to(formats.of(b.dtype)) for b in layer.buffers()}
    for name, parameter in model.named_parameters():
        shape, cut = list(parameter.shape), cuts.get(name)
        if cut is not None and cut.split in dims.enlarged:
            shape[cut.dim] = len(cut_elements(replace(cut, split=dims.enlarged[cut.split]), EVEN, 0))
        part = torch.empty(shape, dtype=formats.of(parameter.dtype), device="meta")
        memo[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    modules = dict(model.named_modules())
    root = nn.ModuleList([copy.deepcopy(layer, memo)])
    names = {id(memo[id(m)]): name for name, m in modules.items() if id(m) in memo}
    _replace_dropouts(root, names, dict(spec.dropouts), splits, dims)
    tile = Tile(Interval(0, 1), Interval(0, 1), tuple(Shard(i, weight) for i, weight in enumerate(EVEN)))
    group: Any = _NoPeers()
    for split in splits:
        enlarged = None if split.split is None else dims.enlarged[split.split]
        cut_module(memo[id(modules[split.module])], replace(split, split=enlarged), tile, 0, group)
    return root[0]


def _replace_dropouts(
    root: nn.Module, names: Mapping[int, str], sizes: Mapping[str, int], splits: Sequence[ModuleSplit], dims: _Dims
) -> None:
    for parent in list(root.modules()):
        for attribute, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                part, size = None, sizes.get(names[id(child)], 0)
                for split in splits:
                    width = split.head_dim or 1
                    if split.split is not None and size == split.split.units * width:
                        enlarged = dims.enlarged[split.split]
                        part, size = cut_units(enlarged, EVEN)[0].scaled(width), enlarged.units * width
                        break
                setattr(parent, attribute, PlanFreeDropout(child.p, names[id(child)], DropoutState(0), part, size))


class _Record(TorchDispatchMode):
    """Every storage that comes and goes, in order, from the forward pass over the turn to the backward pass."""

    def __init__(self, dims: _Dims, own: Sequence[Tensor], others: Sequence[Tensor]) -> None:
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
        assert parameter.grad is not None
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
