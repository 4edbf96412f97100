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
from pytorch_lightning.trainer.states import TrainerFn
from typing_extensions import override

from whale_trainer.failure import report
from whale_trainer.trainer.record import RunRecord

_log = logging.getLogger(__name__)
_LINE_EVERY_S = 5.0


class Checkpoints(ModelCheckpoint):
    """Lightning's ModelCheckpoint with our folders, `checkpoints/step-000020`: base of the newest and of the best."""

    FILE_EXTENSION = ""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        super().__init__(
            dirpath=run_dir / "checkpoints",
            filename="step-{step:06d}",
            auto_insert_metric_name=False,
            enable_version_counter=False,
            **options,
        )

    @property
    @override
    def state_key(self) -> str:
        # without the interval, so that a run may go on with another one
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def keeps(self, path: str) -> bool:
        """Whether this callback counts `path` among those it keeps."""
        return path == self.best_model_path or path in self.best_k_models

    @override
    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        others = (c for c in trainer.checkpoint_callbacks if isinstance(c, Checkpoints) and c is not self)
        kept = any(other.keeps(previous) for other in others)
        return not kept and super()._should_remove_checkpoint(trainer, previous, current)


class NewestCheckpoints(Checkpoints):
    """A checkpoint every n steps, and one at the last step; `save_top_k` 1 keeps the newest, -1 all, 0 makes none."""

    def __init__(
        self, run_dir: Path, record: RunRecord, *, every_n_steps: int | None = None, save_top_k: int = 1
    ) -> None:
        super().__init__(run_dir, every_n_train_steps=every_n_steps or 0, every_n_epochs=0, save_top_k=save_top_k)
        self._record = record

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before = self._last_global_step_saved
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # not left to on_train_end, where Lightning counts the epoch as done, though the last step may be in its middle
        if trainer.global_step == trainer.estimated_stepping_batches:
            self.save_now(trainer)
        if self._last_global_step_saved != before:
            self._record.clock.restart()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self.save_now(trainer)  # a run that was stopped early

    def save_now(self, trainer: pl.Trainer) -> None:
        """Save under the name of this step, unless that is done; all ranks call it, between two steps.

        In the background too it returns before the checkpoint is whole: `strategy.wait_for_checkpoints()` waits.
        """
        if trainer.global_step and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


def save_now(trainer: pl.Trainer) -> Path | None:
    """Save a whole checkpoint of this step and return when it is on the disk; its path, or None before the first step.

    All ranks call it at the same step, after it. What the config keeps of older ones, it keeps. Raises
    `CheckpointError`, the same on all ranks, and the checkpoints of before are then untouched.
    """
    saver = next((c for c in trainer.checkpoint_callbacks if isinstance(c, NewestCheckpoints)), None)
    if saver is None or saver.dirpath is None or not trainer.global_step:
        return None
    path = Path(saver.dirpath) / f"step-{trainer.global_step:06d}"
    saver.save_now(trainer)
    strategy: Any = trainer.strategy
    strategy.wait_for_checkpoints()
    if saver.save_top_k == 0:  # keeps none of its own; one that was asked for is kept all the same
        trainer.save_checkpoint(path)
        strategy.wait_for_checkpoints()
    return path


class BestCheckpoints(Checkpoints):
    """The best by `monitor`, which is looked at after each validation: at a step it would be that of an older one."""

    def __init__(self, run_dir: Path, *, monitor: str, save_top_k: int = 1) -> None:
        super().__init__(
            run_dir, monitor=monitor, save_top_k=save_top_k, every_n_epochs=1, save_on_train_epoch_end=False
        )


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
        in_training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self._is_enabled and in_training and self._record.val_loss is not None:
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
