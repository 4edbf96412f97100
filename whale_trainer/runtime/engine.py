"""One rank's side of a plan: its part of the model, its schedule, its gradient sums.

engine = Engine(plan, spec, model, rank=rank, device=device, seed=seed)
optimizer = AdamW(model.parameters())       # the model now holds this rank's pieces, under their own names
result = engine.train_step(batch, step)     # afterwards every parameter has the gradient of the global mean loss
optimizer.step()
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.pieces import gradient_buckets, parameter_layouts
from whale_trainer.planning.plan import SPLIT_SCHEDULES, Plan
from whale_trainer.planning.schedule.lowering import lower
from whale_trainer.planning.schedule.schedule import Action, Compute, Instruction, Op, build_schedule
from whale_trainer.planning.schedule.schedule import messages as bridge_messages
from whale_trainer.planning.shares import Interval
from whale_trainer.runtime.bridge import Bridges
from whale_trainer.runtime.dropout import DropoutState
from whale_trainer.runtime.executor import Executor, Pass
from whale_trainer.runtime.gradients import GradientSums
from whale_trainer.runtime.mesh import Mesh
from whale_trainer.runtime.pace import OwnPace, Pace
from whale_trainer.runtime.precision import Precision
from whale_trainer.runtime.shards import ShardBuilder, cut_parameters, tied_names
from whale_trainer.runtime.vocab import VocabShard
from whale_trainer.runtime.weight_gradients import WeightGradients


@dataclass(frozen=True)
class StepResult:
    """What a training step found, the same on every rank."""

    loss_sum: float
    count: float
    grad_norm: float
    """2-norm of the gradient of the mean loss, over the whole model, every parameter once."""

    @property
    def loss(self) -> float:
        return self.loss_sum / self.count if self.count else math.nan

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.grad_norm) and math.isfinite(self.loss_sum)


@dataclass(frozen=True)
class _Program:
    """What this rank does for a batch of some size."""

    instructions: tuple[Instruction, ...]
    finals: Mapping[Action, list[nn.Parameter]]
    """Which parameters each backward action completes."""
    untouched: list[nn.Parameter]
    """Those that none touches."""
    places: Mapping[Action, int]
    """Of all ranks' actions in the schedule."""


