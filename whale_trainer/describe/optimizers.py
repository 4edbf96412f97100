"""What an optimizer needs beside weights and gradients, found by letting it step over two small parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whale_trainer.describe.meta import without_compiler
from whale_trainer.planning.costs.cost_model import ADAMW, OptimizerBytes

ROWS, COLUMNS = 32, 64
"""Of a small parameter: two dims, as most weights have."""

NamedParameters = Iterator[tuple[str, nn.Parameter]]


@without_compiler()
def optimizer_bytes(
    make_optimizer: Callable[[NamedParameters], Optimizer], *, device_type: str = "cpu"
) -> OptimizerBytes:
    """State and temporaries of the optimizer that `make_optimizer(named_parameters)` gives, on devices of this type.

    Those of AdamW for one that does not step over small float32 parameters, such as one that looks for names.
    """
    large, small = (2 * ROWS, COLUMNS), (ROWS, COLUMNS)
    try:
        with torch.enable_grad():
            two = _steps(make_optimizer, [large, large], device_type)
            three = _steps(make_optimizer, [large, large, large], device_type)
            uneven = _steps(make_optimizer, [small, large], device_type)
    except Exception:  # it is the user's own, and may ask for anything
        return ADAMW
    size = 2 * ROWS * COLUMNS
    of_all = max(0.0, (three.peak - two.peak) / size)
    before = max(0.0, (two.peak - uneven.peak) / (size / 2) - of_all)
    return OptimizerBytes(
        two.of_element, two.of_parameter, of_all, max(0.0, two.peak / size - 2 * of_all - before), before
    )


class _Found(NamedTuple):
    """Bytes."""

    of_element: float
    """State of an element."""
    of_parameter: float
    """State of a parameter besides."""
    peak: float
    """The most that a step makes for a moment."""


def _steps(
    make_optimizer: Callable[[NamedParameters], Optimizer], shapes: Sequence[tuple[int, int]], device_type: str
) -> _Found:
    """Two steps over parameters of these shapes."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = make_optimizer((f"layer.{i}.weight", p) for i, p in enumerate(parameters))
    if device_type == "cuda":
        # what torch chooses by itself there, where the optimizer knows of it
        for group in optimizer.param_groups:
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.01)
        with _Peak() as peak:
            optimizer.step()
    found = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, Tensor)]
    large = sum(t.nbytes for t in found if t.numel() > 1)
    small = sum(t.nbytes for t in found if t.numel() <= 1)
    return _Found(large / sum(p.numel() for p in parameters), small / len(parameters), peak.most)


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
