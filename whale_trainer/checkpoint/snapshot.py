"""Between a running plan and a checkpoint: which tensors a rank writes, and how they come back under any cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whale_trainer.checkpoint import CheckpointReader, Piece, write_checkpoint
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


def save_snapshot(
    path: Path,
    state: dict[str, Any],
    runner: Runner,
    optimizers: list[Optimizer],
    world_size: int,
    barrier: Callable[[], object],
) -> None:
    """Write a checkpoint; every rank calls this. Raises `CheckpointError`."""
    buffers = _buffers(runner)
    shapes = {x.parameter.name: x.parameter.shape for x in runner.layouts} | {
        n: tuple(b.shape) for n, b in buffers.items()
    }
    pieces = [*_model_pieces(runner), *_optimizer_pieces(runner, optimizers)]
    if runner.rank == 0:
        pieces += [Piece(name, buffer) for name, buffer in buffers.items()]
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers]
    write_checkpoint(
        path,
        {**state, "param_groups": groups},
        pieces,
        shapes,
        rank=runner.rank,
        world_size=world_size,
        barrier=barrier,
        aliases=runner.aliases,
    )


def load_weights(reader: CheckpointReader, runner: Runner) -> None:
    """Fill this rank's parameters and buffers. Raises `CheckpointError` when the checkpoint is of another model."""
    buffers = _buffers(runner)
    shapes = {x.parameter.name: x.parameter.shape for x in runner.layouts} | {
        n: tuple(b.shape) for n, b in buffers.items()
    }
    reader.check_matches(shapes)
    with torch.no_grad():
        for layout, piece, parameter in _held(runner):
            parameter.copy_(reader.read(layout.parameter.name, _cut(layout, piece), device=parameter.device))
        for name, buffer in buffers.items():
            buffer.copy_(reader.read(name, device=buffer.device))


def load_optimizers(reader: CheckpointReader, runner: Runner, optimizers: list[Optimizer]) -> None:
    """Fill the optimizers' state and the options of their groups (learning rates and the like)."""
    for optimizer, groups in zip(optimizers, reader.state["param_groups"], strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)
        held = {id(p) for g in optimizer.param_groups for p in g["params"]}
        for layout, piece, parameter in _held(runner):
            if id(parameter) not in held:
                continue
            for key in reader.keys:
                name = layout.parameter.name
                if key.startswith(OPTIMIZER) and name in reader.names(key):
                    is_like = reader.shape(name, key) == layout.parameter.shape
                    cut = _cut(layout, piece) if is_like else None
                    device = parameter.device if is_like and parameter.dim() else "cpu"
                    optimizer.state[parameter][key.removeprefix(OPTIMIZER)] = reader.read(
                        name, cut, key=key, device=device
                    )


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
    return _owned(runner, lambda parameter: parameter, "model")


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
