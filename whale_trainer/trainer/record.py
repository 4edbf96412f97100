"""What a run leaves behind: a row of metrics.csv for each step, the same for the loggers, facts for summary.json."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers.logger import DummyLogger
from typing_extensions import override

from whale_trainer.planning.simulation.timeline import Timeline
from whale_trainer.report.summary import Emulation
from whale_trainer.runtime.meter import StepMeter
from whale_trainer.strategy import WhaleStrategy
from whale_trainer.trainer.metrics_file import MetricsFile, Value

WARM_UP_STEPS = 3
"""Steps left out of the speed that a summary tells: they make buffers and connections."""
_WINDOW = 20
MEASURED_STEPS = 3
"""Steps at the end of a run that are drawn beside the predicted one."""


class StepClock:
    """Seconds per training step, without the validations and savings between steps."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self.steps: list[float] = []
        self.recent: deque[float] = deque(maxlen=_WINDOW)

    def restart(self) -> None:
        """Whatever went on until now belongs to no step."""
        self._mark = time.perf_counter()

    def tick(self) -> float:
        """End of a step: the seconds it took."""
        now = time.perf_counter()
        step_s, self._mark = now - self._mark, now
        self.steps.append(step_s)
        self.recent.append(step_s)
        return step_s

    @property
    def usual_s(self) -> float | None:
        """Median of the last steps; None before the first."""
        return statistics.median(self.recent) if self.recent else None

    @property
    def warm(self) -> list[float]:
        """Steps after the warm-up; of a very short run, all but the first, or what there is."""
        return self.steps[WARM_UP_STEPS:] or self.steps[1:] or self.steps


