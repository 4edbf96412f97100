"""mode=predict: a sample of text from a language model, or the outputs of any other model in one file.

A data set of text is one of bytes, or offers `decode(tokens) -> str`; its samples hold `tokens`. Works under any plan:
the strategy runs the forward passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from typing_extensions import override

from whale_trainer.data import RankBatch
from whale_trainer.data.datasets import TextWindows
from whale_trainer.strategy import WhaleStrategy
from whale_trainer.trainer.generate import generate

NUM_TOKENS = 256
"""Length of the sample."""


class TextSample(Callback):
    """Writes the beginning of the data set's first sample, and what the model makes of it."""

    def __init__(self, loader: DataLoader[Any], run_dir: Path) -> None:
        dataset: Any = loader.dataset
        self._tokens: Tensor = dataset[0]["tokens"]
        self._decode = _decoder(dataset)
        self._file = run_dir / "sample.txt"
        # the loop needs one batch to run over; the text is made before it
        self.loader: DataLoader[Any] = DataLoader(Subset(dataset, [0]), collate_fn=loader.collate_fn)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, WhaleStrategy)
        context = len(self._tokens)
        prompt = self._tokens[: max(1, context // 2)].tolist()
        tokens = generate(
            lambda window: _forward(strategy, window),
            prompt,
            context=context,
            num_tokens=NUM_TOKENS,
            seed=strategy.seed,
        )
        assert self._decode is not None
        text = self._decode([*prompt, *tokens])
        if trainer.is_global_zero:
            self._file.write_text(text + "\n")
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


class Outputs(Callback):
    """Collects the outputs of all samples, in their order, in `predictions.safetensors`."""

    def __init__(self, loader: DataLoader[Any], run_dir: Path) -> None:
        self.loader = loader
        self._file = run_dir / "predictions.safetensors"
        self._parts: list[Tensor] = []

    @override
    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any, **__: Any
    ) -> None:
        if trainer.is_global_zero and isinstance(outputs, Tensor):
            self._parts.append(outputs.detach().cpu())

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._parts:
            save_file({"outputs": torch.cat(self._parts)}, self._file)
            sys.stdout.write(f"{sum(map(len, self._parts))} outputs in {self._file}\n")


def predictions_for(loader: DataLoader[Any], run_dir: Path) -> TextSample | Outputs:
    """What mode=predict makes of this data set."""
    dataset: Any = loader.dataset
    is_text = _decoder(dataset) is not None and isinstance(dataset[0], dict) and "tokens" in dataset[0]
    return TextSample(loader, run_dir) if is_text else Outputs(loader, run_dir)


def _decoder(dataset: Any) -> Callable[[list[int]], str] | None:
    """From tokens to text; None for data that is no text."""
    if isinstance(dataset, TextWindows):
        return lambda tokens: bytes(tokens).decode("utf-8", errors="replace")
    return getattr(dataset, "decode", None)


def _forward(strategy: WhaleStrategy, window: Tensor) -> Tensor:
    """Scores of one window, on all ranks."""
    rows = strategy.plan.rows_to_read(strategy.global_rank, 1)
    window = window.to(strategy.root_device)
    samples = {"tokens": window, "targets": window} if rows else None
    scores: Tensor = strategy.runner.predict(RankBatch(samples, tuple(rows), 1))  # type: ignore[union-attr]
    return scores
