"""A stack of two-layer perceptrons in plain PyTorch, for regression and for tests of the column and row cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, num_inputs: int, hidden: int, num_outputs: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(num_inputs, hidden, bias=bias)
        self.down = nn.Linear(hidden, num_outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class MLP(nn.Module):
    """`depth` layers over batches `{"x": [B, num_inputs], "y": [B, num_outputs]}`; the loss is the squared error."""

    tensor_split = {"blocks.*.up": "column", "blocks.*.down": "row"}  # noqa: RUF012 -- plain data, never changed

    def __init__(self, num_inputs: int, hidden: int, num_outputs: int, depth: int = 1, bias: bool = True) -> None:
        """Layers between the first and the last keep `num_outputs` features."""
        super().__init__()
        if depth < 1:
            raise ValueError(f"depth {depth} is below 1: an MLP has at least one layer")
        sizes = (num_inputs, *[num_outputs] * depth)
        self.blocks = nn.ModuleList(Layer(a, hidden, b, bias) for a, b in pairwise(sizes))

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers in order; each takes what the one before it gives."""
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}", block

    def forward(self, x: Tensor) -> Tensor:
        for _, layer in self.layers():
            x = layer(x)
        return x

    def inputs(self, batch: dict[str, Tensor] | tuple[Tensor, ...]) -> Tensor:
        """What the first layer gets."""
        return batch["x"] if isinstance(batch, dict) else batch[0]

    def loss(self, output: Tensor, batch: dict[str, Tensor] | tuple[Tensor, ...]) -> tuple[Tensor, int]:
        """Squared errors, summed over outputs and samples, and the number of samples."""
        target = batch["y"] if isinstance(batch, dict) else batch[1]
        return F.mse_loss(output, target, reduction="sum"), len(target)
