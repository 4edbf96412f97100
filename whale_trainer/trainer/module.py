"""A plain model as a LightningModule: optimizer, schedule and what is logged; the strategy runs the steps.

    module = TrainingModule(GPT(...), make_optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3))
    Trainer(strategy=WhaleStrategy(plan)).fit(module, loader)

Under any other strategy it trains as a usual module does, by `loss(output, batch) -> (sum, count)` of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from whale_trainer.describe import first_inputs, layers_of, model_loss

NamedParameters = Iterator[tuple[str, nn.Parameter]]


class TrainingModule(pl.LightningModule):
    """Trains `model`.

    `make_optimizer(named_parameters)` is called once the plan has cut the model: it sees this rank's part of each
    parameter under its own name. `make_scheduler(optimizer, num_steps)` is stepped once for each optimizer step.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[NamedParameters], Optimizer],
        make_scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._make_optimizer = make_optimizer
        self._make_scheduler = make_scheduler
        self._evaluated = torch.zeros(2, dtype=torch.float64)

    @property
    def plan_model(self) -> nn.Module:
        """The model whose layers a plan cuts."""
        return self.model

    @override
    def forward(self, batch: Any) -> Any:
        """The last layer's output for a batch."""
        x = first_inputs(self.model, batch)
        for _, layer in layers_of(self.model):
            x = layer(x)
        return x

    @override
    def setup(self, stage: str) -> None:
        # the plan has already summed what is logged here over all ranks
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\('(val|test)/loss'")

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        # a rank with nothing to train has an optimizer as well, so that it takes its steps with the others
        placeholder = ("placeholder", nn.Parameter(torch.zeros(0, device=self.device)))
        optimizer = self._make_optimizer(iter(trained or [placeholder]))
        if self._make_scheduler is None:
            return optimizer
        scheduler = self._make_scheduler(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        found = getattr(self.trainer.strategy, "last_step", None)
        if found is not None:
            # logged here and not at the end of the batch, so that every callback sees the value of its own step
            self._log("train/loss", found.loss, on_step=True, on_epoch=False)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss_sum, count = model_loss(self.model, self(batch), batch)
        loss: Tensor = loss_sum / count
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return model_loss(self.model, self(batch), batch)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return model_loss(self.model, self(batch), batch)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)

    @override
    def on_validation_epoch_start(self) -> None:
        self._evaluated.zero_()

    @override
    def on_test_epoch_start(self) -> None:
        self._evaluated.zero_()

    @override
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._add(outputs)

    @override
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._add(outputs)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log("val/loss", self._mean(), on_step=False, on_epoch=True)

    @override
    def on_test_epoch_end(self) -> None:
        self._log("test/loss", self._mean(), on_step=False, on_epoch=True)

    def _add(self, outputs: Any) -> None:
        """Add (loss sum, count) of a batch, which the strategy has summed over all ranks."""
        for index, value in enumerate(outputs):
            self._evaluated[index] += float(value)

    def _mean(self) -> float:
        """Mean over all that was counted, so that a short last batch weighs what it holds."""
        return float(self._evaluated[0] / self._evaluated[1])

    def _log(self, name: str, value: float, *, on_step: bool, on_epoch: bool) -> None:
        # float64, and without a reduction over ranks: the value is the same on all of them
        tensor = torch.tensor(value, dtype=torch.float64)
        self.log(name, tensor, prog_bar=True, on_step=on_step, on_epoch=on_epoch, batch_size=1)
