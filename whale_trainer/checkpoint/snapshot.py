"""Between a running plan and a checkpoint: which tensors a rank writes, and how they come back under any cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whale_trainer.checkpoint.reader import MODEL, CheckpointReader
from whale_trainer.checkpoint.writer import Exchange, Piece, write_checkpoint
from whale_trainer.errors import CheckpointError
from whale_trainer.planning.pieces import ParameterLayout
from whale_trainer.planning.shares import Interval

OPTIMIZER = "optimizer."
"""Prefix of the keys of optimizer state, such as `optimizer.exp_avg`."""


class Runner(Protocol):
    """What a snapshot needs of an `Engine` or a `ReplicaRunner`."""

    rank: int
    layouts: tuple[ParameterLayout, ...]
    pieces: dict[tuple[str, int], nn.Parameter]
    aliases: dict[str, str]

    @property
    def module(self) -> nn.Module: ...


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes of a moment in training. Its tensors are the live ones until `copied` takes them aside."""

    path: Path
    state: dict[str, Any]
    pieces: tuple[Piece, ...]
    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    rank: int
    world_size: int

    def write(self, exchange: Exchange) -> None:
        """Write the checkpoint; every rank calls this. Raises `CheckpointError`, the same on all ranks."""
        write_checkpoint(
            self.path,
            self.state,
            self.pieces,
            self.shapes,
            rank=self.rank,
            world_size=self.world_size,
            exchange=exchange,
            aliases=self.aliases,
        )


def take_snapshot(
    path: Path, state: dict[str, Any], runner: Runner, optimizers: list[Optimizer], world_size: int
) -> Snapshot:
    """What this rank writes: the pieces that it owns; rank 0 the buffers and the state as well."""
    pieces = [*_model_pieces(runner), *_optimizer_pieces(runner, optimizers)]
    if runner.rank == 0:
        pieces += [Piece(name, buffer) for name, buffer in _buffers(runner).items()]
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers]
    more = {"param_groups": groups, "optimizers": [type(o).__name__ for o in optimizers]}
    return Snapshot(
        path, {**state, **more}, tuple(pieces), _shapes(runner), dict(runner.aliases), runner.rank, world_size
    )


def load_weights(reader: CheckpointReader, runner: Runner) -> None:
    """Fill this rank's parameters and buffers. Raises `CheckpointError` when the checkpoint is of another model."""
    reader.check_matches(_shapes(runner))
    with torch.no_grad():
        for layout, piece, parameter in _held(runner):
            reader.read(layout.parameter.name, _cut(layout, piece), out=parameter)
        for name, buffer in _buffers(runner).items():
            reader.read(name, out=buffer)


def load_optimizers(reader: CheckpointReader, runner: Runner, optimizers: list[Optimizer]) -> None:
    """Fill the optimizers' state and the options of their groups (learning rates and the like).

    State belongs to a parameter by its name, whatever its position was. Raises `CheckpointError` when the checkpoint
    is of another optimizer, or of other groups of parameters.
    """
    _check_optimizers(reader, optimizers)
    keys = [key for key in reader.keys if key.startswith(OPTIMIZER)]
    for optimizer, groups in zip(optimizers, reader.state["param_groups"], strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)
        held = {id(p) for g in optimizer.param_groups for p in g["params"]}
        for layout, piece, parameter in _held(runner):
            name = layout.parameter.name
            for key in keys if id(parameter) in held else ():
                if name in reader.names(key):
                    state = _read_state(reader, name, key, layout, piece, parameter)
                    optimizer.state[parameter][key.removeprefix(OPTIMIZER)] = state


def _read_state(
    reader: CheckpointReader, name: str, key: str, layout: ParameterLayout, piece: Interval, parameter: nn.Parameter
) -> Tensor:
    """A moment like its parameter, cut as it is here and beside it; or a count, which is whole and stays on the CPU."""
    if reader.shape(name, key) != layout.parameter.shape:
        return reader.read(name, key=key)
    device = parameter.device if parameter.dim() else "cpu"
    return reader.read(name, _cut(layout, piece), key=key, dtype=parameter.dtype, device=device)


