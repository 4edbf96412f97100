"""The contract: under any plan, loss, gradients and weights are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from runs import Case, Outcome, gpt, run_case, single
from tilings import pinwheels, plan_of, rectangles, tile

from whale_trainer.planning.plan import SCHEDULES, Plan, Shard, Tile

pytestmark = pytest.mark.ranks

LAYERS = 6
"""embed, four blocks, head."""


def three_of_four(*tiles: Tile, schedule: str = "1f1b") -> Plan:
    """Three micro-batches of four samples."""
    return plan_of(tiles, micro_batches=3, global_batch=12, schedule=schedule)


def grid(replicas: Sequence[int], stages: Sequence[int], weights: Sequence[int], **options: Any) -> Plan:
    """Regular plan: sample shares x layer cuts x shard weights, ranks in that order."""
    tiles, rank, row = [], 0, 0
    for share in replicas:
        for start, stop in pairwise(stages):
            ranks = range(rank, rank + len(weights))
            tiles.append(tile((start, stop), (row, row + share), *zip(ranks, weights, strict=True)))
            rank += len(weights)
        row += share
    return three_of_four(*tiles, **options)


PLANS = {
    "data 1:1": grid([2, 2], [0, 6], [1]),
    "data 3:1": grid([3, 1], [0, 6], [1]),
    "tensor 1:1": grid([4], [0, 6], [1, 1]),
    "tensor 2:1": grid([4], [0, 6], [2, 1]),
    "tensor 5:3": grid([4], [0, 6], [5, 3]),
    "pipeline even": grid([4], [0, 3, 6], [1]),
    "pipeline 3:1": grid([4], [0, 5, 6], [1]),
    "pipeline 3:1 gpipe": grid([4], [0, 5, 6], [1], schedule="gpipe"),
    "pipeline 3:1 zero bubble": grid([4], [0, 5, 6], [1], schedule="zero_bubble"),
    "data x tensor": grid([3, 1], [0, 6], [2, 1]),
    "data x pipeline": grid([3, 1], [0, 2, 6], [1]),
    "tensor x pipeline": grid([4], [0, 4, 6], [2, 1]),
    "data x tensor x pipeline": grid([3, 1], [0, 4, 6], [2, 1]),
    "split degree 2 against 3": three_of_four(
        tile((0, 6), (0, 3), (0, 2), (1, 1)), tile((0, 6), (3, 4), (2, 1), (3, 1), (4, 1))
    ),
    "bridge from 2 shards to 3": three_of_four(tile((0, 2), (0, 4), (0, 1), (1, 2)), tile((2, 6), (0, 4), 2, 3, 4)),
    "irregular": three_of_four(
        tile((0, 4), (0, 3), (0, 5), (1, 3)),
        tile((0, 2), (3, 4), 2),
        tile((4, 6), (0, 2), 3),
        tile((2, 6), (3, 4), 2),
        tile((4, 6), (2, 3), 1),
    ),
    "two tiles on a rank": three_of_four(tile((0, 2), (0, 4), 0), tile((2, 4), (0, 4), 1), tile((4, 6), (0, 4), 0)),
    "overlapping shards on a rank": three_of_four(
        tile((0, 6), (0, 2), (0, 5), (1, 3)), tile((0, 6), (2, 4), (1, 1), (0, 2))
    ),
    "split backward in tensor groups": grid([4], [0, 3, 6], [2, 1], schedule="zero_bubble"),
    "split backward, irregular": three_of_four(
        tile((0, 4), (0, 3), (0, 5), (1, 3)),
        tile((0, 2), (3, 4), 2),
        tile((4, 6), (0, 2), 3),
        tile((2, 6), (3, 4), 2),
        tile((4, 6), (2, 3), 1),
        schedule="zero_bubble",
    ),
    "interleaved": three_of_four(
        *(tile((a, b), (0, 4), rank) for a, b, rank in ((0, 2, 0), (2, 3, 1), (3, 5, 0), (5, 6, 1))),
        schedule="interleaved",
    ),
    "interleaved zero bubble": three_of_four(
        *(tile((a, b), (0, 4), rank) for a, b, rank in ((0, 2, 0), (2, 3, 1), (3, 5, 0), (5, 6, 1))),
        schedule="zero_bubble",
    ),
    "back and forth": three_of_four(
        *(tile((a, b), (0, 4), rank) for a, b, rank in ((0, 2, 0), (2, 3, 1), (3, 5, 1), (5, 6, 0))),
        schedule="fitted",
    ),
    "colocated split head": three_of_four(
        tile((0, 5), (0, 3), 0), tile((0, 5), (3, 4), 1), tile((5, 6), (0, 4), (0, 3), (1, 2))
    ),
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """Outcome of one process for a case, computed once for each model and batch."""
    known: dict[str, Outcome] = {}

    def get(case: Case) -> Outcome:
        alone = case.under(single(case.plan))
        key = repr(replace(alone, plan=None, model=None, batch=None))  # type: ignore[arg-type]
        key += f"{alone.plan.global_batch} {alone.model.__name__} {alone.batch.__name__}"
        if key not in known:
            known[key] = run_ranks(run_case, 1, alone)[0]
        return known[key]

    return get


def assert_close(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")


def assert_same(case: Case, expected: Outcome, *, tolerance: float = 1e-10) -> list[Outcome]:
    outcomes = run_ranks(run_case, case.plan.num_ranks, case)
    found = outcomes[0]
    for name, value in expected.start.items():
        assert torch.equal(found.start[name], value), f"start value of {name}"
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert found.evaluations == pytest.approx(expected.evaluations, rel=tolerance)
    for name, gradient in expected.gradients.items():
        assert_close(name, found.gradients[name], gradient, tolerance)
    for name, weight in expected.weights.items():
        assert_close(name, found.weights[name], weight, tolerance)
    assert not any(o.replicas_differ for o in outcomes), "holders of the same parameter differ in a bit"
    moved = max((expected.weights[n] - expected.start[n]).abs().max().item() for n in expected.weights)
    assert moved > 100 * tolerance, "the weights did not move, so nothing was compared"
    return outcomes


@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_one_process(name: str, reference: Any) -> None:
    # full batch, a short last batch that leaves micro-batches empty, one sample; validation of 3 and of over a batch
    case = Case(PLANS[name], batch_sizes=(12, 7, 1), evaluate=(3, 1, 17), arguments={"dropout": 0.2})
    assert_same(case, reference(case))


@pytest.mark.parametrize(
    "arguments",
    [
        {"tied": False},
        {"qk_norm": True},
        {"num_kv_heads": 1},
        {"num_kv_heads": 2},
        {"bias": False, "norm": "rms"},
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", [[2, 1], [1, 1], [10, 1]], ids=str)
def test_model_switches(arguments: dict[str, Any], weights: list[int], reference: Any) -> None:
    case = Case(grid([4], [0, 3, 6], weights), arguments=arguments)
    assert_same(case, reference(case))


def test_heads_that_share_kv_heads_unevenly(reference: Any) -> None:
    # 6 query heads over 4 ranks with 2 kv heads: rank 1 has heads 2 and 3, of different groups
    case = Case(grid([4], [0, 6], [1, 1, 1, 1]), arguments={"num_kv_heads": 2, "qk_norm": True})
    assert_same(case, reference(case))


def test_clipping_is_by_the_norm_of_the_whole_model(reference: Any) -> None:
    case = Case(PLANS["data x tensor x pipeline"], clip=0.01, lr=1.0, batch_sizes=(12, 12))
    expected = reference(case)
    outcomes = assert_same(case, expected)
    assert len({tuple(o.norms) for o in outcomes}) == 1
    assert expected.norms[0] > 0.01


@pytest.mark.parametrize("name", ["tensor 2:1", "data x tensor x pipeline", "irregular"])
def test_float32_twenty_adamw_steps(name: str, reference: Any) -> None:
    case = Case(
        PLANS[name],
        arguments={"dropout": 0.1, "bias": False},
        precision="32-true",
        optimizer="AdamW",
        lr=1e-3,
        clip=1.0,
        batch_sizes=(12,) * 20,
    )
    expected = reference(case)
    found = run_ranks(run_case, case.plan.num_ranks, case)
    assert found[0].losses == pytest.approx(expected.losses, rel=1e-5)
    for weight, value in expected.weights.items():
        torch.testing.assert_close(found[0].weights[weight], value, rtol=0, atol=1e-4)
    assert not any(o.replicas_differ for o in found)


def test_a_wrong_gradient_sum_would_be_seen(reference: Any) -> None:
    """The comparison itself: another batch gives another outcome."""
    case = Case(PLANS["data 3:1"], batch_sizes=(12,))
    with pytest.raises(AssertionError):
        assert_same(replace(case, batch_sizes=(11,)), reference(case))


def test_frozen_parameters(reference: Any) -> None:
    case = Case(PLANS["data x tensor x pipeline"], model=gpt_with_frozen_embedding, arguments={"tied": False})
    assert_same(case, reference(case))


def gpt_with_frozen_embedding(**arguments: Any) -> torch.nn.Module:
    model = gpt(**arguments)
    model.layers()[0][1].requires_grad_(False) if isinstance(model.layers(), list) else next(iter(model.layers()))[
        1
    ].requires_grad_(False)
    return model


@st.composite
def small_plans(draw: st.DrawFn) -> Plan:
    """Tilings of 4 layers x 3 or 4 samples over 2 to 4 ranks, most of them no grid."""
    num_ranks, height = draw(st.integers(2, 4)), draw(st.integers(3, 4))
    shapes = draw(st.one_of(pinwheels(4, height), rectangles(4, height), rectangles(4, height)))
    shard = st.builds(Shard, st.integers(0, num_ranks - 1), st.integers(1, 5))
    shards = st.lists(shard, min_size=1, max_size=3, unique_by=lambda s: s.rank)
    tiles = [Tile(*shape, tuple(draw(shards))) for shape in shapes]
    return plan_of(
        tiles,
        micro_batches=2,
        global_batch=2 * height,
        schedule=draw(st.sampled_from(SCHEDULES)),
        num_ranks=num_ranks,
    )


def is_grid(plan: Plan) -> bool:
    """Whether the tiles are all pairs of some layer intervals and some sample intervals."""
    layers, samples = {t.layers for t in plan.tiles}, {t.samples for t in plan.tiles}
    return len(plan.tiles) == len(layers) * len(samples)


def test_random_tilings(reference: Any) -> None:
    seen: list[Plan] = []

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(small_plans())
    def check(plan: Plan) -> None:
        seen.append(plan)
        case = Case(plan, arguments={"num_layers": 2, "dropout": 0.1}, batch_sizes=(plan.global_batch, 5))
        assert_same(case, reference(case))

    check()
    assert len(seen) >= 50
    assert sum(not is_grid(p) for p in seen) >= len(seen) / 2
    assert sum(any(len(set(t.weights)) > 1 for t in p.tiles) for p in seen) >= len(seen) / 3
    assert sum(any(len(p.tiles_of(r)) > 1 for r in range(p.num_ranks)) for p in seen) >= len(seen) / 5
