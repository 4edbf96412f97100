"""From scopes to sections: which consecutive layers each scope runs. Refuses what cannot be meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.strategy import Degrees, Scope, StrategySpec
from whale_trainer.validation import counted, nearest

DEFAULT = -1
"""Index of the scope that `strategy.default` stands for."""


@dataclass(frozen=True)
class Section:
    """A run of consecutive layers of one scope, by the scope's index in the strategy."""

    layers: Interval
    scope: int
    degrees: Degrees

    @property
    def path(self) -> str:
        """Where the scope stands in the user's YAML."""
        return "strategy.default" if self.scope == DEFAULT else f"strategy.scopes[{self.scope}]"

    @property
    def is_colocated(self) -> bool:
        return isinstance(self.degrees, Scope) and self.degrees.colocate


def sections_of(strategy: StrategySpec, model: ModelSpec) -> tuple[Section, ...]:
    """Every layer of the model in exactly one section, in order. Raises `ConfigError` with all that is wrong."""
    problems: list[Problem] = []
    owners: list[list[int]] = [[] for _ in model.layers]
    for index, scope in enumerate(strategy.scopes):
        for layer in _matches(scope, index, model, problems):
            owners[layer].append(index)
    problems += _overlaps(owners, strategy, model)
    unnamed = [layer for layer, found in enumerate(owners) if not found]
    if unnamed and strategy.default is None and not problems:
        names = listing([model.layer_names[i] for i in unnamed])
        message = f"layers {names} are in no scope; say how they are run, such as strategy.default={{replicate: auto}}"
        problems.append(Problem("strategy.default", message))
    if problems:
        raise ConfigError(problems)
    sections = tuple(_runs(owners, strategy))
    problems = [p for section in sections for p in _check(section, sections, model)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return sections


def listing(names: Sequence[str], most: int = 6) -> str:
    """`embed, blocks.0 … blocks.7, head`: the first and last of a long list of names."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:2])} … {', '.join(names[-2:])}"


def _matches(scope: Scope, index: int, model: ModelSpec, problems: list[Problem]) -> list[int]:
    found: dict[int, None] = {}
    for pattern in scope.layers:
        hits = [i for i, name in enumerate(model.layer_names) if fnmatchcase(name, pattern)]
        if not hits:
            modules = [m.module for m in model.splits if fnmatchcase(m.module, pattern)]
            guess = nearest(pattern, model.layer_names)
            near = f" (did you mean {guess}?)" if guess else ""
            reason = (
                f"names modules inside layers ({listing(modules, 3)}); a scope takes whole layers"
                if modules
                else "matches no layer"
            )
            message = f"{pattern!r} {reason}{near}: the model has {listing(model.layer_names)}"
            problems.append(Problem(f"strategy.scopes[{index}].layers", message))
        found.update(dict.fromkeys(hits))
    return sorted(found)


def _overlaps(owners: list[list[int]], strategy: StrategySpec, model: ModelSpec) -> list[Problem]:
    shared: dict[tuple[int, ...], list[str]] = {}
    for layer, found in enumerate(owners):
        if len(found) > 1:
            shared.setdefault(tuple(found), []).append(model.layer_names[layer])
    problems = []
    for scopes, names in shared.items():
        patterns = " and ".join(f"scopes[{i}] ({', '.join(strategy.scopes[i].layers)})" for i in scopes)
        message = f"{listing(names)} would be in {patterns}: a layer belongs to one scope; narrow a pattern"
        problems.append(Problem(f"strategy.scopes[{scopes[-1]}].layers", message))
    return problems


def _runs(owners: list[list[int]], strategy: StrategySpec) -> list[Section]:
    sections, start = [], 0
    for scope, group in groupby(found[0] if found else DEFAULT for found in owners):
        stop = start + len(list(group))
        degrees = strategy.scopes[scope] if scope != DEFAULT else strategy.default
        assert degrees is not None
        sections.append(Section(Interval(start, stop), scope, degrees))
        start = stop
    return sections


def _check(section: Section, sections: tuple[Section, ...], model: ModelSpec) -> list[Problem]:
    degrees, names = section.degrees, model.layer_names[slice(*section.layers)]
    problems = []
    stages, split = fixed(degrees.stages), fixed(degrees.split)
    if not model.can_be_cut:
        for key, degree in (("stages", stages), ("split", split)):
            if degree > 1:
                message = (
                    f"{degree}, but {model.name} has no layers() and no tensor_split, so it can only be replicated: "
                    "use strategy=replicate, or declare its layers"
                )
                problems.append(Problem(f"{section.path}.{key}", message))
        return problems
    runs = [s for s in sections if s.scope == section.scope]
    if stages > 1 and len(runs) > 1:
        where = f"other scopes stand between {listing(names)} and the rest"
        if section is runs[0]:
            problems.append(Problem(f"{section.path}.stages", f"{stages} stages need consecutive layers, but {where}"))
    elif stages > len(names):
        most = counted(len(names), "stage")
        message = (
            f"{stages} stages, but the scope has {counted(len(names), 'layer')} ({listing(names)}): at most {most}"
        )
        problems.append(Problem(f"{section.path}.stages", message))
    chunks = degrees.chunks or 1
    if chunks > 1 and stages == 1 and degrees.stages != "auto":
        message = f"{chunks} chunks of one stage would all be on the same devices: give stages, or leave chunks out"
        problems.append(Problem(f"{section.path}.chunks", message))
    elif chunks > 1 and stages * chunks > len(names) >= stages:
        message = (
            f"{counted(chunks, 'chunk')} of {counted(stages, 'stage')} need {stages * chunks} layers, but the scope "
            f"has {len(names)} ({listing(names)}): at most {counted(len(names) // stages, 'chunk')}"
        )
        problems.append(Problem(f"{section.path}.chunks", message))
    return problems + _check_split(section, split, model)


def _check_split(section: Section, split: int, model: ModelSpec) -> list[Problem]:
    if split == 1:
        return []
    names = model.layer_names[slice(*section.layers)]
    dims = model.split_dims(*section.layers)
    path = f"{section.path}.split"
    if not dims:
        message = f"{split} shards, but no layer of {listing(names)} declares a dim that may be cut (tensor_split)"
        return [Problem(path, message)]
    problems = []
    most = counted(most_shards(section, model), "shard")
    for dim in dims:
        if dim.units < split:
            where = next(layer.name for layer in model.layers[slice(*section.layers)] if dim in layer.split_dims)
            message = f"{split} shards, but {where} has {dim.units} {dim.name}: at most {most}"
            problems.append(Problem(path, message))
    return problems


def fixed(degree: int | str | None) -> int:
    """The degree as far as the user fixed it: 1 for `auto` and for one that is not given."""
    return degree if isinstance(degree, int) else 1


def most_shards(section: Section, model: ModelSpec) -> int:
    """Into how many shards the section's layers can be cut so that none is empty; 1 when nothing may be cut."""
    dims = model.split_dims(*section.layers) if model.can_be_cut else ()
    return min((dim.units for dim in dims), default=1)
