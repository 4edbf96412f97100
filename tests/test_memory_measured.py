"""Planned memory against what is measured: live tensor storage, counted at every operator of a training step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_runs import Measured, MemoryCase, measure, planned
from ranks import run_ranks
from tilings import plan_of, tile
from torch import nn

from whale_trainer.api import make_plan
from whale_trainer.cli import compose_config, make_plan_of, plain_of
from whale_trainer.config import load_config
from whale_trainer.describe import describe, optimizer_bytes
from whale_trainer.planning.costs.cost_model import ADAMW, MemoryItems, OptimizerBytes
from whale_trainer.planning.costs.memory import size
from whale_trainer.planning.plan import Plan, Tile
from whale_trainer.runtime.footprint import with_footprints
from whale_trainer.runtime.meter import MemoryMeter

LEAST, MOST = 1.00, 1.10
MOST_OF = {"zero bubble, back and forth, shards": 1.35}
"""Bridge buffers of both tiles of a rank count, though they are seldom there at once; here they are a quarter."""


def step(*tiles: Tile, micro_batches: int = 1, schedule: str = "1f1b") -> Plan:
    """A plan whose micro-batches are as high as its tiles."""
    height = max(t.samples.stop for t in tiles)
    return plan_of(tiles, micro_batches=micro_batches, global_batch=micro_batches * height, schedule=schedule)


IRREGULAR = (tile((0, 3), (0, 4), 0), tile((0, 2), (4, 6), 1), tile((3, 5), (0, 4), 2), tile((2, 5), (4, 6), 0))
"""Two cuts at different layers; rank 0 holds the start of one replica and the end of the other."""

CASES = {
    "one device": MemoryCase(step(tile((0, 5), (0, 4), 0))),
    "uneven replicas": MemoryCase(step(tile((0, 5), (0, 3), 0), tile((0, 5), (3, 5), 1), micro_batches=2)),
    "uneven shards": MemoryCase(step(tile((0, 5), (0, 4), (0, 2), (1, 1)))),
    "1f1b": MemoryCase(
        step(tile((0, 2), (0, 2), 0), tile((2, 3), (0, 2), 1), tile((3, 5), (0, 2), 2), micro_batches=6),
        optimizer="SGD",
    ),
    "gpipe": MemoryCase(
        step(tile((0, 2), (0, 2), 0), tile((2, 5), (0, 2), 1), micro_batches=4, schedule="gpipe"),
        precision="64-true",
        optimizer="SGD",
        options={"momentum": 0.9},
    ),
    "replicas of stages, one of them cut": MemoryCase(
        step(
            tile((0, 3), (0, 4), (0, 2), (1, 1)),
            tile((3, 5), (0, 4), 2),
            tile((0, 3), (4, 6), 3),
            tile((3, 5), (4, 6), 3),
            micro_batches=4,
        )
    ),
    "replicas cut in different ways": MemoryCase(
        step(tile((0, 5), (0, 3), (0, 3), (1, 1)), tile((0, 5), (3, 5), (2, 1), (3, 1)), micro_batches=2)
    ),
    "shards that share key and value heads": MemoryCase(
        step(tile((0, 5), (0, 2), (0, 3), (1, 3), (2, 2)), micro_batches=2), changes={"num_kv_heads": 2}
    ),
    "a large vocabulary, tied over stages": MemoryCase(
        step(tile((0, 2), (0, 1), 0), tile((2, 5), (0, 1), 1), micro_batches=4), changes={"vocab_size": 4096}
    ),
    "irregular, one rank with two tiles": MemoryCase(step(*IRREGULAR, micro_batches=4)),
    "bf16 stages": MemoryCase(
        step(tile((0, 2), (0, 4), 0), tile((2, 5), (0, 4), 1), micro_batches=4), precision="bf16-mixed"
    ),
    "bf16 shards, dropout": MemoryCase(
        step(tile((0, 5), (0, 4), (0, 3), (1, 1)), micro_batches=2),
        changes={"dropout": 0.1, "tied": False, "bias": True, "positions": "learned"},
        precision="bf16-mixed",
    ),
    "interleaved": MemoryCase(
        step(
            *(tile((a, b), (0, 2), rank) for a, b, rank in ((0, 1, 0), (1, 2, 1), (2, 4, 0), (4, 5, 1))),
            micro_batches=6,
            schedule="interleaved",
        ),
    ),
    "zero bubble": MemoryCase(
        step(
            tile((0, 2), (0, 2), 0),
            tile((2, 3), (0, 2), 1),
            tile((3, 5), (0, 2), 2),
            micro_batches=6,
            schedule="zero_bubble",
        ),
        optimizer="SGD",
    ),
    "zero bubble, back and forth, shards": MemoryCase(
        step(
            tile((0, 1), (0, 4), (0, 2), (1, 1)),
            tile((1, 3), (0, 4), 2),
            tile((3, 4), (0, 4), 2),
            tile((4, 5), (0, 4), (0, 2), (1, 1)),
            micro_batches=4,
            schedule="zero_bubble",
        ),
    ),
    "bf16, zero bubble": MemoryCase(
        step(tile((0, 2), (0, 4), 0), tile((2, 5), (0, 4), 1), micro_batches=4, schedule="zero_bubble"),
        precision="bf16-mixed",
    ),
    "mlp: zero bubble": MemoryCase(
        step(tile((0, 2), (0, 8), 0), tile((2, 4), (0, 8), 1), micro_batches=4, schedule="zero_bubble"),
        model="mlp",
        optimizer="SGD",
    ),
    "mlp: one device": MemoryCase(step(tile((0, 4), (0, 32), 0)), model="mlp"),
    "mlp: replicas, momentum": MemoryCase(
        step(tile((0, 4), (0, 20), 0), tile((0, 4), (20, 32), 1)),
        model="mlp",
        optimizer="SGD",
        options={"momentum": 0.9},
    ),
    "mlp: shards without biases": MemoryCase(
        step(tile((0, 4), (0, 16), (0, 5), (1, 2)), micro_batches=2),
        model="mlp",
        changes={"bias": False},
    ),
    "mlp: stages": MemoryCase(
        step(tile((0, 2), (0, 8), 0), tile((2, 4), (0, 8), 1), micro_batches=4), model="mlp", optimizer="SGD"
    ),
}


def report(rank: int, plan: MemoryItems, found: Measured) -> str:
    """Both sides by item, and what made the most storage."""
    items = ", ".join(f"{name} {size(value)}" for name, value in plan.biggest(10))
    parts = ", ".join(f"{name} {size(value)}" for name, value in found.items.items())
    lines = [
        f"rank {rank}: planned {plan.total:,} / measured {found.peak:,} = {plan.total / found.peak:.3f}",
        f"  planned: {items}",
        f"  measured: {parts}",
        *(f"    {line}" for line in found.biggest),
    ]
    return "\n".join(lines)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_planned_memory_is_what_a_step_holds(name: str) -> None:
    case, most = CASES[name], MOST_OF.get(name, MOST)
    pairs = list(enumerate(zip(planned(case), run_ranks(measure, case.plan.num_ranks, case, timeout=60), strict=True)))
    wrong = [report(r, plan, found) for r, (plan, found) in pairs if not LEAST <= plan.total / found.peak <= most]
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks
def test_parameters_gradients_and_state_are_told_to_the_byte() -> None:
    case = CASES["1f1b"]
    adam = replace(case, optimizer="AdamW", options={})
    for items, found in zip(planned(adam), run_ranks(measure, adam.plan.num_ranks, adam), strict=True):
        assert items.parameters == found.items["parameters"]
        assert items.optimizer_state == found.items["optimizer state"]
        assert items.batch == found.items["batch"]


class TestN01:
    """Activation memory must be in the estimate, with all that drives it."""

    @pytest.mark.parametrize("context", [16, 64])
    @pytest.mark.parametrize("samples", [1, 4, 16])
    def test_a_decoder_of_eight_blocks(self, samples: int, context: int) -> None:
        plan = step(tile((0, 10), (0, samples), 0))
        sizes = {"width": 96, "num_layers": 8, "num_heads": 6, "num_kv_heads": 6, "context": context}
        case = MemoryCase(plan, changes=sizes)
        (items,), found = planned(case), measure(0, 1, case)
        assert LEAST <= items.total / found.peak <= MOST, report(0, items, found)


# ---- optimizers ----


def bytes_of(name: str, device_type: str = "cpu", **options: Any) -> OptimizerBytes:
    return optimizer_bytes(lambda named: getattr(torch.optim, name)(named, lr=1e-3, **options), device_type=device_type)


@pytest.mark.parametrize(
    ("name", "options", "of_element"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 4),
        ("AdamW", {}, 8),
        ("AdamW", {"amsgrad": True}, 12),
        ("RMSprop", {}, 4),
    ],
)
def test_state_of_an_optimizer(name: str, options: dict[str, Any], of_element: float) -> None:
    assert bytes_of(name, **options).of_element == of_element


def test_on_gpus_adamw_takes_all_parameters_at_once() -> None:
    assert bytes_of("AdamW", "cuda") == ADAMW
    assert bytes_of("AdamW").peak_of_all == 0 < bytes_of("AdamW").peak_of_one


def test_an_optimizer_that_cannot_be_tried_counts_as_adamw() -> None:
    def picky(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for n, p in named if n.startswith("backbone")])

    assert optimizer_bytes(picky) == ADAMW


def test_make_plan_plans_for_the_optimizer() -> None:
    model, example = CASES["mlp: one device"].build(), CASES["mlp: one device"].batch(2)
    cpus = {
        "nodes": [{"name": "here", "devices": {"small": 1}}],
        "kinds": {"small": {"peak_tflops": {"fp32": 0.1}, "memory_gib": 1, "memory_bandwidth_gb_per_s": 10}},
    }
    plans = [
        make_plan(model, cpus, {"name": "single"}, global_batch=1, example=example, make_optimizer=optimizer)
        for optimizer in (torch.optim.AdamW, lambda named: torch.optim.SGD(named, lr=0.1))
    ]
    adamw, sgd = (plan.devices[0].planned_memory_bytes or 0 for plan in plans)
    weights = sum(p.nbytes for p in model.parameters())
    assert adamw - sgd > 2 * weights


def test_the_command_plans_for_the_optimizer_of_the_config() -> None:
    found = []
    for name in ("adamw", "sgd"):
        overrides = ["model=gpt_mini", "strategy=single", f"optimizer={name}", "mode=plan"]
        planned_run = make_plan_of(load_config(plain_of(compose_config(overrides), ".")))
        found.append(planned_run.answer.memory[0].optimizer_state)
    assert found[1] == pytest.approx(found[0] / 2, rel=0.01)  # momentum alone against two moments


# ---- layers that cannot be measured ----


class Looks(nn.Module):
    """Its second layer looks at values, which the meta device has not."""

    class Second(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out * 2 if x.is_meta or out.sum().item() > 0 else out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Looks.Second(4, 4), nn.Linear(4, 4)])

    def layers(self) -> Any:
        return ((f"blocks.{i}", b) for i, b in enumerate(self.blocks))


class Fails(Looks.Second):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum())


def test_a_layer_that_looks_at_values_leaves_the_rest_to_the_rough_figures() -> None:
    model, batch = Looks(), torch.ones(2, 4)
    spec = describe(model, batch)
    model.blocks[1] = Fails(4, 4)
    memories = [layer.memory for layer in with_footprints(spec, model, batch).layers]
    assert memories[0] is not None
    assert memories[1:] == [None, None]


def test_a_batch_without_tensors_is_left_alone() -> None:
    model = Looks()
    spec = describe(model, torch.ones(2, 4))
    assert with_footprints(spec, model, ["a", "b"]) is spec


# ---- the meter ----


def test_the_meter_counts_each_storage_once_and_as_long_as_it_lives() -> None:
    with MemoryMeter() as meter:
        a = torch.zeros(100)
        views = [a[i:] for i in range(5)]
        assert meter.live == 400
        b = a + 1
        assert meter.live == meter.peak == 800
        del a, views
        assert meter.live == 400
        meter.restart()
        b += 1
        c = b * b * b
    assert meter.peak == 1200
    assert meter.items({"b": [b], "c": [c, None]}) == {"b": 400, "c": 400, "others": 400}
    assert "mul (100,)" in meter.biggest(1)[0]


def test_the_meter_finds_what_was_made_before() -> None:
    before = torch.ones(50)
    with MemoryMeter() as meter:
        before.sum()
    assert meter.live == 200
    assert "found by" in meter.biggest()[0]