class Engine:
    """Cuts `model` to this rank's part, in place, and runs the plan's steps on it.

    All ranks must make their engine from equal models (same class, same seed) at the same time: process groups are
    made. `model` may stand inside a larger module; `seed` feeds the plan-free dropout.
    """

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        model: nn.Module,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        seed: int = 0,
        precision: str = "32-true",
        pace: Pace | None = None,
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.module = model
        self.aliases = tied_names(model)
        self.rank = rank
        self.device = torch.device(device)
        self.precision = Precision(precision, self.device.type)
        self.pace = pace or OwnPace()
        self.layouts = parameter_layouts(plan, spec)
        self.dropout = DropoutState(seed)
        self._count_per_sample = 1.0
        edges = {(m.source_rank, m.target_rank) for m in bridge_messages(build_schedule(plan, plan.global_batch))}
        self.mesh = Mesh(
            plan,
            rank,
            self.device,
            tensor_groups=[t.ranks for t in plan.tiles],
            sum_groups=[b.ranks for b in gradient_buckets(self.layouts)],
            edges=edges,
        )
        model.to(device=self.device, dtype=self.precision.parameter_dtype)
        weights = WeightGradients() if plan.schedule in SPLIT_SCHEDULES else None
        builder = ShardBuilder(model, spec, plan, self.layouts, rank, self.dropout, weights)
        for index in plan.tiles_of(rank):
            builder.copy(index)
        self.pieces = cut_parameters(model, self.layouts, rank)
        self.tiles = {i: builder.bind(i, self.pieces, self._group(i)) for i in plan.tiles_of(rank)}
        self.sums = GradientSums(self.layouts, self.pieces, self.mesh, self.pace)
        self._executor = Executor(
            plan,
            rank,
            model,
            self.tiles,
            Bridges(self.mesh, self.pace),
            self.sums,
            self.dropout,
            self.precision,
            self.device,
            self.pace,
            weights,
        )
        self._program = lru_cache(maxsize=32)(self._make_program)

    def _group(self, tile: int) -> dist.ProcessGroup | None:
        ranks = self.plan.tiles[tile].ranks
        return self.pace.tensor_group(ranks, self.mesh.tensor_group(ranks)) if len(ranks) > 1 else None

    def _make_program(self, batch_size: int, training: bool) -> _Program:
        schedule = build_schedule(self.plan, batch_size, training=training)
        program = lower(schedule, self.rank)
        last: dict[int, Action] = {}
        trained: dict[int, nn.Parameter] = {id(p): p for p in self.sums.parameters}
        touched_by: dict[int, list[int]] = {i: [] for i in self.tiles}
        for layout in self.layouts:
            for use in layout.uses:
                if use.rank == self.rank and use.contributes:
                    piece = self.pieces[layout.parameter.name, layout.piece_of(self.rank, use.interval)]
                    touched_by[use.tile].append(id(piece))
        for instruction in program:
            if isinstance(instruction, Compute) and instruction.action.op in (Op.BACKWARD, Op.WEIGHT):
                last.update(dict.fromkeys(touched_by[instruction.action.tile], instruction.action))
        finals: dict[Action, list[nn.Parameter]] = {}
        for key, action in last.items():
            if key in trained:
                finals.setdefault(action, []).append(trained[key])
        untouched = [p for key, p in trained.items() if key not in last]
        return _Program(program, finals, untouched, {action: i for i, action in enumerate(schedule.order)})

    def rows(self, batch_size: int) -> tuple[int, ...]:
        """Samples of a global batch that this rank reads: those of its tiles with the first or the last layer."""
        return self.plan.rows_to_read(self.rank, batch_size)

    def train_step(self, batch: Any, step: int) -> StepResult:
        """Forward and backward of one global batch. Leaves in every `.grad` the gradient of the global mean loss.

        `batch` is this rank's `RankBatch`; `step` counts optimizer steps and feeds the dropout.
        """
        self._train(True)
        self.pace.begin_step()
        program = self._program(batch.size, True)
        planned = 2.0 ** round(math.log2(max(1.0, self._count_per_sample * batch.size)))
        self.sums.begin()
        self.sums.settle(program.untouched)
        root_scale = self.precision.loss_scale / planned
        run = self._executor.run(
            program.instructions,
            Pass(batch.size, batch.rows, batch.samples, step, True, root_scale, program.finals, program.places),
        )
        self.sums.finish()
        self.pace.sums_waited()
        totals = self._totals(run, self.sums.owned_square_sum())
        loss_sum, count, squares = totals.tolist()
        self.pace.met()
        # the loss was divided by `planned`, a power of two (so exactly); the true count is known only now
        factor = planned / count / self.precision.loss_scale if count else 0.0
        gradients = self.sums.gradients()
        if gradients and math.isfinite(squares):
            torch._foreach_mul_(gradients, factor)
        self._count_per_sample = max(1.0, count) / batch.size
        return StepResult(loss_sum, count, math.sqrt(squares) * factor if squares >= 0 else math.nan)

    def evaluate(self, batch: Any) -> tuple[float, float]:
        """(loss sum, count) of a batch of any size, over all ranks. Leaves no trace in the training state."""
        run = self._forward_only(batch, keep_results=False)
        loss_sum, count = self._totals(run).tolist()
        return loss_sum, count

    @torch.no_grad()
    def predict(self, batch: Any) -> Tensor:
        """The last layer's output (a tensor) for every sample of the batch, in order, on all ranks."""
        run = self._forward_only(batch, keep_results=True)
        parts: list[Tensor] = []
        order = sorted(
            (self.plan.rows(t, m, batch.size), t, m)
            for t, tile in enumerate(self.plan.tiles)
            if tile.layers.stop == self.plan.num_layers
            for m in range(len(self.plan.micro_batches_of(batch.size)))
        )
        for rows, tile, micro_batch in order:
            if len(rows):
                parts.append(self._share(run.results.get((tile, micro_batch)), self.plan.tiles[tile].ranks[0], rows))
        return torch.cat(parts)

    def _share(self, out: Any, source: int, rows: Interval) -> Tensor:
        """`out` of rank `source`, on all ranks."""
        out = out.full() if isinstance(out, VocabShard) else out
        if self.plan.num_ranks == 1:
            return out
        shape: list[Any] = [None if out is None else (tuple(out.shape), out.dtype)]
        dist.broadcast_object_list(shape, src=source)
        if self.rank != source:
            out = torch.empty(shape[0][0], dtype=shape[0][1], device=self.device)
        out = out.contiguous()
        dist.broadcast(out, src=source)
        return out

    def _forward_only(self, batch: Any, *, keep_results: bool) -> Pass:
        self._train(False)
        program = self._program(batch.size, False)
        run = Pass(batch.size, batch.rows, batch.samples, 0, False, 1.0, {}, program.places, keep_results=keep_results)
        return self._executor.run(program.instructions, run)

    def _train(self, mode: bool) -> None:
        for tile in self.tiles.values():
            tile.train(mode)

    def _totals(self, run: Pass, *more: Tensor) -> Tensor:
        """float64 [loss sum, count, *more] over all ranks."""
        values = torch.zeros(2 + len(more), dtype=torch.float64, device=self.device)
        for loss_sum, count in run.totals:
            values[0] += loss_sum
            values[1] += count
        for index, value in enumerate(more):
            values[2 + index] = value
        return self.mesh.sum_over_all(values)

    def full_parameter(self, name: str) -> Tensor:
        """The whole parameter, put together from its owners, on all ranks (for exports and tests)."""
        layout = next(x for x in self.layouts if x.parameter.name == name)
        return self._assemble(layout, {k[1]: p.detach() for k, p in self.pieces.items() if k[0] == name})

    def full_gradient(self, name: str) -> Tensor:
        """The whole gradient of a parameter after `train_step`, on all ranks."""
        layout = next(x for x in self.layouts if x.parameter.name == name)
        parts = {k[1]: p.grad for k, p in self.pieces.items() if k[0] == name and p.grad is not None}
        return self._assemble(layout, parts)

    def _assemble(self, layout: Any, parts: Mapping[int, Tensor]) -> Tensor:
        whole = torch.zeros(layout.parameter.shape, dtype=self.precision.parameter_dtype, device=self.device)
        for index, piece in enumerate(layout.pieces(self.rank)):
            if index not in parts:
                continue
            for segment in layout.segments:
                if segment.owner == self.rank and piece.contains(segment.interval):
                    start, length = segment.interval.start, len(segment.interval)
                    if layout.parameter.cut is None:
                        whole.copy_(parts[index])
                    else:
                        whole.narrow(layout.dim, start, length).copy_(
                            parts[index].narrow(layout.dim, start - piece.start, length)
                        )
        return self.mesh.sum_over_all(whole)
