"""Plans that only replicate, for any module with a `training_step`: the module stays as its author wrote it.

Only its `nn.Dropout` modules are replaced by ones whose masks do not depend on the plan.

Each rank runs the module's own step on its samples, one micro-batch at a time. A returned mean loss is weighted by
samples; a step may return `{"loss_sum": ..., "count": ...}` where something else counts, such as tokens. What the step
logs is averaged by samples over micro-batches and ranks before Lightning sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale_trainer.errors import RankError
from whale_trainer.model_spec import ParameterSpec
from whale_trainer.planning.pieces import ParameterLayout, Use, gradient_buckets
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.shares import Interval
from whale_trainer.runtime.dropout import DropoutState, replace_dropouts
from whale_trainer.runtime.engine import StepResult
from whale_trainer.runtime.executor import slice_samples
from whale_trainer.runtime.gradients import GradientSums
from whale_trainer.runtime.mesh import Mesh
from whale_trainer.runtime.pace import OwnPace, Pace
from whale_trainer.runtime.precision import Precision
from whale_trainer.runtime.shards import tied_names


class LoggedValues:
    """What one step logs, summed over this rank's micro-batches, weighted by samples."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.options: dict[str, dict[str, Any]] = {}

    def add(self, name: str, value: Any, samples: int, options: dict[str, Any]) -> None:
        options = {k: v for k, v in options.items() if k not in ("batch_size", "sync_dist", "rank_zero_only")}
        self.options[name] = options
        number = float(value.detach()) if isinstance(value, Tensor) else float(value)
        self.sums[name] = self.sums.get(name, 0.0) + number * samples


