"""A tile's own layers: copies of the user's modules that compute with this rank's part of the weights.

The user's model keeps the parameters (under their names, cut to this rank's pieces); the copies made here refer to
them, or to views of them, as plain attributes. Where a tensor group cuts a module, the copy gets the collective at its
edge.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from whale_trainer.describe import layers_of
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import ModelSpec, ModuleSplit, SplitKind
from whale_trainer.planning.pieces import ParameterLayout
from whale_trainer.planning.plan import Plan, Tile
from whale_trainer.planning.shares import Interval, cut_units, kv_units
from whale_trainer.runtime.collectives import copy_to_group, sum_over_group
from whale_trainer.runtime.dropout import DropoutState, PlanFreeDropout
from whale_trainer.runtime.vocab import VocabShard
from whale_trainer.runtime.weight_gradients import WeightGradients

Pieces = dict[tuple[str, int], nn.Parameter]
"""A rank's stored parameters by logical name and piece index."""


@dataclass(frozen=True)
class View:
    """How a copied module's weight is taken from a stored parameter, where the two differ."""

    module: nn.Module
    attribute: str
    source: nn.Parameter
    dim: int
    interval: Interval

    def refresh(self) -> None:
        """Make the view anew, so that its gradient reaches the parameter in the forward pass that follows."""
        self.module.__dict__[self.attribute] = self.source.narrow(self.dim, self.interval.start, len(self.interval))


class TileLayers:
    """The layers of one tile on this rank, ready to run."""

    def __init__(self, layers: list[nn.Module], views: list[View]) -> None:
        self.layers = layers
        self._views = views

    def __call__(self, x: Any) -> Any:
        for view in self._views:
            view.refresh()
        for layer in self.layers:
            x = layer(x)
        return x

    def train(self, mode: bool) -> None:
        for layer in self.layers:
            layer.train(mode)


def cut_parameters(model: nn.Module, layouts: tuple[ParameterLayout, ...], rank: int) -> Pieces:
    """Replace the model's parameters by this rank's pieces, in place, and return these by (name, piece index).

    Parameters that the rank does not hold are removed. A second piece of the same parameter is registered beside the
    first as `<name>_piece1`. Tied weights stay one parameter.
    """
    pieces: Pieces = {}
    by_name = dict(model.named_parameters())
    by_object: dict[int, list[nn.Parameter]] = {}
    for layout in layouts:
        name, whole = layout.parameter.name, by_name[layout.parameter.name]
        held = layout.pieces(rank)
        parts = []
        for interval in held:
            part = whole.detach()
            if layout.parameter.cut is not None:
                part = part.narrow(layout.dim, interval.start, len(interval))
            parts.append(
                nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)
            )
        by_object[id(whole)] = parts
        pieces.update({(name, i): part for i, part in enumerate(parts)})
    for module in model.modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) not in by_object:
                continue
            parts = by_object[id(parameter)]
            module._parameters[attribute] = parts[0] if parts else None
            for index, part in enumerate(parts[1:], start=1):
                module.register_parameter(f"{attribute}_piece{index}", part)
    return pieces


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, each with the first name."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}


class ShardBuilder:
    """Makes the `TileLayers` of one rank: `copy` every tile, then `cut_parameters`, then `bind` every tile."""

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        plan: Plan,
        layouts: tuple[ParameterLayout, ...],
        rank: int,
        state: DropoutState,
        weights: WeightGradients | None = None,
    ) -> None:
        """`weights`: where gradients of weights wait, if backward passes are split."""
        self._model = model
        self._spec = spec
        self._plan = plan
        self._rank = rank
        self._state = state
        self._put_off = weights
        self._modules = dict(model.named_modules())
        self._shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        by_name = {layout.parameter.name: layout for layout in layouts}
        layout_of = {id(p): by_name[name] for name, p in model.named_parameters()}
        self._weights = [
            (m, a, layout_of[id(p)]) for m in model.modules() for a, p in m._parameters.items() if p is not None
        ]
        self._copies: dict[int, tuple[list[nn.Module], dict[int, Any]]] = {}

    def copy(self, tile_index: int) -> None:
        """Copy the tile's modules; the copies share parameters and buffers with the model."""
        layers = [module for _, module in layers_of(self._model)]
        memo: dict[int, Any] = dict(self._shared)
        copies = []
        for index in range(*self._plan.tiles[tile_index].layers):
            try:
                copies.append(copy.deepcopy(layers[index], memo))
            except (TypeError, RuntimeError, NotImplementedError) as error:
                path = f"model.{self._spec.layers[index].name}"
                remedy = "keep open files, locks and non-leaf tensors out of modules"
                raise ConfigError([Problem(path, f"this layer cannot be copied ({error}); {remedy}")]) from error
        self._copies[tile_index] = (copies, memo)

    def bind(self, tile_index: int, pieces: Pieces, group: dist.ProcessGroup | None) -> TileLayers:
        """Point the copies at this rank's pieces and cut them over `group` (None for a tile on one rank)."""
        copies, memo = self._copies[tile_index]
        tile = self._plan.tiles[tile_index]
        views: list[View] = []
        for original, attribute, layout in self._weights:
            module = memo.get(id(original))
            if not isinstance(module, nn.Module) or attribute not in module._parameters:
                continue
            use = next(u for u in layout.uses if u.rank == self._rank and u.tile == tile_index)
            index = layout.piece_of(self._rank, use.interval)
            source, piece = pieces[layout.parameter.name, index], layout.pieces(self._rank)[index]
            inside = use.interval.shifted(-piece.start)
            view = None if piece == use.interval else View(module, attribute, source, layout.dim, inside)
            del module._parameters[attribute]
            if view is not None and use.contributes:
                views.append(view)
            elif view is not None:
                module.__dict__[attribute] = source.detach().narrow(layout.dim, inside.start, len(inside))
            else:
                module.__dict__[attribute] = source if use.contributes else source.detach()
        root = nn.ModuleList(copies)
        self._replace_dropouts(root, tile, memo)
        if group is not None:
            for split in self._spec.splits:
                if tile.layers.start <= split.layer < tile.layers.stop:
                    cut_module(
                        memo[id(self._modules[split.module])],
                        split,
                        tile,
                        tile.shard_of(self._rank),
                        group,
                        self._put_off,
                    )
        if self._put_off is not None:
            self._put_off.put_off(root)
        return TileLayers(list(root), views)

    def _replace_dropouts(self, root: nn.Module, tile: Tile, memo: dict[int, Any]) -> None:
        sizes = dict(self._spec.dropouts)
        names = {id(memo[id(m)]): name for name, m in self._modules.items() if id(m) in memo}
        for parent in list(root.modules()):
            for attribute, child in list(parent.named_children()):
                if type(child) is nn.Dropout:
                    name = names[id(child)]
                    part = self._dropout_part(sizes.get(name), tile)
                    dropout = PlanFreeDropout(child.p, name, self._state, part, sizes.get(name, 0))
                    setattr(parent, attribute, dropout.train(child.training))

    def _dropout_part(self, size: int | None, tile: Tile) -> Interval | None:
        """This rank's part of a dim of `size` elements, if the tile's group cuts such a dim."""
        if len(tile.shards) == 1:
            return None
        for split in self._spec.splits:
            dim = split.split
            if (
                dim is not None
                and tile.layers.start <= split.layer < tile.layers.stop
                and size == dim.units * (split.head_dim or 1)
            ):
                return cut_units(dim, tile.weights)[tile.shard_of(self._rank)].scaled(split.head_dim or 1)
        return None


