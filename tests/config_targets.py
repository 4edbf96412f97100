"""Things that a config may name by `_target_`, right and wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pytorch_lightning.callbacks import Callback
from torch import nn


class NoModule:
    """A class that is neither a module, a data set, an optimizer nor a callback."""

    def __init__(self, size: int = 1) -> None:
        self.size = size


class Net(nn.Module):
    """A model with one argument of each kind that YAML can write."""

    def __init__(
        self,
        width: int,
        rate: float = 0.0,
        name: str = "net",
        gated: bool = False,
        kind: Literal["relu", "gelu"] = "relu",
        sizes: tuple[int, int] = (1, 2),
        options: dict[str, int] | None = None,
        inner: Any = None,
        depths: Sequence[int] = (),
        scale: Annotated[float, "above 0"] = 1.0,
    ) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"width {width} is odd")
        self.linear = nn.Linear(width, width)
        self.inner = inner
        self.options = options


class Anything(nn.Module):
    """Takes every argument."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.kwargs = kwargs


class Watcher(Callback):
    """A callback of a user's."""

    def __init__(self, every: int = 1) -> None:
        self.every = every


class Rows:
    """A map-style data set."""

    def __init__(self, num_rows: int = 8) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((2,), float(row))


class Stream(torch.utils.data.IterableDataset[int]):
    """A data set without positions."""


def make_rows() -> Rows:
    """A function that gives a data set."""
    return Rows()


def stack(samples: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """A collate function."""
    return torch.stack(samples) * scale


def no_optimizer(named_parameters: Any) -> int:
    """Called like an optimizer, and gives a number."""
    return len(list(named_parameters))


def no_schedule(optimizer: Any) -> None:
    """Called like a schedule, and gives nothing."""


def takes_nothing() -> None:
    """Cannot be called with parameters."""


NUMBER = 3
