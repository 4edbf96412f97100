"""Refusals of what cannot be right under a plan, each by name and with what to use instead."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import WeightAveraging
from torch.optim import Optimizer

from whale_trainer.describe import unsynchronised_norms
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.planning.plan import Plan

ELEMENTWISE_OPTIMIZERS = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
"""Optimizers of torch that treat each element alone, so that a step on shards is the step on the whole."""


def check_trainer(trainer: pl.Trainer) -> None:
    """Raise `ConfigError` for Trainer settings that assume equal copies of the model."""
    problems = []
    if trainer.accumulate_grad_batches != 1:
        problems.append(
            Problem(
                "trainer.accumulate_grad_batches",
                f"{trainer.accumulate_grad_batches}: a plan accumulates over its own micro-batches; raise "
                "strategy.micro_batches (and global_batch) instead",
            )
        )
    problems += [
        Problem(
            "callbacks",
            f"{type(callback).__name__} keeps a second copy of the model, which no plan cuts or saves; leave it out "
            "and average the weights of several checkpoints after the run",
        )
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging)
    ]
    if problems:
        raise ConfigError(problems)


def check_module(module: pl.LightningModule, plan: Plan) -> None:
    """Raise `ConfigError` for modules whose numbers would depend on the plan."""
    problems = []
    if not module.automatic_optimization:
        problems.append(
            Problem(
                "model.automatic_optimization",
                "False: a plan runs forward and backward itself; use automatic optimization (one optimizer)",
            )
        )
    if plan.num_ranks > 1 or plan.micro_batches > 1:
        problems += [
            Problem(
                f"model.{name}",
                "BatchNorm sees one micro-batch of one rank only; use GroupNorm or LayerNorm, or one rank and one "
                "micro-batch (strategy=single strategy.micro_batches=1)",
            )
            for name in unsynchronised_norms(module)
        ]
    if problems:
        raise ConfigError(problems)


def check_optimizers(optimizers: list[Optimizer], plan: Plan) -> None:
    """Raise `ConfigError` for several optimizers, or for one that mixes elements where the plan cuts tensors."""
    if len(optimizers) > 1:
        raise ConfigError(
            [Problem("optimizer", f"{len(optimizers)} optimizers: a plan trains with one; use parameter groups")]
        )
    if all(len(t.shards) == 1 for t in plan.tiles):
        return
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if name not in ELEMENTWISE_OPTIMIZERS:
            raise ConfigError(
                [
                    Problem(
                        "optimizer",
                        f"{name} mixes the elements of a tensor, and this plan cuts tensors (split): use one of "
                        f"{', '.join(sorted(ELEMENTWISE_OPTIMIZERS))}, or a strategy without split",
                    )
                ]
            )
