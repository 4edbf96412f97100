"""Number formats of a run: autocast for the forward pass, and the loss scale that float16 needs.

Lightning's own plugins assume equal copies (and turn float16 on CPU into bfloat16 silently); here one verdict on
overflow, from the global gradient norm, holds for all ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")

_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000


class Precision:
    """State of a run's number format: the same on all ranks, since only global values change it."""

    def __init__(self, name: str = "32-true", device_type: str = "cpu") -> None:
        if name not in PRECISIONS:
            raise ValueError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}")
        self.name = name
        self.loss_scale = _INITIAL_SCALE if name == "16-mixed" else 1.0
        self._device_type = device_type
        self._good_steps = 0

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float64 if self.name == "64-true" else torch.float32

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast for mixed precisions. Weight casts are not cached: cut weights are views that change each step."""
        if self.name == "bf16-mixed":
            return torch.autocast(self._device_type, dtype=torch.bfloat16, cache_enabled=False)
        if self.name == "16-mixed":
            return torch.autocast(self._device_type, dtype=torch.float16, cache_enabled=False)
        return nullcontext()

    def update(self, overflow: bool) -> None:
        """Adapt the loss scale after a step: halve it on overflow, double it after 2,000 good steps."""
        if self.name != "16-mixed":
            return
        if overflow:
            self.loss_scale = max(1.0, self.loss_scale / 2)
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == _GROWTH_INTERVAL:
                self.loss_scale *= 2
                self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.loss_scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss_scale = state["loss_scale"]
        self._good_steps = state["good_steps"]
