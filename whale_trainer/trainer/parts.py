"""What a run is made of, from its config: the module to train, and loaders of global batches."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from whale_trainer.checkpoint import load_weights_from
from whale_trainer.config import Config, Target
from whale_trainer.data.draws import seed_generators
from whale_trainer.trainer.module import TrainingModule


def build_module(config: Config, rank: int) -> pl.LightningModule:
    """The model as its author wrote it, the same on all ranks; a LightningModule stays as it is."""
    seed_generators("model", config.seed)
    torch.manual_seed(config.seed)  # as a script without us would do, so that it starts from the same weights
    model = config.model.build()
    if config.init_from is not None:
        load_weights_from(config.init_from, model)
    seed_generators("rank", config.seed, rank)  # what a model draws while it runs differs by rank
    if isinstance(model, pl.LightningModule):
        return model
    return TrainingModule(model, config.make_optimizer, config.make_scheduler if config.scheduler else None)


def build_loaders(config: Config) -> dict[str, DataLoader[Any]]:
    """Loaders of global batches by use, as the mode needs them; the strategy slices them for its rank."""
    data = config.data
    evaluation_batch = data.validation_batch or config.global_batch
    collate = data.collate.build() if data.collate is not None else None

    def loader(target: Target, batch_size: int, *, training: bool = False) -> DataLoader[Any]:
        return DataLoader(
            target.build(),
            batch_size=batch_size,
            shuffle=training and data.shuffle,
            drop_last=training and data.drop_last,
            num_workers=data.num_workers,
            collate_fn=collate,
        )

    if config.mode != "fit":
        use = "validation" if config.mode == "validate" else config.mode
        return {use: loader(data.of_mode(config.mode), evaluation_batch)}
    loaders = {"train": loader(data.train, config.global_batch, training=True)}
    if data.validation is not None:
        loaders["validation"] = loader(data.validation, evaluation_batch)
    return loaders


def tokens_per_sample(loader: DataLoader[Any]) -> int | None:
    """Tokens of a sample of the loader's data set; None where samples have none."""
    if not len(loader.dataset):  # type: ignore[arg-type]
        return None
    sample = loader.dataset[0]
    tokens = sample.get("tokens") if isinstance(sample, dict) else None
    return int(tokens.numel()) if isinstance(tokens, torch.Tensor) else None
