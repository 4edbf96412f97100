"""Callbacks of a run: checkpoints as folders, progress as a bar or as lines, an end that the launcher knows of."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, ProgressBar, RichProgressBar
from typing_extensions import override

from whale_trainer.failure import report
from whale_trainer.run_record import RunRecord

_log = logging.getLogger(__name__)
_LINE_EVERY_S = 5.0


class Checkpoints(ModelCheckpoint):
    """Lightning's ModelCheckpoint with our folders, `checkpoints/step-000020`, and one at the last step of a run.

    `monitor` keeps the best and, beside them, the last; without it `save_top_k` is 1 (the newest), -1 (all) or 0.
    """

    FILE_EXTENSION = ""

    def __init__(
        self,
        run_dir: Path,
        record: RunRecord | None = None,
        *,
        every_n_steps: int | None = None,
        monitor: str | None = None,
        save_top_k: int = 1,
    ) -> None:
        super().__init__(
            dirpath=run_dir / "checkpoints",
            filename="step-{step:06d}",
            auto_insert_metric_name=False,
            enable_version_counter=False,
            every_n_train_steps=every_n_steps or 0,
            every_n_epochs=0,
            monitor=monitor,
            save_top_k=save_top_k,
        )
        self._record = record
        self._last_step_saved = 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before = self._last_global_step_saved
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # not left to on_train_end, where Lightning counts the epoch as done, though the last step may be in its middle
        if trainer.global_step == trainer.estimated_stepping_batches:
            self._save_last(trainer)
        if self._record is not None and self._last_global_step_saved != before:
            self._record.clock.restart()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.global_step:
            self._save_last(trainer)  # a run that was stopped early

    def _save_last(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if self.save_top_k == 0 or step in (self._last_global_step_saved, self._last_step_saved):
            return
        candidates = self._monitor_candidates(trainer)
        if self.monitor is None:
            self._save_topk_checkpoint(trainer, candidates)
        else:
            # out of the competition for the best, which this step may still enter after its validation
            trainer.save_checkpoint(self.format_checkpoint_name(candidates))
        self._last_step_saved = step


class ProgressLines(ProgressBar):
    """Progress where there is no terminal: a line for the first step, one every few seconds, and one for the last."""

    def __init__(self, record: RunRecord) -> None:
        super().__init__()
        self._record = record
        self._last_s = 0.0
        self._is_enabled = True

    @override
    def disable(self) -> None:
        self._is_enabled = False

    @override
    def enable(self) -> None:
        self._is_enabled = True

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_s = 0.0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        num_steps = trainer.estimated_stepping_batches
        if self._is_enabled and (now - self._last_s >= _LINE_EVERY_S or trainer.global_step == num_steps):
            self._last_s = now
            of = "" if num_steps == float("inf") else f"/{int(num_steps)}"
            _log.info("step %d%s  %s", trainer.global_step, of, "  ".join(f"{k} {v}" for k, v in figures(self._record)))

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_enabled and not trainer.sanity_checking and self._record.val_loss is not None:
            _log.info("step %d  validation loss %.4f", trainer.global_step, self._record.val_loss)


class ProgressDisplay(RichProgressBar):
    """Progress in a terminal: loss, samples per second, time left."""

    def __init__(self, record: RunRecord, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=True)
        self._record = record

    @override
    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        return dict(figures(self._record))


def figures(record: RunRecord) -> list[tuple[str, str]]:
    """What a user watches, as (name, text)."""
    found = []
    if record.train_loss is not None:
        found.append(("loss", f"{record.train_loss:.4f}"))
    if record.val_loss is not None:
        found.append(("val", f"{record.val_loss:.4f}"))
    if record.clock.usual_s and record.samples_per_s is not None:
        found.append(("samples/s", f"{record.samples_per_s:,.1f}"))
    if record.time_left_s is not None:
        found.append(("left", _duration(record.time_left_s)))
    return found


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class RankGuard(Callback):
    """Keeps the rank's end in the launcher's hands: its signal handlers stay, and it hears of errors at once.

    Lightning puts a SIGTERM handler of its own before ours. It starts a collective, for which all ranks would have to
    receive the signal at the same step, so the handlers of the time of construction are put back when a loop starts.
    """

    def __init__(self) -> None:
        self._handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back()

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back()

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        report(exception)

    def _put_back(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in self._handlers.items():
                if handler is not None:
                    signal.signal(signum, handler)