class RunRecord(Callback):
    """Keeps the record of a run; every rank has one, rank 0 writes it.

    Reads `strategy.last_step` (what the plan's last step found) where there is one, and everything that was logged.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        global_batch: int,
        tokens_per_sample: int | None = None,
        meter: StepMeter | None = None,
    ) -> None:
        """`meter` sees the first steps."""
        self.clock = StepClock()
        self.train_loss: float | None = None
        self.val_loss: float | None = None
        self.steps_done = 0
        self.num_samples = 0
        self.samples_per_s: float | None = None
        self.time_left_s: float | None = None
        self.busy_fractions: dict[int, float] = {}
        self.peak_memory_bytes: dict[int, int] = {}
        self.emulation: Emulation | None = None
        self.measured_steps: list[Timeline] = []
        """The last ones, on rank 0, when training is over."""
        self._meter = meter
        self._global_batch = global_batch
        self._tokens_per_sample = tokens_per_sample
        tokens = ["tokens_per_s"] if tokens_per_sample else []
        columns = [
            "step",
            "epoch",
            "train/loss",
            "val/loss",
            "lr",
            "grad_norm",
            "samples_per_s",
            *tokens,
            "time_left_s",
        ]
        self._file = MetricsFile(run_dir / "metrics.csv", columns)
        self._writes = False
        self._lr: float | None = None
        self._num_steps: float = float("inf")
        self._of_training: set[str] = set()
        self._of_validation: set[str] = set()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._writes = trainer.is_global_zero
        self._num_steps = float(trainer.estimated_stepping_batches)
        self.steps_done = trainer.global_step
        if self._writes:
            self._file.start(after_step=trainer.global_step)
        self.clock.restart()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is not None:
            self._meter.begin_step()
        # the schedule moves on before the batch ends, and a row tells the rate that its step was made with
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"])

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is not None:
            self._meter.end_step()
        step_s = self.clock.tick()
        size = getattr(batch, "size", None)
        samples = size if isinstance(size, int) else self._global_batch
        self.num_samples += samples
        self.steps_done = trainer.global_step
        self.samples_per_s = samples / step_s
        left = self._num_steps - trainer.global_step
        usual_s = self.clock.usual_s
        self.time_left_s = left * usual_s if usual_s is not None and left != float("inf") else None
        figures = self._figures(trainer)
        self._log(trainer, figures)
        if self._writes:
            logged = self._logged(trainer, self._of_validation)
            self._of_training |= logged.keys()
            row: dict[str, Value] = {"step": trainer.global_step, "epoch": trainer.current_epoch}
            self._file.write(row | logged | figures)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock.restart()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        logged = self._logged(trainer, self._of_training)
        self._of_validation |= logged.keys()
        self.val_loss = next((logged[k] for k in ("val/loss", "val_loss") if k in logged), self.val_loss)
        if trainer.validating and trainer.state.fn == "validate":
            self._gather(trainer)
        elif self._writes and trainer.global_step:
            self._file.write({"step": trainer.global_step, "epoch": trainer.current_epoch, **logged})
        self.clock.restart()

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._gather(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._gather(trainer)
        if isinstance(trainer.strategy, WhaleStrategy):
            self.emulation = trainer.strategy.gather_emulation()
            self.measured_steps = trainer.strategy.gather_steps(MEASURED_STEPS)

    def speed(self) -> tuple[float | None, float | None]:
        """(samples per second, median seconds per step), both after the warm-up; None before the first step."""
        warm = self.clock.warm
        if not warm:
            return None, None
        per_step = self.num_samples / len(self.clock.steps)
        return per_step * len(warm) / sum(warm), statistics.median(warm)

    def _figures(self, trainer: pl.Trainer) -> dict[str, float | None]:
        found = getattr(trainer.strategy, "last_step", None)
        figures: dict[str, float | None] = {
            "lr": self._lr,
            "samples_per_s": self.samples_per_s,
            "time_left_s": self.time_left_s,
        }
        if found is not None:
            self.train_loss = found.loss
            figures |= {"train/loss": found.loss, "grad_norm": found.grad_norm}
        elif "train/loss" in trainer.callback_metrics:
            self.train_loss = float(trainer.callback_metrics["train/loss"])
        if self._tokens_per_sample and self.samples_per_s is not None:
            figures["tokens_per_s"] = self.samples_per_s * self._tokens_per_sample
        return figures

    def _log(self, trainer: pl.Trainer, figures: dict[str, float | None]) -> None:
        loggers = [logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)]
        every = getattr(trainer, "log_every_n_steps", 1)
        if not loggers or not every or trainer.global_step % every:
            return
        new = {k: v for k, v in figures.items() if v is not None and k not in trainer.callback_metrics}
        for logger in loggers:
            # Lightning counts what it logs at the same moment from 0
            logger.log_metrics(new, step=trainer.global_step - 1)

    @staticmethod
    def _logged(trainer: pl.Trainer, without: set[str]) -> dict[str, float]:
        """What has been logged and is a single number, without the names of the other stage."""
        metrics = {k: v for k, v in trainer.callback_metrics.items() if k not in without}
        return {k: float(v) for k, v in metrics.items() if not isinstance(v, torch.Tensor) or v.numel() == 1}

    def _gather(self, trainer: pl.Trainer) -> None:
        """Each rank's busy fraction and peak memory, on all ranks."""
        device = trainer.strategy.root_device
        busy = getattr(trainer.strategy, "busy_fraction", None)
        figures = torch.zeros(trainer.world_size, 2, dtype=torch.float64, device=device)
        figures[trainer.global_rank, 0] = -1.0 if busy is None else busy
        metered = None if self._meter is None else self._meter.peak
        figures[trainer.global_rank, 1] = float(_peak_memory_bytes(device) if metered is None else metered)
        rows = trainer.strategy.reduce(figures, reduce_op="sum").tolist()
        self.busy_fractions = {rank: row[0] for rank, row in enumerate(rows) if row[0] >= 0}
        self.peak_memory_bytes = {rank: int(row[1]) for rank, row in enumerate(rows)}


def _peak_memory_bytes(device: torch.device) -> int:
    """Most memory used: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
