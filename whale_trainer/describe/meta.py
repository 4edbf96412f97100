"""Models without memory: built without first weights, which nobody would look at, and run without torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset(
    {Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_, Tensor.random_, Tensor.log_normal_}
)


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with all tensors on the meta device; first values, which are none there, cost no time."""
    with torch.device("meta"), _NoFirstValues():
        return build()


class _NoFirstValues(TorchFunctionMode):
    # on the meta device a draw goes through torch's reference code, whose compiler takes seconds to import
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keeps torch's compiler from being imported, which takes two seconds.

    On the meta device many operators run torch's reference code, whose functions ask the compiler, once each, for a
    form of themselves that it leaves alone. Nothing is compiled here, so each function is as good as that form; when
    the block ends, all is as before.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = _NoCompiler("torch._dynamo")
    sys.modules["torch._dynamo"] = stand_in
    try:
        yield
    finally:
        if sys.modules.get("torch._dynamo") is stand_in:
            del sys.modules["torch._dynamo"]
        for function in stand_in.asked:
            vars(function).pop("__dynamo_disable", None)


class _NoCompiler(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[Callable[..., Any]] = []

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        self.asked.append(function)
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Optimizers ask for one around each step."""
