"""What Lightning asks a strategy for besides its hooks: an environment and a precision plugin that fit a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric.plugins import ClusterEnvironment
from pytorch_lightning.plugins.precision import Precision as LightningPrecision
from pytorch_lightning.utilities import GradClipAlgorithmType
from torch.optim import Optimizer
from typing_extensions import override

if TYPE_CHECKING:
    from whale_trainer.strategy import WhaleStrategy


class PlanEnvironment(ClusterEnvironment):
    """Ranks that were started by our launcher or by torchrun; nodes may hold different numbers of them."""

    def __init__(self, rank: int, world_size: int, local_rank: int) -> None:
        self._rank, self._world_size, self._local_rank = rank, world_size, local_rank

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "localhost"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return self._local_rank

    @override
    def node_rank(self) -> int:
        return 0


class PlanPrecision(LightningPrecision):
    """Clips by the norm of the whole model and skips a step that overflowed, on all ranks alike."""

    def __init__(self, strategy: WhaleStrategy, name: str) -> None:
        self.precision = name  # type: ignore[assignment]
        self._strategy = strategy

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.precision != "16-mixed":
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        state = self._strategy.runner.precision
        overflow = not self._strategy.last_step.is_finite
        state.update(overflow)
        if not overflow:
            self._after_closure(model, optimizer)
            optimizer.step(closure=lambda: result, **kwargs)
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        gradients = self._strategy.runner.sums.gradients()
        if not clip_val or not gradients:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            torch._foreach_clamp_min_(gradients, -clip_val)
            torch._foreach_clamp_max_(gradients, clip_val)
            return
        # the norm counts every parameter of the model once, and is the same number on all ranks
        factor = clip_val / (self._strategy.last_step.grad_norm + 1e-6)
        if factor < 1.0:
            torch._foreach_mul_(gradients, factor)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._strategy.runner.precision.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._strategy.runner.precision.load_state_dict(state_dict)
