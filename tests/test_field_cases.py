"""Faults that people met elsewhere, each with its right value in closed form.

`Line`: one scalar w from 0, loss mean (w - t)^2. `Pair`: y = a * b from 1 and 1. SGD with lr 0.1 in all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Case, Outcome, run_case
from tilings import plan_of, tile
from torch import Tensor, nn

from whale_trainer.planning.plan import Plan

pytestmark = pytest.mark.ranks

DATA_1_1 = plan_of([tile((0, 1), (0, 2), 0), tile((0, 1), (2, 4), 1)], micro_batches=1, global_batch=4)
DATA_3_1 = plan_of([tile((0, 1), (0, 3), 0), tile((0, 1), (3, 4), 1)], micro_batches=1, global_batch=4)


class Scale(nn.Module):
    """y = weight * x."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Line(nn.Module):
    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.only = Scale(start)

    def layers(self) -> list[tuple[str, nn.Module]]:
        return list(self.named_children())

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return (output - batch[1]).square().sum(), len(output)


class Pair(Line):
    def __init__(self, tied: bool = False) -> None:
        nn.Module.__init__(self)
        self.a = Scale(1.0)
        self.b = Scale(1.0)
        if tied:
            self.b.weight = self.a.weight


class TokenLine(Line):
    """Tokens with a target of nan do not count."""

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        valid = ~batch[1].isnan()
        return (output - batch[1].nan_to_num()).square()[valid].sum(), valid.sum()


def targets(size: int, step: int, values: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """x = 1 and the given targets, from the step's place on."""
    return torch.ones(size, dtype=torch.float64), torch.tensor(values[:size], dtype=torch.float64)


def two_sequences(size: int, step: int) -> tuple[Tensor, Tensor]:
    """A has one valid token with target 4, B three with target 0."""
    nan = float("nan")
    rows = [[4.0, nan, nan], [0.0, 0.0, 0.0]][:size]
    return torch.ones(size, 3, dtype=torch.float64), torch.tensor(rows, dtype=torch.float64)


def train(plan: Plan, model: Any, values: tuple[float, ...], **options: Any) -> list[Outcome]:
    options = {"batch_sizes": (len(values),), "batch_arguments": {"values": values}, "batch": targets, **options}
    return run_ranks(run_case, plan.num_ranks, Case(plan, model=model, lr=0.1, **options))


@pytest.mark.parametrize(
    "values", [(1, 1, 1, 5), (5, 1, 1, 1)], ids=["small rank has the outlier", "large rank has it"]
)
def test_u01_samples_count_alike_on_ranks_of_any_share(values: tuple[float, ...]) -> None:
    for outcome in train(DATA_3_1, Line, values):
        assert outcome.weights["only.weight"].item() == pytest.approx(0.4, abs=1e-12)  # a mean of rank means gives 0.6


@pytest.mark.parametrize(
    "plan",
    [
        DATA_1_1,
        DATA_3_1,
        plan_of([tile((0, 1), (0, 4), 0)], micro_batches=1, global_batch=4),
        plan_of([tile((0, 1), (0, 1), 0)], micro_batches=4, global_batch=4),
    ],
    ids=["1:1", "3:1", "one rank", "four micro-batches"],
)
def test_u03_each_validation_sample_counts_once(plan: Plan) -> None:
    # the "loss" of sample i is its number: sqrt(i) as target and w = 0; 7 samples in batches of 4 and 3
    numbers = tuple(float(i) ** 0.5 for i in range(7))
    whole = 0.0
    for part in (numbers[:4], numbers[4:]):
        case = Case(plan, model=Line, lr=0.0, batch=targets, batch_arguments={"values": part}, evaluate=(len(part),))
        case = Case(**{**vars(case), "batch_sizes": (len(part),)})
        found = {round(o.evaluations[0] * len(part), 9) for o in run_ranks(run_case, plan.num_ranks, case)}
        assert len(found) == 1
        whole += found.pop()
    assert whole / 7 == pytest.approx(3.0, abs=1e-9)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of([tile((0, 1), (0, 1), 0), tile((0, 1), (1, 2), 1)], micro_batches=1, global_batch=2),
        plan_of([tile((0, 1), (0, 1), 0)], micro_batches=2, global_batch=2),
    ],
    ids=["two ranks", "two micro-batches"],
)
def test_u04_tokens_are_weighted_over_ranks_and_micro_batches(plan: Plan) -> None:
    case = Case(plan, model=TokenLine, lr=0.1, batch=two_sequences, batch_sizes=(2,))
    for outcome in run_ranks(run_case, plan.num_ranks, case):
        assert outcome.weights["only.weight"].item() == pytest.approx(0.2, abs=1e-12)  # a mean of means gives 0.4


EIGHT = tuple(float(t) for t in range(8))


