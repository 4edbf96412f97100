"""Training a few steps under a plan inside the pool's ranks, and what to compare with one process.

A `Case` is plain data, so that it can be sent to the ranks; `run_case` gives losses, gradients of the first step,
weights after the last one, all put together from the ranks' pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tilings import plan_of, tile
from torch import Tensor, nn
from whale_trainer.models.gpt import GPT

from whale_trainer.data import RankBatch
from whale_trainer.describe import describe
from whale_trainer.planning.plan import Plan
from whale_trainer.runtime.engine import Engine

GPT_ARGUMENTS: dict[str, Any] = {
    "vocab_size": 11,
    "width": 12,
    "num_layers": 4,
    "num_heads": 6,
    "num_kv_heads": 3,
    "context": 5,
    "bias": True,
    "tied": True,
}


def single(plan: Plan) -> Plan:
    """The same batches on one device, in one micro-batch."""
    return plan_of(
        [tile((0, plan.num_layers), (0, plan.global_batch), 0)], micro_batches=1, global_batch=plan.global_batch
    )


def gpt(**arguments: Any) -> nn.Module:
    return GPT(**{**GPT_ARGUMENTS, **arguments})


def token_batch(
    size: int, step: int, *, vocab_size: int = 11, context: int = 5, masked: bool = True
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab_size, (size, context + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if masked:
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
        targets[:, 0] = vocab_size - 1
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


def rank_batch(batch: Any, plan: Plan, rank: int, size: int) -> RankBatch:
    rows = plan.rows_to_read(rank, size)
    index = torch.tensor(rows, dtype=torch.int64)
    if not rows:
        return RankBatch(None, (), size)
    if isinstance(batch, dict):
        return RankBatch({k: v[index] for k, v in batch.items()}, rows, size)
    return RankBatch(tuple(v[index] for v in batch), rows, size)


@dataclass(frozen=True)
class Case:
    """What to train under a plan, and for how long."""

    plan: Plan
    model: Callable[..., nn.Module] = gpt
    arguments: dict[str, Any] = field(default_factory=dict)
    batch: Callable[..., Any] = token_batch
    batch_arguments: dict[str, Any] = field(default_factory=dict)
    batch_sizes: tuple[int, ...] = ()
    """Samples of each step's batch; by default one full batch."""
    precision: str = "64-true"
    lr: float = 1e-2
    optimizer: str = "SGD"
    clip: float = 0.0
    evaluate: tuple[int, ...] = ()
    """Sizes of batches to evaluate after the last step."""

    def under(self, plan: Plan) -> Case:
        return replace(self, plan=plan)


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    evaluations: list[float]
    replicas_differ: bool
    """True when holders of the same piece of a parameter have different bits."""
    start: dict[str, Tensor]


def run_case(rank: int, _world_size: int, case: Case) -> Outcome:
    """Train `case` on this rank. Every rank returns the whole outcome."""
    torch.manual_seed(0)
    model = case.model(**case.arguments)
    sizes = case.batch_sizes or (case.plan.global_batch,)
    example = case.batch(2, 0, **case.batch_arguments)
    with torch.device("meta"):
        spec = describe(case.model(**case.arguments), example)
    engine = Engine(case.plan, spec, model, rank=rank, seed=7, precision=case.precision)
    names = [p.name for p in spec.parameters]
    start = {name: engine.full_parameter(name) for name in names}
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, case.optimizer)(parameters, lr=case.lr) if parameters else None
    losses, norms, gradients = [], [], {}
    for step, size in enumerate(sizes):
        batch = case.batch(size, step, **case.batch_arguments)
        result = engine.train_step(rank_batch(batch, case.plan, rank, size), step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step == 0:
            gradients = {p.name: engine.full_gradient(p.name).clone() for p in spec.parameters if p.trainable}
        if case.clip and result.grad_norm > case.clip:
            torch._foreach_mul_(engine.sums.gradients(), case.clip / (result.grad_norm + 1e-6))
        if optimizer is not None:
            optimizer.step()
    evaluations = []
    for index, size in enumerate(case.evaluate):
        batch = case.batch(size, 100 + index, **case.batch_arguments)
        loss_sum, count = engine.evaluate(rank_batch(batch, case.plan, rank, size))
        evaluations.append(loss_sum / count)
    weights = {name: engine.full_parameter(name) for name in names}
    return Outcome(losses, norms, gradients, weights, evaluations, _replicas_differ(engine, weights), start)


def _replicas_differ(engine: Engine, weights: dict[str, Tensor]) -> bool:
    """Whether some held piece differs in a bit from what its owners hold."""
    for layout in engine.layouts:
        whole = weights[layout.parameter.name]
        for index, piece in enumerate(layout.pieces(engine.rank)):
            held = engine.pieces[layout.parameter.name, index].detach()
            cut = whole if layout.parameter.cut is None else whole.narrow(layout.dim, piece.start, len(piece))
            if not torch.equal(held, cut):
                return True
    return False
