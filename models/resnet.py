"""ResNet of bottleneck blocks in plain PyTorch (He et al. 2016), the stride in the 3 x 3 convolution.

With blocks (3, 4, 6, 3) it is ResNet50, with (3, 4, 23, 3) ResNet101.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Label of an image that does not count for the loss."""
EXPANSION = 4
"""Channels that a block gives for each one inside it."""


def _convolution(num_inputs: int, num_outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution without bias, whose place the norm behind it takes."""
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(num_outputs)
    )


class Stem(nn.Module):
    """From images [batch, 3, height, width] to `width` channels on a quarter of each side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = _convolution(3, width, 7, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(F.relu(self.convolution(images), inplace=True))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolution, added to what came in."""

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        num_outputs = EXPANSION * width
        self.narrow = _convolution(num_inputs, width, 1)
        self.spatial = _convolution(width, width, 3, stride)
        self.widen = _convolution(width, num_outputs, 1)
        is_same = stride == 1 and num_inputs == num_outputs
        self.shortcut = nn.Identity() if is_same else _convolution(num_inputs, num_outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.narrow(x), inplace=True)
        y = F.relu(self.spatial(y), inplace=True)
        return F.relu(self.widen(y) + self.shortcut(x), inplace=True)


class Head(nn.Module):
    """Mean over the places of an image, and a projection to the classes."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.projection = nn.Linear(num_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x.mean((2, 3)))


class ResNet(nn.Module):
    """Classifier of batches `{"images": [B, 3, H, W], "labels": [B]}`, where a label of -100 is ignored."""

    tensor_split = {"head.projection": "vocab"}  # noqa: RUF012 -- plain data, never changed

    def __init__(self, num_classes: int = 1000, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> None:
        """`blocks` of each width, which doubles from group to group while height and width of the images halve.

        Raises `ValueError` for sizes below 1.
        """
        super().__init__()
        if not blocks or min(num_classes, width, *blocks) < 1:
            raise ValueError(f"num_classes {num_classes}, width {width} and blocks {[*blocks]} must be at least 1")
        self.stem = Stem(width)
        self.blocks = nn.ModuleList()
        num_inputs = width
        for group, count in enumerate(blocks):
            for index in range(count):
                inside = width << group
                self.blocks.append(Bottleneck(num_inputs, inside, stride=2 if group and not index else 1))
                num_inputs = EXPANSION * inside
        self.head = Head(num_inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers in order; each takes what the one before it gives."""
        yield "stem", self.stem
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}", block
        yield "head", self.head

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for _, layer in self.layers():
            x = layer(x)
        return x

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        """What the first layer gets."""
        return batch["images"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the images' cross entropies, in float32 at least, and the number of images that count."""
        labels = batch["labels"]
        logits = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()
