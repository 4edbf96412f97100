"""What a rank holds over a training step under a plan, measured in the pool's ranks, and what the planner says."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from runs import rank_batch
from torch import Tensor, nn
from whale_trainer.models.gpt import GPT
from whale_trainer.models.mlp import MLP

from whale_trainer.data import RankBatch
from whale_trainer.describe import describe, optimizer_bytes
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.costs.cost_model import CostModel, MemoryItems
from whale_trainer.planning.costs.memory import rank_memory
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.runtime.engine import Engine
from whale_trainer.runtime.footprint import with_footprints
from whale_trainer.runtime.meter import MemoryMeter

CONF = Path(__file__).parents[1] / "conf" / "model"
WARM_UP, STEPS = 2, 3
"""Steps before the measured ones, after which optimizer state and buckets are there; measured ones, of which the least
counts: gloo's threads let go of what they summed at a moment of their own."""


@dataclass(frozen=True)
class MemoryCase:
    """A shipped model by the name of its file, with some arguments changed; how it is trained, under which plan."""

    plan: Plan
    model: str = "gpt_mini"
    changes: dict[str, Any] = field(default_factory=dict)
    precision: str = "32-true"
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        written = yaml.safe_load((CONF / f"{self.model}.yaml").read_text())
        return {key: value for key, value in written.items() if key != "_target_"} | self.changes

    def build(self) -> nn.Module:
        return (GPT if self.model == "gpt_mini" else MLP)(**self.arguments)

    def batch(self, size: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = self.arguments
        if self.model == "gpt_mini":
            tokens = torch.randint(sizes["vocab_size"], (size, sizes["context"] + 1), generator=generator)
            return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        return {name: torch.randn(size, sizes[f"num_{side}"]) for name, side in (("x", "inputs"), ("y", "outputs"))}

    def make_optimizer(self, named: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(named, lr=1e-3, **self.options)
        return made


@dataclass(frozen=True)
class Measured:
    """The most that a rank held at once in a step."""

    peak: int
    items: dict[str, int]
    biggest: list[str]


def measure(rank: int, _world_size: int, case: MemoryCase) -> Measured:
    """Train on this rank under a meter, which sees every storage from the making of the model on."""
    spec = _described(case)
    size = case.plan.global_batch
    with MemoryMeter() as meter:
        torch.manual_seed(0)
        model = case.build()
        engine = Engine(case.plan, spec, model, rank=rank, seed=7, precision=case.precision)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        optimizer = case.make_optimizer(trained)
        found = []
        for step in range(WARM_UP + STEPS):
            batch = rank_batch(case.batch(size), case.plan, rank, size)
            meter.restart()
            engine.train_step(batch, step)
            optimizer.step()
            found.append(_read(meter, engine, [p for _, p in trained], optimizer, batch))
    return min(found[WARM_UP:], key=lambda measured: measured.peak)


def _read(
    meter: MemoryMeter, engine: Engine, trained: list[nn.Parameter], optimizer: torch.optim.Optimizer, batch: RankBatch
) -> Measured:
    """What the meter says of the step that has just ended; keeps nothing of it alive."""
    named = {
        "parameters": trained,
        "gradients": [p.grad for p in trained],
        "optimizer state": [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)],
        "buckets": [bucket.flat for bucket in engine.sums._buckets],
        "batch": list(batch.samples.values()) if batch.samples is not None else [],
    }
    return Measured(meter.peak, meter.items(named), meter.biggest())


def _described(case: MemoryCase) -> ModelSpec:
    with torch.device("meta"):
        return describe(case.build(), case.batch(2))


def planned(case: MemoryCase) -> tuple[MemoryItems, ...]:
    """What the planner says, by rank."""
    spec = _footprints(case.model, tuple(case.changes.items()), case.precision)
    return rank_memory(case.plan, CostModel(spec, PRECISIONS[case.precision], optimizer_bytes(case.make_optimizer)))


@cache
def _footprints(model: str, changes: tuple[tuple[str, Any], ...], precision: str) -> ModelSpec:
    case = MemoryCase(None, model, dict(changes))  # type: ignore[arg-type]
    with torch.device("meta"):
        module, batch = case.build(), case.batch(2)
    return with_footprints(describe(module, batch), module, batch, precision=precision)
