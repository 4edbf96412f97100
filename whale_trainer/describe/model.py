"""From an `nn.Module` to a `ModelSpec`: layers and their costs, parameters, and what may be cut.

Runs on the meta device, so a model of any size is described without its memory. Each distinct layer is run once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from whale_trainer.describe.costs import LayerCost, measure
from whale_trainer.describe.layers import can_be_cut, layers_of
from whale_trainer.describe.split_rules import cuts_of, find_splits
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import Cut, LayerSpec, ModelSpec, ModuleSplit, ParameterSpec, SplitKind


def describe(model: nn.Module, batch: Any) -> ModelSpec:
    """What the planner and the runtime need to know of `model`.

    `batch` is an example of any size, real or meta, as the DataLoader makes it; None where costs are not needed. Raises
    `ConfigError` for declarations that do not fit the model, layers that fail, and parameters outside all layers.
    """
    if not can_be_cut(model):
        return _describe_whole(model, batch)
    layers = layers_of(model)
    layer_of = _layers_of_modules(model, layers)
    splits = find_splits(model, layer_of)
    parameters = _parameters(model, layer_of, splits)
    costs = [LayerCost()] * len(layers) if batch is None else measure(model, batch, splits)
    return ModelSpec(
        name=type(model).__name__,
        layers=tuple(
            _layer(i, name, cost, splits) for i, ((name, _), cost) in enumerate(zip(layers, costs, strict=True))
        ),
        parameters=parameters,
        splits=splits,
        dropouts=tuple(d for cost in costs for d in cost.dropouts),
    )


def _describe_whole(model: nn.Module, batch: Any) -> ModelSpec:
    """One layer for a module that does not tell its layers."""
    parameters = tuple(
        ParameterSpec(name, tuple(p.shape), p.element_size(), (0,), trainable=p.requires_grad)
        for name, p in model.named_parameters()
    )
    cost = _whole_cost(model, batch, sum(p.num_elements for p in parameters))
    layer = LayerSpec(
        "model",
        cost.forward_flops,
        0.0,
        cost.activation_bytes,
        cost.boundary_bytes,
        moved_bytes=cost.moved_bytes,
        num_kernels=cost.num_kernels,
    )
    return ModelSpec(type(model).__name__, (layer,), parameters, can_be_cut=False)


def _whole_cost(model: nn.Module, batch: Any, num_elements: int) -> LayerCost:
    """Measured where the module's forward takes such a batch; else each weight is taken to be used once.

    The forward of a LightningModule is its author's own affair, or missing, so no failure matters here.
    """
    guess = LayerCost(forward_flops=2.0 * num_elements)
    try:
        cost = guess if batch is None else measure(model, batch, ())[0]
    except Exception:
        return guess
    return cost if cost.forward_flops else replace(cost, forward_flops=guess.forward_flops)


def _layer(index: int, name: str, cost: LayerCost, splits: Sequence[ModuleSplit]) -> LayerSpec:
    inside = [s for s in splits if s.layer == index]
    # in a forward pass each cut module but a column-cut one sums over the group; the logits need three small sums
    sums = sum(s.kind in (SplitKind.ROW, SplitKind.HEADS, SplitKind.VOCAB) for s in inside)
    return LayerSpec(
        name,
        cost.forward_flops,
        cost.split_flops,
        cost.activation_bytes,
        cost.boundary_bytes,
        tuple(dict.fromkeys(s.split for s in inside if s.split is not None)),
        sums,
        cost.moved_bytes,
        cost.num_kernels,
        linear_flops=cost.linear_flops,
    )


def _layers_of_modules(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> dict[str, tuple[int, ...]]:
    """For each module by name the layers that hold it, ascending."""
    inside = [{id(m) for m in layer.modules()} for _, layer in layers]
    return {
        name: tuple(i for i, members in enumerate(inside) if id(module) in members)
        for name, module in model.named_modules(remove_duplicate=False)
    }


def _parameters(
    model: nn.Module, layer_of: Mapping[str, tuple[int, ...]], splits: Sequence[ModuleSplit]
) -> tuple[ParameterSpec, ...]:
    cuts, problems = _cuts(model, splits)
    users: dict[int, set[int]] = {}
    cut_users: dict[int, set[int]] = {}
    split_modules = {s.module: s for s in splits}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        users.setdefault(id(parameter), set()).update(layer_of[owner])
        is_cut = any(owner == m or owner.startswith(f"{m}.") for m in split_modules)
        cut_users.setdefault(id(parameter), set()).add(int(is_cut))
    for name, parameter in model.named_parameters():
        if not users[id(parameter)]:
            problems.append(
                Problem(f"model.{name}", "no layer of layers() uses this parameter: put its module into a layer")
            )
        if cuts.get(id(parameter)) is not None and len(cut_users[id(parameter)]) > 1:
            problems.append(
                Problem(
                    f"model.{name}", "tied between a module that tensor_split cuts and one that it does not: name both"
                )
            )
    if problems:
        raise ConfigError(problems)
    return tuple(
        ParameterSpec(
            name,
            tuple(p.shape),
            p.element_size(),
            tuple(sorted(users[id(p)])),
            cuts.get(id(p)),
            is_partial=id(p) in cuts and cuts[id(p)] is None,
            trainable=p.requires_grad,
        )
        for name, p in model.named_parameters()
    )


def _cuts(model: nn.Module, splits: Sequence[ModuleSplit]) -> tuple[dict[int, Cut | None], list[Problem]]:
    """How each parameter inside a split module follows it, by id; None for a whole one with a partial gradient."""
    cuts: dict[int, Cut | None] = {}
    problems = []
    for split in splits:
        for parameter, cut in cuts_of(model, split):
            if cuts.setdefault(id(parameter), cut) != cut:
                message = f"its weight is tied to one that is cut in another way ({cuts[id(parameter)]} against {cut})"
                problems.append(Problem(f"model.{split.module}", message))
    return cuts, problems