def cut_module(
    module: nn.Module,
    split: ModuleSplit,
    tile: Tile,
    shard: int,
    group: dist.ProcessGroup,
    weights: WeightGradients | None = None,
) -> None:
    """Give the copied `module`, whose weights are this rank's part already, the collectives at its edges."""
    if split.kind is SplitKind.PARTIAL:
        return
    assert split.split is not None
    part = cut_units(split.split, tile.weights)[shard]
    if split.kind is SplitKind.COLUMN:
        _before(module, group)
    elif split.kind is SplitKind.ROW:
        _sum_after(module, group, weights)
    elif split.kind is SplitKind.HEADS:
        _before(module, group)
        _sum_after(module.get_submodule("o_proj"), group, weights)
        _spread_kv(module, split, part)
    elif isinstance(module, nn.Embedding):
        _embed_part(module, part, group)
    else:
        _before(module, group)
        module.register_forward_hook(lambda _m, _a, out: VocabShard(out, group, part, split.split.units))  # type: ignore[union-attr]


def _before(module: nn.Module, group: dist.ProcessGroup) -> None:
    """What the module gets by position is whole on every rank, and what by keyword may be the rank's own part."""

    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(copy_to_group(a, group) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    module.register_forward_pre_hook(hook)


def _sum_after(module: nn.Module, group: dist.ProcessGroup, weights: WeightGradients | None) -> None:
    """Partial products are summed before the bias is added, so that it counts once."""

    linear: Any = module
    product = F.linear if weights is None else weights.linear

    def forward(x: Tensor) -> Tensor:
        out = sum_over_group(product(x, linear.weight), group)
        return out if linear.bias is None else out + linear.bias

    linear.forward = forward


def _embed_part(module: nn.Embedding, part: Interval, group: dist.ProcessGroup) -> None:
    embedding: Any = module

    def forward(tokens: Tensor) -> Tensor:
        local = tokens - part.start
        is_ours = (local >= 0) & (local < len(part))
        rows = F.embedding(local.clamp(0, len(part) - 1), embedding.weight) * is_ours.unsqueeze(-1)
        return sum_over_group(rows, group)

    embedding.forward = forward


def _spread_kv(module: nn.Module, split: ModuleSplit, heads: Interval) -> None:
    """Where this rank's query heads do not use its kv heads in equal groups, repeat kv heads until each has its own."""
    assert split.split is not None
    assert split.head_dim is not None
    group = split.split.units // (split.split.num_kv_heads or split.split.units)
    kv = kv_units(split.split, heads)
    index = torch.tensor([head // group - kv.start for head in range(*heads)])
    even = len(heads) // len(kv)
    if torch.equal(index, torch.arange(len(kv)).repeat_interleave(even)) and len(heads) == even * len(kv):
        return
    head_dim = split.head_dim

    def hook(_module: nn.Module, _args: tuple[Any, ...], out: Tensor) -> Tensor:
        spread = out.unflatten(-1, (-1, head_dim)).index_select(-2, index.to(out.device))
        return spread.flatten(-2)

    module.get_submodule("k_proj").register_forward_hook(hook)
    module.get_submodule("v_proj").register_forward_hook(hook)
