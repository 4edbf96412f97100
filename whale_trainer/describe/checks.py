"""What a layer must not do, found while it runs on the meta device: draw random numbers, give what no bridge can carry.

A number drawn from torch's generator depends on which rank draws it and what was drawn before, so it would be another
one under every plan; only `nn.Dropout`, whose masks the runtime makes itself, may draw.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from whale_trainer.errors import ConfigError, Problem


class NoDraws(TorchDispatchMode):
    """Raises `ConfigError` at the first draw of the layer called `layer`; runs on the meta device."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self._layer = layer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first kernel imports torch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # attention is tagged as well, but draws nothing itself: its dropout shows as a draw of its own
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.__name__ and not _in_dropout():
            raise ConfigError([Problem(f"model.{self._layer}", self._message(func))])
        return func(*args, **(kwargs or {}))

    def _message(self, func: Callable[..., Any]) -> str:
        drawer = _drawing_module()
        where = f" in {drawer}" if drawer else ""
        return (
            f"draws random numbers in training ({func.__name__}{where}), which would be others under every plan: use "
            "nn.Dropout modules, whose masks do not depend on the plan, or set the probability to 0"
        )


def _modules_on_stack() -> list[nn.Module]:
    """Modules whose `forward` is being run, innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            found.append(module)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _in_dropout() -> bool:
    modules = _modules_on_stack()
    return bool(modules) and type(modules[0]) is nn.Dropout


def _drawing_module() -> str:
    modules = _modules_on_stack()
    return type(modules[0]).__name__ if modules else ""


def check_output(name: str, out: Any) -> None:
    """Raises `ConfigError` unless a bridge can carry what the layer called `name` gives."""
    if isinstance(out, Tensor):
        return
    if isinstance(out, dict) and all(
        isinstance(k, str) and (v is None or isinstance(v, Tensor)) for k, v in out.items()
    ):
        return
    found = (
        f"a dict with {sorted({type(v).__name__ for v in out.values()})}"
        if isinstance(out, dict)
        else type(out).__name__
    )
    raise ConfigError(
        [Problem(f"model.{name}", f"gives {found}: a layer gives a tensor, or a dict of str to tensor or None")]
    )


def check_samples_first(name: str, out: Any, samples: int) -> None:
    """What goes over a bridge is cut by samples, so each tensor has one row for each of them."""
    for key, tensor in out.items() if isinstance(out, dict) else [("", out)]:
        if tensor is not None and (tensor.dim() == 0 or tensor.shape[0] != samples):
            what = f"{key!r} " if key else "a tensor "
            message = (
                f"gives {what}of shape {tuple(tensor.shape)} for {samples} samples: the first dim of what a layer "
                "gives to the next one is the sample"
            )
            raise ConfigError([Problem(f"model.{name}", message)])
