"""`tensor_split` of a model: from patterns of module names to the modules that a tensor group cuts.

Words: `column`, `row`, `vocab`, `heads(num_heads, num_kv_heads)`, `partial`; those of Hugging Face's tensor-parallel
plans (`colwise`, `rowwise`) are understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import Cut, ModuleSplit, SplitDim, SplitKind
from whale_trainer.validation import nearest

PATH = "model.tensor_split"

WORDS = {
    "column": SplitKind.COLUMN,
    "colwise": SplitKind.COLUMN,
    "row": SplitKind.ROW,
    "rowwise": SplitKind.ROW,
    "vocab": SplitKind.VOCAB,
    "partial": SplitKind.PARTIAL,
}

_HEADS = re.compile(r"heads\((\d+),\s*(\d+)\)")

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def find_splits(model: nn.Module, layer_of: Mapping[str, tuple[int, ...]]) -> tuple[ModuleSplit, ...]:
    """Every module that the model's `tensor_split` names, by layer. Raises `ConfigError` with all that is wrong."""
    modules = dict(model.named_modules())
    problems: list[Problem] = []
    found: dict[str, ModuleSplit] = {}
    for pattern, word in getattr(model, "tensor_split", {}).items():
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            problems.append(Problem(PATH, _no_module(pattern, [name for name in modules if name])))
        for name in names:
            if not layer_of.get(name):
                problems.append(Problem(f"model.{name}", f"{word!r}, but no layer of layers() holds this module"))
            elif len(layer_of[name]) > 1:
                message = (
                    f"{word!r}, but {len(layer_of[name])} layers hold this module: give each layer its own, and share "
                    "the weight (b.weight = a.weight)"
                )
                problems.append(Problem(f"model.{name}", message))
            elif name in found:
                problems.append(
                    Problem(f"model.{name}", f"two patterns of tensor_split name it ({pattern!r} is the second)")
                )
            else:
                try:
                    found[name] = _split(name, modules[name], str(word), layer_of[name][0])
                except ConfigError as error:
                    problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tuple(sorted(found.values(), key=lambda s: s.layer))


def _split(name: str, module: nn.Module, word: str, layer: int) -> ModuleSplit:
    heads = _HEADS.fullmatch(word.replace(" ", ""))
    if heads:
        return _split_heads(name, module, int(heads[1]), int(heads[2]), layer)
    kind = WORDS.get(word)
    if kind is None:
        near = nearest(word, WORDS)
        hint = f"; did you mean {near}?" if near else ""
        raise _wrong(name, f"{word!r} is not one of {', '.join(WORDS)}, heads(num_heads, num_kv_heads){hint}")
    if kind is SplitKind.PARTIAL:
        return ModuleSplit(name, kind, layer)
    if isinstance(module, nn.Embedding):
        if kind is not SplitKind.VOCAB:
            raise _wrong(name, f"{word!r} needs nn.Linear, this is nn.Embedding: use 'vocab'")
        return ModuleSplit(name, kind, layer, SplitDim("vocabulary", module.num_embeddings))
    if not isinstance(module, nn.Linear):
        allowed_types = "nn.Linear or nn.Embedding" if kind is SplitKind.VOCAB else "nn.Linear"
        raise _wrong(
            name, f"{word!r} needs {allowed_types}, this is {type(module).__name__}: name the linear module inside"
        )
    if kind is SplitKind.VOCAB:
        return ModuleSplit(name, kind, layer, SplitDim("vocabulary", module.out_features))
    size = module.in_features if kind is SplitKind.ROW else module.out_features
    return ModuleSplit(name, kind, layer, SplitDim("columns", size))


def _split_heads(name: str, module: nn.Module, num_heads: int, num_kv_heads: int, layer: int) -> ModuleSplit:
    found = {child: getattr(module, child, None) for child in _PROJECTIONS}
    projections = {child: m for child, m in found.items() if isinstance(m, nn.Linear)}
    missing = [child for child in _PROJECTIONS if child not in projections]
    if missing:
        raise _wrong(
            name, f"heads(...) needs nn.Linear children {', '.join(_PROJECTIONS)}; {', '.join(missing)} is none"
        )
    if not num_heads or not num_kv_heads or num_heads % num_kv_heads:
        raise _wrong(name, f"{num_heads} heads are not a multiple of {num_kv_heads} kv heads")
    q, k, v, o = (projections[child] for child in _PROJECTIONS)
    head_dim = q.out_features // num_heads
    sizes = (q.out_features, k.out_features, v.out_features, o.in_features)
    expected = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim, num_heads * head_dim)
    if sizes != expected:
        raise _wrong(
            name,
            f"q, k, v, o projections of {sizes} elements are no {num_heads} heads and {num_kv_heads} kv heads of one "
            f"width (with {head_dim} each they would be {expected})",
        )
    return ModuleSplit(name, SplitKind.HEADS, layer, SplitDim("heads", num_heads, num_kv_heads), head_dim)


def _no_module(pattern: str, names: list[str]) -> str:
    near = nearest(pattern, names)
    hint = f"did you mean {near}?" if near else f"the model has {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
    return f"{pattern!r} matches no module; {hint}"


def _wrong(name: str, message: str) -> ConfigError:
    return ConfigError([Problem(f"model.{name}", message)])


def cuts_of(model: nn.Module, split: ModuleSplit) -> Iterator[tuple[nn.Parameter, Cut | None]]:
    """The parameters inside a split module with their cuts; None for one that is whole, with a partial gradient.

    Parameters that are whole with a whole gradient, such as the bias of a `row` layer, are not given.
    """
    module = model.get_submodule(split.module)
    if split.kind is SplitKind.PARTIAL:
        yield from ((p, None) for p in module.parameters())
        return
    assert split.split is not None
    if split.kind is SplitKind.ROW:
        yield _weight(module), Cut(split.split, 1, 1)
    elif split.kind is SplitKind.HEADS:
        assert split.head_dim is not None
        inside = set()
        for child in _PROJECTIONS[:3]:
            for parameter in module.get_submodule(child).parameters():
                yield parameter, Cut(split.split, 0, split.head_dim, is_kv=child != "q_proj")
        for child in _PROJECTIONS:
            inside |= {id(p) for p in module.get_submodule(child).parameters()}
        yield _weight(module.get_submodule("o_proj")), Cut(split.split, 1, split.head_dim)
        yield from ((p, None) for p in module.parameters() if id(p) not in inside)
    else:
        yield from ((p, Cut(split.split, 0, 1)) for p in module.parameters())


def _weight(module: nn.Module) -> nn.Parameter:
    assert isinstance(module.weight, nn.Parameter)
    return module.weight
