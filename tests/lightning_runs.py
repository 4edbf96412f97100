"""Trainers inside the pool's ranks, for tests of the strategy: small modules, quiet trainers, what they leave."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from whale_trainer import TrainingModule, WhaleStrategy
from whale_trainer.describe import describe
from whale_trainer.planning.plan import Plan

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Tokens(Dataset[dict[str, Tensor]]):
    """`size` samples of random tokens; sample i is always the same."""

    deterministic = True

    def __init__(self, size: int, seed: int = 3, vocab_size: int = 11, context: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(vocab_size, (size, context + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index, :-1], "targets": self.tokens[index, 1:], "id": torch.tensor(index)}


@dataclass(frozen=True)
class Fit:
    """A run of a Trainer under a plan."""

    plan: Plan
    train_size: int = 20
    validation_size: int = 7
    validation_batch: int = 3
    max_epochs: int = 2
    shuffle: bool = True
    precision: str = "64-true"
    lr: float = 1e-2
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


def quiet_trainer(plan: Plan, precision: str = "64-true", **options: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=WhaleStrategy(plan, precision=precision, seed=7),
        accelerator="cpu",
        devices=1,
        **{
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
        },
    )


def loader(size: int, batch_size: int, *, shuffle: bool = False, seed: int = 3) -> DataLoader[Any]:
    return DataLoader(Tokens(size, seed), batch_size=batch_size, shuffle=shuffle)


def with_model(plan: Plan, model: nn.Module) -> Plan:
    return replace(plan, model=describe(model, next(iter(loader(2, 2)))))


def make_module(fit: Fit) -> tuple[Plan, TrainingModule]:
    from runs import gpt

    torch.manual_seed(0)
    model = gpt(**fit.model)
    module = TrainingModule(
        model,
        lambda named: torch.optim.AdamW(named, lr=fit.lr),
        lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=fit.lr, total_steps=steps),
    )
    return with_model(fit.plan, model), module


@dataclass
class Left:
    """What a fit leaves: metrics, weights, rates, ids by step on this rank."""

    metrics: dict[str, float]
    weights: dict[str, Tensor]
    rates: list[float]
    ids: list[list[int]]
    losses: list[float]
    steps: int
    best: str = ""


class Folders(pl.callbacks.ModelCheckpoint):
    FILE_EXTENSION = ""


class Record(pl.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []
        self.ids: list[list[int]] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ids.append([] if batch.samples is None else batch.samples["id"].tolist())
        self.losses.append(trainer.strategy.last_step.loss)


def fit_rank(rank: int, _world_size: int, fit: Fit, folder: str | None = None, ckpt_path: str | None = None) -> Left:
    """Fit on this rank. With `folder`, checkpoints are kept there."""
    plan, module = make_module(fit)
    record = Record()
    callbacks: list[Any] = [record, *fit.trainer.get("callbacks", ())]
    if folder is not None:
        callbacks.append(
            Folders(
                dirpath=Path(folder),
                filename="step-{step:06d}",
                auto_insert_metric_name=False,
                every_n_train_steps=1,
                save_top_k=-1,
            )
        )
    options = {**fit.trainer, "callbacks": callbacks, "enable_checkpointing": folder is not None}
    trainer = quiet_trainer(plan, fit.precision, max_epochs=fit.max_epochs, **options)
    trainer.fit(
        module,
        loader(fit.train_size, plan.global_batch, shuffle=fit.shuffle),
        loader(fit.validation_size, fit.validation_batch, seed=4) if fit.validation_size else None,
        ckpt_path=ckpt_path,
    )
    assert plan.model is not None
    weights = {p.name: trainer.strategy.runner.full_parameter(p.name) for p in plan.model.parameters}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Left(metrics, weights, record.rates, record.ids, record.losses, trainer.global_step)
