"""From an `nn.Module` to a `ModelSpec`: layers, costs, and what may be cut, found on the meta device.

The model declares itself as plain data: `layers()` in order, `tensor_split` by module-name patterns, `loss(output, batch)`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode

from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import Cut, LayerSpec, ModelSpec, ModuleSplit, ParameterSpec, SplitDim, SplitKind

_WORDS = {
    "column": SplitKind.COLUMN, "colwise": SplitKind.COLUMN,
    "row": SplitKind.ROW, "rowwise": SplitKind.ROW,
    "vocab": SplitKind.VOCAB, "partial": SplitKind.PARTIAL,
}  # fmt: skip
"""Words of `tensor_split`; those of Hugging Face's tensor-parallel plans are understood."""


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the layers, in order; one layer `model` for a module that does not tell."""
    if hasattr(model, "layers") and callable(model.layers):
        return list(model.layers())
    if isinstance(model, nn.Sequential):
        return list(model.named_children())
    return [("model", model)]


def first_inputs(model: nn.Module, batch: Any) -> Any:
    """What the first layer gets of a batch."""
    if hasattr(model, "inputs"):
        return model.inputs(batch)
    return batch[0] if isinstance(batch, tuple | list) else batch


def model_loss(model: nn.Module, output: Any, batch: Any) -> tuple[Tensor, Any]:
    """(sum, count) of the model's loss. Raises `ConfigError` for a model without `loss`."""
    loss: Callable[[Any, Any], tuple[Tensor, Any]] | None = getattr(model, "loss", None)
    if loss is None:
        raise ConfigError([Problem("model", f"{type(model).__name__} has no loss(output, batch) -> (sum, count)")])
    return loss(output, batch)


def unsynchronised_norms(model: nn.Module) -> list[str]:
    """Names of the BatchNorm modules that see one rank's part of a batch only."""
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and not isinstance(m, nn.SyncBatchNorm)
    ]


def describe(model: nn.Module, batch: Any) -> ModelSpec:
    """Sizes, costs and cuts of `model`, for batches like `batch` (any size, real or meta; None where costs are not needed)."""
    can_be_cut = hasattr(model, "layers") or isinstance(model, nn.Sequential)
    splits = _find_splits(model) if can_be_cut else ()
    layers = layers_of(model)
    owner = _layer_of_modules(model, layers)
    parameters = _describe_parameters(model, owner, splits)
    costs, dropouts = _measure(model, batch, layers, splits) if batch is not None and can_be_cut else ({}, ())
    specs = []
    for index, (name, module) in enumerate(layers):
        dims = tuple(dict.fromkeys(s.split for s in splits if s.layer == index and s.split is not None))
        flops, split_flops, kept, boundary = costs.get(
            name, (2.0 * sum(p.numel() for p in module.parameters()), 0.0, 0, 0)
        )
        specs.append(
            LayerSpec(
                name,
                flops,
                split_flops,
                kept,
                boundary,
                dims,
                sum(s.kind is not SplitKind.COLUMN for s in splits if s.layer == index),
            )
        )
    return ModelSpec(type(model).__name__, tuple(specs), parameters, splits, dropouts, can_be_cut)


def _find_splits(model: nn.Module) -> tuple[ModuleSplit, ...]:
    modules = dict(model.named_modules())
    layer_of = _layer_of_modules(model, layers_of(model))
    found: list[ModuleSplit] = []
    for pattern, word in getattr(model, "tensor_split", {}).items():
        names = [n for n in modules if fnmatchcase(n, pattern)]
        if not names:
            near = get_close_matches(pattern, modules, 1)
            raise ConfigError(
                [
                    Problem(
                        "model.tensor_split",
                        f"{pattern!r} matches no module" + (f"; did you mean {near[0]}?" if near else ""),
                    )
                ]
            )
        for name in names:
            found.append(_split(name, modules[name], word, min(layer_of[name])))
    return tuple(sorted(found, key=lambda s: s.layer))


