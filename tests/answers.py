"""Answers of the planner made by hand, for tests of what is written about them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from specs import gpt_spec
from tilings import irregular, plan_of, tile

from whale_trainer.device_kinds import KINDS
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.answer import Alternative, Answer
from whale_trainer.planning.costs.cost_model import MemoryItems
from whale_trainer.planning.costs.memory import usable_bytes, with_memory
from whale_trainer.planning.plan import Plan, PlannedDevice, Prediction
from whale_trainer.planning.schedule.schedule import bridges_between
from whale_trainer.planning.simulation.timeline import Activity, Span, Timeline

CELL_S = 1e-4
"""Seconds of a forward pass of one layer and one sample on a V100."""
SPEEDS = {"V100-SXM2-32GB": 1.0, "P100-PCIE-16GB": 0.6, "T4": 0.35}


def model_of(plan: Plan) -> ModelSpec:
    """A decoder with as many layers as the plan has."""
    spec = gpt_spec(width=768, num_blocks=plan.num_layers - 2, num_heads=12, vocab_size=50257, context=1024)
    names = plan.layer_names
    return replace(spec, layers=tuple(replace(s, name=n) for s, n in zip(spec.layers, names, strict=True)))


def on(plan: Plan, kinds: Sequence[str]) -> Plan:
    """The plan on devices of these kinds, a node for each kind."""
    devices = [PlannedDevice(i, kind, f"node-{kind}", KINDS[kind].memory_bytes) for i, kind in enumerate(kinds)]
    return replace(plan, devices=tuple(devices), layer_names=gpt_spec(num_blocks=plan.num_layers - 2).layer_names)


def step_of(plan: Plan) -> Timeline:
    """All forward passes, then all backward passes; what crosses to the next tile, a sum and an optimizer step."""
    free: dict[int, float] = defaultdict(float)
    ready: dict[tuple[int, int], float] = defaultdict(float)
    busy: dict[int, float] = defaultdict(float)
    spans: list[Span] = []
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    for bridge in bridges_between(plan.tiles):
        before[bridge.after].append(bridge.before)
        after[bridge.before].append(bridge.after)
    order = sorted(range(len(plan.tiles)), key=lambda i: plan.tiles[i].layers)
    for op, tiles in (("F", order), ("B", order[::-1])):
        for micro_batch, index in product(range(plan.micro_batches), tiles):
            held = plan.tiles[index]
            speed = sum(SPEEDS.get(plan.devices[r].kind, 1.0) for r in held.ranks)
            seconds = CELL_S * len(held.layers) * len(held.samples) / speed * (1 if op == "F" else 2)
            start = max([ready[index, micro_batch], *(free[r] for r in held.ranks)])
            for rank in held.ranks:
                activity = Activity.FORWARD if op == "F" else Activity.BACKWARD
                spans.append(Span(rank, activity, f"{index}{op}{micro_batch}", start, start + seconds))
                free[rank] = start + seconds
                busy[rank] += seconds
            for other in after[index] if op == "F" else before[index]:
                arrival = start + seconds * 1.2
                label = f"{index}{op}{micro_batch} to rank {plan.tiles[other].ranks[0]}"
                spans.append(Span(held.ranks[0], Activity.TRANSFER, label, start + seconds, arrival, 3 << 20))
                ready[other, micro_batch] = max(ready[other, micro_batch], arrival)
    last = max(free.values())
    for rank in range(plan.num_ranks):
        end = free[rank]
        spans.append(Span(rank, Activity.SUM, "sum over all ranks", end, last * 1.05, 25 << 20))
        spans.append(Span(rank, Activity.OPTIMIZER, "optimizer", last * 1.05, last * 1.08))
    spans.sort(key=lambda s: (s.rank, s.start_s))
    fractions = tuple(busy[r] / (last * 1.08) for r in range(plan.num_ranks))
    return Timeline(last * 1.08, tuple(spans), fractions, "the backward pass of rank 0")


def memory_of(plan: Plan, rank: int) -> MemoryItems:
    """By layers and samples that a rank holds: 28 MiB of weights a layer, 60 MiB of activations a cell."""
    weights = activations = 0
    for index in plan.tiles_of(rank):
        held = plan.tiles[index]
        weights += (28 << 20) * len(held.layers)
        activations += (60 << 20) * len(held.layers) * len(held.samples) // len(held.shards)
    return MemoryItems(
        parameters=weights,
        gradients=weights,
        optimizer_state=2 * weights,
        activations=activations,
        bucket_buffers=25 << 20,
    )


def answer_of(plan: Plan) -> tuple[Answer, ModelSpec]:
    """The plan with a step, memory and figures."""
    model, step = model_of(plan), step_of(plan)
    memory = tuple(memory_of(plan, rank) for rank in range(plan.num_ranks))
    usable = tuple(usable_bytes(KINDS[device.kind]) for device in plan.devices)
    s = step.step_s
    told = Prediction(s, step.bubble_fraction, 1.31 * s, 1.07 * s, 0.86 * s)
    others = (Alternative("2 replicas x 2 stages x split 2, 8 micro-batches, 1f1b", 1.021 * s),)
    return Answer(with_memory(replace(plan, predicted=told), memory), step, memory, usable, others, 0.12), model


def two_replicas() -> Plan:
    """A V100 with 11 of 16 samples, a P100 with 5."""
    return on(
        plan_of([tile((0, 8), (0, 11), 0), tile((0, 8), (11, 16), 1)], micro_batches=4, global_batch=64),
        ["V100-SXM2-32GB", "P100-PCIE-16GB"],
    )


def hybrid() -> Plan:
    """8 ranks of two kinds: two replicas of two stages, each stage split over two ranks, some over both kinds."""
    tiles = [
        tile((0, 9), (0, 9), (0, 1), (1, 1)),
        tile((9, 14), (0, 9), (2, 5), (4, 3)),
        tile((0, 8), (9, 16), (3, 5), (5, 3)),
        tile((8, 14), (9, 16), (6, 1), (7, 1)),
    ]
    plan = plan_of(tiles, micro_batches=8, global_batch=128)
    return on(plan, ["V100-SXM2-32GB"] * 4 + ["P100-PCIE-16GB"] * 4)


def mixed_tiling() -> Plan:
    """The design's irregular tiling on three kinds."""
    plan = irregular()
    return on(plan, ["V100-SXM2-32GB", "P100-PCIE-16GB", "T4", "P100-PCIE-16GB", "V100-SXM2-32GB"])


def wide(replicas: int = 16, stages: int = 4, micro_batches: int = 16) -> Plan:
    """Replicas with a few more samples on the faster half, and stages."""
    heights = [5 if row < replicas // 2 else 3 for row in range(replicas)]
    tops = [sum(heights[:row]) for row in range(replicas)]
    tiles = [
        tile((6 * c, 6 * c + 6), (tops[r], tops[r] + heights[r]), r * stages + c)
        for r, c in product(range(replicas), range(stages))
    ]
    plan = plan_of(tiles, micro_batches=micro_batches, global_batch=sum(heights) * micro_batches)
    half = replicas * stages // 2
    return on(plan, ["V100-SXM2-32GB"] * half + ["P100-PCIE-16GB"] * (replicas * stages - half))
