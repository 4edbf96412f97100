"""The executor as seen from outside: what is in memory when, when sums start, what may cross a bridge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Case, Outcome, gpt, rank_batch, run_case, single, token_batch
from tilings import pipeline, plan_of, tile
from torch import Tensor, nn

from whale_trainer.describe import describe
from whale_trainer.errors import RankError
from whale_trainer.planning.plan import SCHEDULES, Plan
from whale_trainer.planning.schedule.schedule import Compute, Op, build_schedule
from whale_trainer.runtime.engine import Engine
from whale_trainer.runtime.executor import Pass
from whale_trainer.runtime.pace import OwnPace, Pace
from whale_trainer.runtime.trace import Event, Trace

pytestmark = pytest.mark.ranks


class Stack(nn.Module):
    """Some equal layers; the loss is the mean square of the outputs."""

    def __init__(self, num_layers: int = 4, width: int = 6) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers))

    def layers(self) -> list[tuple[str, nn.Module]]:
        return [(f"body.{i}", layer) for i, layer in enumerate(self.body)]

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.square().mean(dim=-1).sum(), len(output)


def square_batch(size: int, step: int, width: int = 6) -> tuple[Tensor]:
    return (torch.randn(size, width, dtype=torch.float64, generator=torch.Generator().manual_seed(step)),)


def stack_engine(rank: int, plan: Plan, pace: Pace | None = None) -> Engine:
    torch.manual_seed(0)
    model = Stack(plan.num_layers)
    return Engine(plan, describe(model, square_batch(2, 0)), model, rank=rank, precision="64-true", pace=pace)


def count_live_micro_batches(rank: int, _world_size: int, plan: Plan) -> int:
    """Most micro-batches whose tensors the backward pass still needs, counted where autograd keeps and frees them."""
    engine = stack_engine(rank, plan)
    live, most = 0, 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal live, most
            self.tensor = tensor
            live += 1
            most = max(most, live)

        def __del__(self) -> None:
            nonlocal live
            live -= 1

    found = []
    for size in (1, plan.global_batch):  # of one micro-batch, and of all
        most = 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            engine.train_step(rank_batch(square_batch(size, 0), plan, rank, size), 0)
        assert live == 0, "autograd still holds tensors after the step"
        found.append(most)
    assert found[1] % found[0] == 0
    return found[1] // found[0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_live_activations(schedule: str) -> None:
    stages, micro_batches = 3, 6
    plan = pipeline(stages, micro_batches, schedule)
    found = run_ranks(count_live_micro_batches, stages, plan)
    assert found == ([3, 2, 1] if schedule == "1f1b" else [6, 6, 6])


def count_micro_batches_that_wait(rank: int, _world_size: int, plan: Plan) -> list[tuple[int, int]]:
    """(in flight, waiting for the gradients of weights) after every action of a step, as the executor holds them."""
    engine = stack_engine(rank, plan)
    runs: list[Pass] = []
    found = []

    class Counting(dict[type, Any]):
        def __getitem__(self, kind: type) -> Any:
            def handle(instruction: Any, run: Pass) -> None:
                handlers[kind](instruction, run)
                if kind is Compute:
                    runs.append(run)
                    found.append((len(run.saved), len(run.waiting_weights)))

            return handle

    handlers = engine._executor._handlers
    engine._executor._handlers = Counting()
    engine.train_step(rank_batch(square_batch(plan.global_batch, 0), plan, rank, plan.global_batch), 0)
    assert not runs[-1].saved
    assert not runs[-1].waiting_weights
    return found


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
@pytest.mark.parametrize("places", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)], ids=str)
def test_what_is_in_flight_is_what_the_schedule_says(schedule: str, places: tuple[int, ...]) -> None:
    tiles = [tile((s, s + 1), (0, 1), rank) for s, rank in enumerate(places)]
    plan = plan_of(tiles, micro_batches=6, global_batch=6, schedule=schedule)
    expected = build_schedule(plan, 6)
    found = run_ranks(count_micro_batches_that_wait, plan.num_ranks, plan)
    for rank in range(plan.num_ranks):
        flying = waiting = 0
        counts = []
        for action in expected.actions_of(rank):
            flying += (action.op is Op.FORWARD) - action.op.gives_back
            waiting += (action.op is Op.INPUT) - (action.op is Op.WEIGHT)
            counts.append((flying, waiting))
        assert found[rank] == counts


def trace_step(rank: int, _world_size: int, plan: Plan) -> list[Event]:
    trace = Trace()
    torch.manual_seed(0)
    model = gpt(width=192, vocab_size=256, context=64)
    batch = token_batch(plan.global_batch, 0, vocab_size=256, context=64)
    engine = Engine(plan, describe(model, batch), model, rank=rank, pace=OwnPace(trace))
    for step in range(2):
        engine.train_step(rank_batch(batch, plan, rank, plan.global_batch), step)
    return list(trace.events)


def test_sums_start_before_the_last_backward_ends() -> None:
    plan = plan_of([tile((0, 6), (0, 4), 0), tile((0, 6), (4, 8), 1)], micro_batches=1, global_batch=8)
    for events in run_ranks(trace_step, 2, plan):
        last_backward = [e for e in events if "B" in e.name][-1]
        sums = [e for e in events if e.name.startswith("SUM") and e.start_s > last_backward.start_s]
        assert len(sums) > 1
        assert sums[0].start_s < last_backward.end_s


class Skip(nn.Module):
    """Layers that pass a dict: a tensor, its skip from the first layer, an integer mask, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SkipLayer("first")
        self.middle = SkipLayer("middle")
        self.masked = SkipLayer("masked")
        self.last = SkipLayer("last")

    def layers(self) -> list[tuple[str, nn.Module]]:
        return list(self.named_children())

    def inputs(self, batch: Any) -> Any:
        return {"x": batch[0], "mask": batch[1], "nothing": None}

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, int]:
        return output["x"].square().sum(), len(output["x"])