def _split(name: str, module: nn.Module, word: str, layer: int) -> ModuleSplit:
    heads = re.fullmatch(r"heads\((\d+),\s*(\d+)\)", word)
    if heads:
        num, kv = int(heads[1]), int(heads[2])
        return ModuleSplit(name, SplitKind.HEADS, layer, SplitDim("heads", num, kv), module.q_proj.out_features // num)
    if word not in _WORDS:
        raise ConfigError([Problem("model.tensor_split", f"{word!r} is not one of {', '.join(_WORDS)}, heads(n, kv)")])
    kind = _WORDS[word]
    if kind is SplitKind.PARTIAL:
        return ModuleSplit(name, kind, layer)
    if isinstance(module, nn.Embedding):
        return ModuleSplit(name, kind, layer, SplitDim("vocabulary", module.num_embeddings))
    size = module.in_features if kind is SplitKind.ROW else module.out_features
    return ModuleSplit(name, kind, layer, SplitDim("vocabulary" if kind is SplitKind.VOCAB else "columns", size))


def _layer_of_modules(model: nn.Module, layers: list[tuple[str, nn.Module]]) -> dict[str, tuple[int, ...]]:
    inside = [{id(m) for m in module.modules()} for _, module in layers]
    return {n: tuple(i for i, ids in enumerate(inside) if id(m) in ids) or (0,) for n, m in model.named_modules()}


def _describe_parameters(
    model: nn.Module, owner: dict[str, tuple[int, ...]], splits: tuple[ModuleSplit, ...]
) -> tuple[ParameterSpec, ...]:
    cuts: dict[int, Cut] = {}
    partial: set[int] = set()
    for s in splits:
        module = model.get_submodule(s.module)
        if s.kind is SplitKind.PARTIAL:
            partial |= {id(p) for p in module.parameters()}
        elif s.kind is SplitKind.HEADS:
            for child in ("q_proj", "k_proj", "v_proj"):
                for p in module.get_submodule(child).parameters():
                    cuts[id(p)] = Cut(s.split, 0, s.head_dim, child != "q_proj")
            cuts[id(module.o_proj.weight)] = Cut(s.split, 1, s.head_dim)
            partial |= {
                id(p)
                for n, p in module.named_parameters()
                if not n.startswith(("q_proj", "k_proj", "v_proj", "o_proj"))
            }
        elif s.kind is SplitKind.ROW:
            cuts[id(module.weight)] = Cut(s.split, 1, 1)
        else:
            for p in module.parameters():
                cuts[id(p)] = Cut(s.split, 0, 1)
    users: dict[int, set[int]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(p), set()).update(owner[name.rpartition(".")[0]])
    return tuple(
        ParameterSpec(
            n,
            tuple(p.shape),
            p.element_size(),
            tuple(sorted(users[id(p)])),
            cuts.get(id(p)),
            id(p) in partial,
            p.requires_grad,
        )
        for n, p in model.named_parameters()
    )


def _measure(model, batch, layers, splits):
    meta = (
        copy.deepcopy(model).to("meta")
        if next(iter(model.parameters())).device.type != "meta"
        else copy.deepcopy(model)
    )
    batch = tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, batch)
    size = next(t.shape[0] for t in tree_flatten(batch)[0] if isinstance(t, Tensor))
    dropouts = []
    for name, m in meta.named_modules():
        if type(m) is nn.Dropout:
            m.register_forward_pre_hook(lambda m, a, n=name: dropouts.append((n, a[0].shape[-1])))
    costs = {}
    meta.train()
    x = first_inputs(meta, batch)
    for name, layer in layers_of(meta):
        kept = []
        with (
            FlopCounterMode(display=False) as flops,
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.append(t.numel() * t.element_size()) or t, lambda t: t
            ),
        ):
            x = layer(x)
        out = sum(t.numel() * t.element_size() for t in tree_flatten(x)[0] if isinstance(t, Tensor))
        costs[name] = (
            flops.get_total_flops() / size,
            flops.get_total_flops() / size if splits else 0.0,
            sum(kept) // size,
            out // size,
        )
    return costs, tuple(dict(dropouts).items())
