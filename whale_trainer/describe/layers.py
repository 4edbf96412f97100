"""How a model tells what it is made of: its layers in order, what the first one gets, and its loss.

Plain conventions, so that a user's model imports nothing of ours: `layers()`, `inputs(batch)`, `loss(output, batch)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from whale_trainer.errors import ConfigError, Problem


def can_be_cut(model: nn.Module) -> bool:
    """True for a model that tells its layers; any other is one layer, and can only be replicated."""
    return isinstance(model, nn.Sequential) or callable(getattr(model, "layers", None))


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the layers, in order. Raises `ConfigError` when two have the same name."""
    told: Callable[[], Iterable[tuple[str, nn.Module]]] | None = getattr(model, "layers", None)
    if callable(told):
        layers = list(told())
    elif isinstance(model, nn.Sequential):
        layers = list(model.named_children())
    else:
        return [("model", model)]
    names = [name for name, _ in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not layers:
        found = f"gives {', '.join(twice)} twice" if twice else "gives nothing"
        raise ConfigError(
            [Problem("model", f"layers() of {type(model).__name__} {found}: name each layer once, in order")]
        )
    return layers


def first_inputs(model: nn.Module, batch: Any) -> Any:
    """What the first layer gets: `model.inputs(batch)`, else a tuple's or list's first element, else the batch."""
    inputs: Callable[[Any], Any] | None = getattr(model, "inputs", None)
    if inputs is not None:
        return inputs(batch)
    return batch[0] if isinstance(batch, tuple | list) else batch


def model_loss(model: nn.Module, output: Any, batch: Any) -> tuple[Tensor, Any]:
    """(sum, count) of the model's loss over the samples at hand. Raises `ConfigError` for a model without `loss`."""
    loss: Callable[[Any, Any], tuple[Tensor, Any]] | None = getattr(model, "loss", None)
    if loss is None:
        raise ConfigError(
            [
                Problem(
                    "model",
                    f"{type(model).__name__} has no loss: give it loss(output, batch) -> (sum, count), the sum over "
                    "what counts and how many those are",
                )
            ]
        )
    return loss(output, batch)


def unsynchronised_norms(model: nn.Module) -> list[str]:
    """Names of BatchNorm modules, which see one rank's part of one micro-batch only."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]
