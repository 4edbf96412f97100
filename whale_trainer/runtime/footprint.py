"""What each layer holds in memory while it trains, measured by running it once on the meta device as a tile runs it.

    spec = with_footprints(describe(model, batch), model, batch, precision="bf16-mixed")

The layer is copied, gets the runtime's dropout, and for its cut form the runtime's collectives, whose group has no
peers. Every storage that appears is recorded until it goes away. The micro-batch, and a rank's part of each dim, have
prime sizes, so that the size of a storage tells what it grows with: 5 x 10007 x 20011 elements are five for each sample
and unit. Nothing is computed, so the sizes cost nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from whale_trainer.cluster import Cluster
from whale_trainer.describe import first_inputs, layers_of, model_loss
from whale_trainer.describe.autocast import MetaAutocast
from whale_trainer.describe.costs import on_meta, structure_of
from whale_trainer.describe.kernels import fused_form
from whale_trainer.describe.meta import without_compiler
from whale_trainer.errors import ConfigError
from whale_trainer.model_spec import Footprint, LayerMemory, ModelSpec, ModuleSplit
from whale_trainer.planning.plan import Shard, Tile
from whale_trainer.planning.shares import Interval, cut_elements, cut_units
from whale_trainer.runtime.dropout import DropoutState, PlanFreeDropout
from whale_trainer.runtime.precision import Precision
from whale_trainer.runtime.shards import cut_module
from whale_trainer.runtime.storages import SAMPLES, Dims, Record
from whale_trainer.runtime.vocab import VocabShard
from whale_trainer.runtime.weight_gradients import WeightGradients

WAITING = "waiting"
"""The role of what is kept for the gradients of weights."""
EVEN = (1, 1)
"""Weights of the tensor group of which a cut layer is the first shard."""


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
        return nullcontext() if self.lower is None else MetaAutocast(self.device_type, self.lower)

    @property
    def lower(self) -> torch.dtype | None:
        """What autocast computes in."""
        return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.precision.name)


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
        whole, out = self._pass(boundary, splits, batch, None)
        split, _ = self._pass(boundary, splits, batch, WeightGradients(meta_dtype=self.formats.lower))
        return replace(whole, split=split.later, split_held=split.later_held, waiting=split.waiting), out

    def _pass(
        self, boundary: Any, splits: Sequence[ModuleSplit], batch: Any, weights: WeightGradients | None
    ) -> tuple[Footprint, Any]:
        """A forward and a backward pass; with `weights` one that leaves the gradients of weights."""
        dims = Dims(tuple(dict.fromkeys(s.split for s in splits if s.split is not None)))
        copied = _copied(self.spec, self.model, self.layer, splits, dims, self.formats, weights)
        own = [*copied.parameters(), *copied.buffers()]
        others = [t for t in tree_leaves((boundary, batch)) if isinstance(t, Tensor)]
        record = Record(dims, own, others)
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
            if weights is not None:
                weights.waiting = []
            if loss is not None and loss.requires_grad:
                torch.autograd.backward(loss)
            if weights is not None:
                record.mark(WAITING, [t for product in weights.waiting or () for t in (product.x, product.grad)])
        found = record.footprint()
        return (found if weights is None else replace(found, waiting=record.of(WAITING))), tree_map(_built, form)


class _End(torch.autograd.Function):
    """Stands for all that comes after a layer: takes its output, and gives back a gradient that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, record: Record, *outputs: Tensor) -> Tensor:
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


def _copied(
    spec: ModelSpec,
    model: nn.Module,
    layer: nn.Module,
    splits: Sequence[ModuleSplit],
    dims: Dims,
    formats: _Formats,
    weights: WeightGradients | None,
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
        cut_module(memo[id(modules[split.module])], replace(split, split=enlarged), tile, 0, group, weights)
    if weights is not None:
        weights.put_off(root)
    return root[0]


def _replace_dropouts(
    root: nn.Module, names: Mapping[int, str], sizes: Mapping[str, int], splits: Sequence[ModuleSplit], dims: Dims
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
