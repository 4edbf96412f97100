"""A model and data for the tests of `mode=calibrate`: blocks that are slow at first, fail, or end their process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two linear layers that may be cut, and what goes wrong with them."""

    def __init__(self, width: int, sleep_s: float, fails_at: int, dies_at: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self._sleep_s = sleep_s
        self._fails_at = fails_at
        self._dies_at = dies_at

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":  # not where the model is only described
            self._misbehave(len(x))
        return x + self.down(torch.relu(self.up(x)))

    def _misbehave(self, samples: int) -> None:
        time.sleep(self._sleep_s)
        self._sleep_s = 0.0
        if samples == self._fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        if samples == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Chain(nn.Module):
    """`depth` equal blocks over batches `{"x": [B, width]}`. The first call of each block takes `sleep_s` longer."""

    tensor_split = {"blocks.*.up": "column", "blocks.*.down": "row"}  # noqa: RUF012 -- plain data, never changed

    def __init__(
        self, width: int = 64, depth: int = 3, sleep_s: float = 0.0, fails_at: int = 0, dies_at: int = 0
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, sleep_s, fails_at, dies_at) for _ in range(depth))

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}", block

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return output.square().sum(), len(output)


class NoLoss(nn.Sequential):
    """Layers, and nothing to train them for."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64))

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]


class Points:
    """A data set of `{"x": [width]}`; takes what the shipped text takes, so that a command may put it in its place."""

    def __init__(self, width: int = 64, num_rows: int = 8, split: str = "train", context: int = 0) -> None:
        self.x = torch.linspace(-1, 1, num_rows * width).view(num_rows, width)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row]}