class ReplicaRunner:
    """Drives an unmodified module under a plan whose tiles all hold the whole model."""

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        *,
        rank: int,
        device: torch.device,
        precision: str,
        seed: int,
        pace: Pace | None = None,
    ) -> None:
        self.plan = plan
        self.pace = pace or OwnPace()
        self.module = module
        self.aliases = tied_names(module)
        self.dropout = DropoutState(seed)
        replace_dropouts(module, self.dropout)
        self.rank = rank
        self.device = device
        self.precision = Precision(precision, device.type)
        module.to(device=device, dtype=self.precision.parameter_dtype)
        self.layouts = tuple(self._layout(name, p) for name, p in module.named_parameters())
        pieces = {(name, 0): p for name, p in module.named_parameters() if isinstance(p, nn.Parameter)}
        self.pieces = pieces
        self.mesh = Mesh(plan, rank, device, sum_groups=[b.ranks for b in gradient_buckets(self.layouts)])
        self.sums = GradientSums(self.layouts, pieces, self.mesh, self.pace)
        self._names: tuple[str, ...] = ()
        """Logged names that all ranks know, sorted."""
        self._options: dict[str, dict[str, Any]] = {}
        self.logged_samples = 0
        self.logged: dict[str, tuple[float, dict[str, Any]]] = {}
        """Averages of the last step, with the options of the module's `self.log` calls."""

    def _layout(self, name: str, parameter: Tensor) -> ParameterLayout:
        size = parameter.shape[0] if parameter.dim() else 1
        spec = ParameterSpec(
            name, tuple(parameter.shape), parameter.element_size(), layers=(0,), trainable=parameter.requires_grad
        )
        ranks = sorted({t.ranks[0] for t in self.plan.tiles})
        uses = tuple(Use(0, rank, Interval(0, size), contributes=True) for rank in ranks)
        return ParameterLayout(spec, uses)

    def _parts(self, batch: Any) -> list[Interval]:
        """This rank's samples of the batch, one interval a micro-batch and tile; empty ones left out."""
        micro_batches = range(len(self.plan.micro_batches_of(batch.size)))
        parts = [self.plan.rows(t, m, batch.size) for m in micro_batches for t in self.plan.tiles_of(self.rank)]
        return [part for part in parts if len(part)]

    def train_step(self, step: Callable[..., Any], batch: Any, *args: Any, step_index: int) -> StepResult:
        """Run `step(samples, *args)` for each part, and leave the gradient of the global mean loss in every `.grad`.

        `step_index` counts optimizer steps and feeds the dropout.
        """
        self.pace.begin_step()
        self.sums.begin()
        parts = self._parts(batch)
        if not parts:
            self.sums.settle(self.sums.parameters)
        loss_sum, count = 0.0, 0.0
        logged = LoggedValues()
        planned = 2.0 ** round(math.log2(max(1, batch.size)))
        for index, part in enumerate(parts):
            self.dropout.enter(step_index, part.start)
            with (
                self.pace.trace.span(f"0F{index}"),
                self._recorded(logged, len(part)),
                self.precision.forward_context(),
            ):
                output = step(slice_samples(batch.samples, batch.rows, part), *args)
            part_sum, part_count = _loss_of(output, len(part))
            if index == len(parts) - 1:
                self.sums.expect(self.sums.parameters)
            if part_sum is not None:
                with self.pace.trace.span(f"0B{index}"):
                    (part_sum * (self.precision.loss_scale / planned)).backward()
                loss_sum += float(part_sum.detach())
                count += float(part_count)
        self.sums.finish()
        self.pace.sums_waited()
        values = self._reduce(logged, batch.size, [loss_sum, count, float(self.sums.owned_square_sum())])
        loss_sum, count, squares = values
        self.pace.met()
        factor = planned / count / self.precision.loss_scale if count else 0.0
        gradients = self.sums.gradients()
        if gradients and math.isfinite(squares):
            torch._foreach_mul_(gradients, factor)
        return StepResult(loss_sum, count, math.sqrt(squares) * factor if squares >= 0 else math.nan)

    def evaluate_step(self, step: Callable[..., Any], batch: Any, *args: Any) -> None:
        """Run `step(samples, *args)` for each part; the averages of what it logged are in `logged` afterwards."""
        logged = LoggedValues()
        for part in self._parts(batch):
            with self._recorded(logged, len(part)), self.precision.forward_context():
                step(slice_samples(batch.samples, batch.rows, part), *args)
        self._reduce(logged, batch.size, [])

    def predict_step(self, step: Callable[..., Any], batch: Any, *args: Any) -> list[Any]:
        """Outputs of `step` for this rank's parts."""
        with self.precision.forward_context():
            return [step(slice_samples(batch.samples, batch.rows, part), *args) for part in self._parts(batch)]

    @contextmanager
    def _recorded(self, logged: LoggedValues, samples: int) -> Iterator[None]:
        """Catch the module's `self.log` calls."""

        def log(name: str, value: Any, **options: Any) -> None:
            logged.add(name, value, samples, options)

        def log_dict(values: Any, **options: Any) -> None:
            for name, value in values.items():
                logged.add(name, value, samples, options)

        self.module.__dict__.update(log=log, log_dict=log_dict)
        try:
            yield
        finally:
            del self.module.__dict__["log"], self.module.__dict__["log_dict"]

    def _reduce(self, logged: LoggedValues, batch_size: int, values: list[float]) -> list[float]:
        """Sum `values` over the ranks, and set `self.logged` to the averages of the logged values.

        One collective, unless some rank logs a name that the others have not seen.
        """
        new = set(logged.options) - set(self._names)
        numbers = [*values, float(len(new)), *(logged.sums.get(n, 0.0) for n in self._names)]
        flags = [float(n in logged.options) for n in self._names]
        total = self.mesh.sum_over_all(
            torch.tensor([*numbers, *flags], dtype=torch.float64, device=self.device)
        ).tolist()
        self._options.update(logged.options)
        if total[len(values)]:
            found: list[Any] = [None] * self.plan.num_ranks
            mine = {n: self._options[n] for n in logged.options}
            if self.plan.num_ranks > 1:
                dist.all_gather_object(found, mine)
            else:
                found = [mine]
            for options in found:
                self._options = {**options, **self._options}
            self._names = tuple(sorted(self._options))
            self._reduce(logged, batch_size, [])
        else:
            self.logged_samples = batch_size
            sums = total[len(values) + 1 : len(values) + 1 + len(self._names)]
            seen = total[len(values) + 1 + len(self._names) :]
            self.logged = {
                name: (value / batch_size, self._options[name])
                for name, value, ranks in zip(self._names, sums, seen, strict=True)
                if ranks
            }
        return total[: len(values)]


def _loss_of(output: Any, samples: int) -> tuple[Tensor | None, Any]:
    """(sum, count) of what a training step returned; a mean loss counts for its samples."""
    if output is None:
        return None, 0
    if isinstance(output, Tensor):
        return output * samples, samples
    if isinstance(output, dict) and {"loss_sum", "count"} <= output.keys():
        return output["loss_sum"], output["count"]
    if isinstance(output, dict) and "loss" in output:
        return output["loss"] * samples, samples
    raise RankError(
        f"training_step returned {type(output).__name__}: return the mean loss, a dict with 'loss', or "
        "{'loss_sum': ..., 'count': ...} where something else than samples counts"
    )
