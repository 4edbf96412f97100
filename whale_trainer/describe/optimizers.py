"""What an optimizer needs beside weights and gradients, found by letting it step over two small parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whale_trainer.describe.meta import without_compiler
from whale_trainer.planning.costs import ADAMW, OptimizerBytes

SHAPE = (48, 64)
"""Of each small parameter: two dims, as most weights have."""

NamedParameters = Iterator[tuple[str, nn.Parameter]]


@without_compiler()
def optimizer_bytes(
    make_optimizer: Callable[[NamedParameters], Optimizer], *, device_type: str = "cpu"
) -> OptimizerBytes:
    """State and temporaries of the optimizer that `make_optimizer(named_parameters)` gives, on devices of this type.

    Those of AdamW for one that does not step over small float32 parameters, such as one that looks for names.
    """
    try:
        with torch.enable_grad():
            two, three = (_steps(make_optimizer, count, device_type) for count in (2, 3))
    except Exception:  # it is the user's own, and may ask for anything
        return ADAMW
    size = math.prod(SHAPE)
    state, parameter = two[0], two[1]
    of_all = max(0.0, (three[2] - two[2]) / size)
    return OptimizerBytes(state, parameter, of_all, max(0.0, two[2] / size - 2 * of_all))


def _steps(
    make_optimizer: Callable[[NamedParameters], Optimizer], count: int, device_type: str
) -> tuple[float, float, float]:
    """(bytes of state for each element, those of a parameter besides, peak of a step) with `count` parameters."""
    parameters = [nn.Parameter(torch.ones(SHAPE)) for _ in range(count)]
    optimizer = make_optimizer((f"layer.{i}.weight", p) for i, p in enumerate(parameters))
    if device_type == "cuda":
        # what torch chooses by itself there, where the optimizer knows of it
        for group in optimizer.param_groups:
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.full(SHAPE, 0.01)
        with _Peak() as peak:
            optimizer.step()
    found = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, Tensor)]
    large = sum(t.nbytes for t in found if t.numel() > 1)
    small = sum(t.nbytes for t in found if t.numel() <= 1)
    return large / (count * math.prod(SHAPE)), small / count, peak.most


class _Peak(TorchDispatchMode):
    """The most bytes that storages made inside have at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._now = 0
        self._alive: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf, known)
        return out

    def _see(self, tensor: Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in known or key in self._alive:
            return
        self._now += size
        self.most = max(self.most, self._now)
        self._alive[key] = weakref.ref(storage, lambda _: self._drop(key, size))

    def _drop(self, key: int, size: int) -> None:
        del self._alive[key]
        self._now -= size