class SkipLayer(nn.Module):
    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role
        self.linear = nn.Linear(6, 6)

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        x = torch.tanh(self.linear(values["x"])) * (values["mask"] + 1)
        if self.role == "first":
            return {**values, "x": x, "skip": x * 2}
        return {**values, "x": x + values["skip"] if self.role == "last" else x}


def masked_batch(size: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(size, 6, dtype=torch.float64, generator=generator),
        torch.randint(2, (size, 6), generator=generator),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_bridge_carries_skips_masks_and_none(schedule: str) -> None:
    plan = plan_of(
        [tile((0, 2), (0, 3), 0), tile((0, 1), (3, 4), 1), tile((1, 4), (3, 4), 2), tile((2, 4), (0, 3), 1)],
        micro_batches=2,
        global_batch=8,
        schedule=schedule,
    )
    case = Case(plan, model=Skip, batch=masked_batch, batch_sizes=(8, 5), evaluate=(3,))
    expected: Outcome = run_ranks(run_case, 1, case.under(single(plan)))[0]
    found: Outcome = run_ranks(run_case, 3, case)[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.evaluations == pytest.approx(expected.evaluations, rel=1e-12)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-12)


def change_the_shape(rank: int, _world_size: int, plan: Plan) -> None:
    torch.manual_seed(0)
    model = gpt(context=8)
    engine = Engine(plan, describe(model, token_batch(2, 0)), model, rank=rank)
    for context in (5, 7):
        batch = token_batch(plan.global_batch, 0, context=context)
        engine.train_step(rank_batch(batch, plan, rank, plan.global_batch), 0)


def test_boundaries_that_change_their_shape_are_refused() -> None:
    plan = plan_of([tile((0, 3), (0, 2), 0), tile((3, 6), (0, 2), 1)], micro_batches=2, global_batch=4)
    with pytest.raises(RankError, match="pad the samples to one length"):
        run_ranks(change_the_shape, 2, plan)