def pipeline(micro_batches: int, replicas: int = 1) -> Plan:
    height = -(-8 // micro_batches)
    share = height // replicas
    tiles = []
    for replica in range(replicas):
        rows = (replica * share, (replica + 1) * share)
        tiles += [tile((0, 1), rows, 2 * replica), tile((1, 2), rows, 2 * replica + 1)]
    return plan_of(tiles, micro_batches=micro_batches, global_batch=8)


@pytest.mark.parametrize(
    "plan",
    [pipeline(4), pipeline(2, replicas=2), pipeline(1), pipeline(3), pipeline(8)],
    ids=lambda p: f"M{p.micro_batches}",
)
def test_p02_p04_one_step_is_the_same_for_any_micro_batches(plan: Plan) -> None:
    for outcome in train(plan, Pair, EIGHT):
        assert outcome.losses == [pytest.approx(11.5)]  # with 3 micro-batches a mean of means gives 13.61
        assert outcome.weights["a.weight"].item() == pytest.approx(1.5, abs=1e-12)
        assert outcome.weights["b.weight"].item() == pytest.approx(1.5, abs=1e-12)


def test_p01_a_tied_weight_on_two_stages_is_one_parameter() -> None:
    for outcome in train(pipeline(2), Pair, EIGHT, arguments={"tied": True}):
        assert list(outcome.weights) == ["a.weight"]
        assert outcome.weights["a.weight"].item() == pytest.approx(2.0, abs=1e-12)  # 1.5 where the stages do not sum
        assert not outcome.replicas_differ


def test_m01_the_last_incomplete_window_counts_in_full() -> None:
    plan = plan_of([tile((0, 1), (0, 1), 0)], micro_batches=4, global_batch=4)
    expected = [0.2, 0.36, 0.488]  # 10 samples in windows of 4, 4, 2; dividing the last by 4 gives 0.424
    for steps in (1, 2, 3):
        outcome = train(plan, Line, (1.0,) * 4, batch_sizes=(4, 4, 2)[:steps])[0]
        assert outcome.weights["only.weight"].item() == pytest.approx(expected[steps - 1], abs=1e-12)
    outcome = train(plan, Line, (1.0,) * 3)[0]
    assert outcome.weights["only.weight"].item() == pytest.approx(0.2, abs=1e-12)


class RowBias(nn.Module):
    """The report's mlp: second layer cut by rows, its weight 0 and its bias 1."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.body = nn.Sequential()
        self.body.add_module("up", nn.Linear(4, hidden))
        self.body.add_module("act", nn.GELU())
        self.body.add_module("down", nn.Linear(hidden, 12))
        nn.init.zeros_(self.body.down.weight)
        nn.init.ones_(self.body.down.bias)
        self.tensor_split = {"body.up": "column", "body.down": "row"}

    def layers(self) -> list[tuple[str, nn.Module]]:
        return [("body", self.body)]

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.mean(dim=-1).square().sum(), len(output)


def features(size: int, step: int) -> tuple[Tensor]:
    return (torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)),)


@pytest.mark.parametrize("weights", [(1, 1), (2, 1)], ids=str)
def test_t01_the_bias_of_a_row_layer_is_added_once(weights: tuple[int, int]) -> None:
    plan = plan_of([tile((0, 1), (0, 4), (0, weights[0]), (1, weights[1]))], micro_batches=1, global_batch=4)
    case = Case(plan, model=RowBias, batch=features, lr=0.1)
    alone = run_ranks(run_case, 1, case.under(plan_of([tile((0, 1), (0, 4), 0)], micro_batches=1, global_batch=4)))[0]
    for outcome in run_ranks(run_case, 2, case):
        assert outcome.losses == [pytest.approx(1.0, abs=1e-12)]  # outputs of 2 give a loss of 4
        torch.testing.assert_close(
            outcome.weights["body.down.bias"], alone.weights["body.down.bias"], rtol=0, atol=1e-12
        )
        assert not outcome.replicas_differ


def shard_sizes(rank: int, _world_size: int, plan: Plan, hidden: int) -> tuple[int, bool]:
    """Columns that this rank holds, and whether the gathered weight is the whole one bit for bit."""
    from whale_trainer.describe import describe
    from whale_trainer.runtime.engine import Engine

    torch.manual_seed(0)
    model = RowBias(hidden).double()
    whole = model.body.up.weight.detach().clone()
    engine = Engine(plan, describe(model, features(2, 0)), model, rank=rank, precision="64-true")
    return len(model.body.up.weight), torch.equal(engine.full_parameter("body.up.weight"), whole)


@pytest.mark.parametrize(
    ("hidden", "weights", "sizes"), [(12, (2, 1), [8, 4]), (10, (2, 1), [7, 3]), (2, (9, 1), [1, 1])], ids=str
)
def test_t03_shards_follow_their_weights_and_gather_exactly(
    hidden: int, weights: tuple[int, int], sizes: list[int]
) -> None:
    plan = plan_of([tile((0, 1), (0, 4), (0, weights[0]), (1, weights[1]))], micro_batches=1, global_batch=4)
    found = run_ranks(shard_sizes, 2, plan, hidden)
    assert [size for size, _ in found] == sizes
    assert all(is_equal for _, is_equal in found)
