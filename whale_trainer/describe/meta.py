"""Models without memory: built without first weights, which nobody would look at, and run without torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
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


_COMPILER = "torch._dynamo"
_SYMBOLIC_SIZES = "torch.fx.experimental.symbolic_shapes"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keeps torch's compiler and its algebra of symbolic sizes from being imported, which takes three seconds.

    On the meta device many operators run torch's reference code, whose functions ask the compiler, once each, for a
    form of themselves that it leaves alone, and ask of sizes whether they are known. Nothing is compiled here and sizes
    are plain numbers, so each function is as good as that form; when the block ends, all is as before.
    """
    if _COMPILER in sys.modules:
        yield
        return
    compiler = _NoCompiler(_COMPILER)
    stand_ins: dict[str, ModuleType] = {_COMPILER: compiler}
    if _SYMBOLIC_SIZES not in sys.modules:
        stand_ins[_SYMBOLIC_SIZES] = _PlainSizes(_SYMBOLIC_SIZES)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
        for function in compiler.asked:
            vars(function).pop("__dynamo_disable", None)


class _PlainSizes(ModuleType):
    """Answers for sizes that are numbers; for anything else the real module takes its place."""

    @staticmethod
    def expect_true(condition: Any, *_: Any) -> bool:
        return bool(condition)

    guard_or_false = guard_or_true = guard_size_oblivious = statically_known_true = expect_true

    @staticmethod
    def sym_or(*conditions: Any) -> bool:
        return any(conditions)

    @staticmethod
    def sym_and(*conditions: Any) -> bool:
        return all(conditions)

    @staticmethod
    def free_unbacked_symbols(_: Any) -> frozenset[Any]:
        return frozenset()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        sys.modules.pop(_SYMBOLIC_SIZES, None)
        return getattr(import_module(_SYMBOLIC_SIZES), name)


class _NoCompiler(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[Callable[..., Any]] = []

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        self.asked.append(function)
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Optimizers ask for one around each step."""