def _check_optimizers(reader: CheckpointReader, optimizers: list[Optimizer]) -> None:
    saved = [str(name) for name in reader.state.get("optimizers", ())]
    found = [type(o).__name__ for o in optimizers]
    if saved and saved != found:
        raise CheckpointError(
            f"{reader.path} was saved with {', '.join(saved)}, and this run has {', '.join(found)}: resume with the "
            "same optimizer, or take the weights only (init_from)"
        )
    groups = [len(groups) for groups in reader.state["param_groups"]]
    if groups != (here := [len(o.param_groups) for o in optimizers]):
        raise CheckpointError(
            f"{reader.path} has {groups} groups of parameters, the optimizer of this rank has {here}: make the same "
            "groups on every rank and under every plan, also those that hold nothing there"
        )


def held_tensors(
    runner: Runner, optimizers: list[Optimizer]
) -> Iterator[tuple[str, str, tuple[int, Interval] | None, Tensor]]:
    """Everything that this rank holds, whoever owns it: (key, name, part of the whole, tensor)."""
    for layout, piece, parameter in _held(runner):
        yield MODEL, layout.parameter.name, _cut(layout, piece), parameter.detach()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensor = torch.as_tensor(value)
                cut = _cut(layout, piece) if tensor.shape == parameter.shape else None
                yield OPTIMIZER + key, layout.parameter.name, cut, tensor


def _shapes(runner: Runner) -> dict[str, tuple[int, ...]]:
    """Every tensor of the user's model that a checkpoint holds."""
    shapes = {x.parameter.name: tuple(x.parameter.shape) for x in runner.layouts}
    return shapes | {name: tuple(buffer.shape) for name, buffer in _buffers(runner).items()}


def _held(runner: Runner) -> Iterator[tuple[ParameterLayout, Interval, nn.Parameter]]:
    for layout in runner.layouts:
        for index, piece in enumerate(layout.pieces(runner.rank)):
            yield layout, piece, runner.pieces[layout.parameter.name, index]


def _cut(layout: ParameterLayout, interval: Interval) -> tuple[int, Interval] | None:
    return None if layout.parameter.cut is None else (layout.dim, interval)


def _owned(runner: Runner, like: Callable[[nn.Parameter], Tensor | None], key: str) -> Iterator[Piece]:
    """The segments that this rank owns of each parameter's tensor `like(parameter)`."""
    for layout, piece, parameter in _held(runner):
        tensor = like(parameter)
        if tensor is None:
            continue
        for segment in layout.segments:
            if segment.owner == runner.rank and piece.contains(segment.interval):
                if tensor.shape != parameter.shape:
                    if segment is layout.segments[0]:
                        yield Piece(layout.parameter.name, tensor, None, key)
                    continue
                cut = _cut(layout, segment.interval)
                inside = segment.interval.shifted(-piece.start)
                part = tensor if cut is None else tensor.narrow(layout.dim, inside.start, len(inside))
                yield Piece(layout.parameter.name, part.detach(), cut, key)


def _model_pieces(runner: Runner) -> Iterator[Piece]:
    return _owned(runner, lambda parameter: parameter, MODEL)


def _optimizer_pieces(runner: Runner, optimizers: list[Optimizer]) -> Iterator[Piece]:
    for optimizer in optimizers:
        keys = {key: None for state in optimizer.state.values() for key in state}
        for key in keys:

            def like(parameter: nn.Parameter, optimizer: Optimizer = optimizer, key: str = key) -> Tensor | None:
                value = optimizer.state[parameter].get(key) if parameter in optimizer.state else None
                return None if value is None else torch.as_tensor(value)

            yield from _owned(runner, like, OPTIMIZER + key)


def _buffers(runner: Runner) -> dict[str, Tensor]:
    """Persistent buffers of the user's model."""
    parameters = {name for name, _ in runner.module.named_parameters(remove_duplicate=False)}
    return {name: t for name, t in runner.module.state_dict(keep_vars=True).items() if name not in parameters}
