"""From a config and a plan to a Lightning Trainer, and one rank's whole run of it.

`run_rank` is what each process does: build the model under the seed, have the strategy cut it, train, validate, test or
predict, and leave the run's record behind. Nothing here knows Hydra, or how processes are started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from whale_trainer.checkpoint import newest_checkpoint, read_checkpoint
from whale_trainer.config import Config
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.paces import Paces
from whale_trainer.rank_info import RankInfo
from whale_trainer.report.comparison import comparison_lines, comparison_metrics
from whale_trainer.report.measured import write_measured
from whale_trainer.report.summary import FILE as SUMMARY
from whale_trainer.report.summary import make_summary, write_summary
from whale_trainer.runtime.emulated import EmulatedPace
from whale_trainer.runtime.meter import StepMeter
from whale_trainer.runtime.pace import OwnPace, Pace
from whale_trainer.strategy import WhaleStrategy
from whale_trainer.strategy.plugins import PlanEnvironment
from whale_trainer.trainer.callbacks import (
    BestCheckpoints,
    NewestCheckpoints,
    ProgressDisplay,
    ProgressLines,
    RankGuard,
)
from whale_trainer.trainer.loggers import finish_logger, make_logger
from whale_trainer.trainer.parts import build_loaders, build_module, tokens_per_sample
from whale_trainer.trainer.prediction import predictions_for
from whale_trainer.trainer.record import RunRecord

_log = logging.getLogger(__name__)

_NOISE = (
    r".*does not have many workers.*",
    r".*exists and is not empty.*",
    r".*is smaller than the logging interval.*",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    r".*GPU available but not used.*",
    r".*You defined a `validation_step` but have no `val_dataloader`.*",
    r".*callbacks used to create the checkpoint need to be provided.*",
)
"""Warnings of Lightning's that tell our users nothing, since its advice does not fit a plan."""

_NOT_LIGHTNINGS = {"precision", "accelerator", "allow_tf32", "enable_progress_bar"}
"""Settings of the trainer section that the strategy, or this module, takes care of."""


def run_rank(config: Config, plan: Plan, spec: ModelSpec | None, run_dir: Path, info: RankInfo) -> None:
    """Run `config.mode` on this rank, from the making of the model to the summary. Raises what ends the run."""
    plan = replace(plan, model=spec) if plan.model is None else plan
    quiet(info.rank)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.trainer.allow_tf32
    checkpoint = find_checkpoint(config.ckpt_path, run_dir, tells=info.rank == 0)
    module = build_module(config, info.rank)
    loaders = build_loaders(config)
    meter = _meter(config, plan, info.rank)
    record = RunRecord(
        run_dir,
        global_batch=config.global_batch,
        tokens_per_sample=tokens_per_sample(next(iter(loaders.values()))),
        meter=meter,
    )
    facts = {**config.resolved, "plan": plan.to_dict(), "overrides": _overrides(run_dir)}
    logger = make_logger(config.logger.kind, run_dir, rank=info.rank, facts=facts, options=config.logger.options)
    exit_code = 1
    trainer: pl.Trainer | None = None
    try:
        trainer = build_trainer(config, plan, run_dir, info, logger=logger, record=record)
        run_mode(config.mode, trainer, module, loaders, checkpoint, run_dir)
        exit_code = 0
    except SystemExit as interrupt:
        exit_code = interrupt.code if isinstance(interrupt.code, int) else 1
        raise
    finally:
        if meter is not None:
            meter.stop()
        if info.rank == 0:
            # what went wrong must not be hidden by a summary that a full disk does not take
            with contextlib.suppress(OSError) if exit_code else contextlib.nullcontext():
                summary = _summary(config.mode, run_dir, plan, record, trainer, info, exit_code)
                write_summary(run_dir, summary)
                if config.mode == "fit" and not exit_code:
                    _compare(plan, summary, record, logger, run_dir)
        finish_logger(logger, exit_code)


def _meter(config: Config, plan: Plan, rank: int) -> StepMeter | None:
    """The memory of an emulated device; None where the device has its own."""
    if not config.emulate or config.mode != "fit":
        return None
    device = plan.devices[rank]
    return StepMeter(device.memory_bytes - device.framework_bytes, f"a {device.kind}")


def _compare(plan: Plan, summary: Mapping[str, Any], record: RunRecord, logger: Logger, run_dir: Path) -> None:
    """Tell what was predicted and what was measured, here, to the logger, and to the command that draws it."""
    for line in comparison_lines(plan, summary):
        _log.info("%s", line)
    logger.log_metrics(comparison_metrics(summary), step=max(0, record.steps_done - 1))
    if record.measured_steps:
        write_measured(run_dir, record.measured_steps)


def run_mode(
    mode: str,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    loaders: dict[str, DataLoader[Any]],
    checkpoint: Path | None,
    run_dir: Path,
) -> None:
    """Fit, validate, test or predict; weights (and when fitting all the state) come from `checkpoint`."""
    path = None if checkpoint is None else str(checkpoint)
    if mode == "fit":
        trainer.fit(module, loaders["train"], loaders.get("validation"), ckpt_path=path)
    elif mode == "validate":
        _tell(trainer.validate(module, loaders["validation"], ckpt_path=path, verbose=False))
    elif mode == "test":
        _tell(trainer.test(module, loaders["test"], ckpt_path=path, verbose=False))
    else:
        assert mode == "predict"
        callback = predictions_for(loaders["predict"], run_dir)
        trainer.callbacks.append(callback)  # type: ignore[attr-defined]
        trainer.predict(module, callback.loader, ckpt_path=path, return_predictions=False)


def build_trainer(
    config: Config, plan: Plan, run_dir: Path, info: RankInfo, *, logger: Logger, record: RunRecord
) -> pl.Trainer:
    """The Trainer of this rank, with the plan's strategy and the callbacks of the config and of every run."""
    strategy = WhaleStrategy(
        plan,
        pace=pace_of(config, plan, run_dir, info.rank),
        seed=config.seed,
        precision=config.trainer.precision,
        timeout_s=config.timeout_s,
        device=info.device,
        cluster_environment=PlanEnvironment(info.rank, info.world_size, info.local_rank),
        asynchronous_checkpoints=config.checkpoint.asynchronous,
    )
    has_progress = info.rank == 0 and config.trainer.enable_progress_bar
    on_gpu = info.device.type == "cuda"
    settings = config.trainer.model_dump(exclude=_NOT_LIGHTNINGS)
    optional = ("limit_", "val_check_interval")
    return pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if on_gpu else "cpu",
        devices=[info.device.index or 0] if on_gpu else 1,
        logger=[logger],
        callbacks=build_callbacks(config, run_dir, record, has_progress=has_progress),
        default_root_dir=run_dir,
        enable_checkpointing=True,
        enable_model_summary=False,
        enable_progress_bar=has_progress,
        use_distributed_sampler=False,
        **{k: v for k, v in settings.items() if v is not None or not k.startswith(optional)},
    )


def pace_of(config: Config, plan: Plan, run_dir: Path, rank: int) -> Pace:
    """As fast as the device runs, or that of the declared one. Raises `PlanError` where the run folder has no paces."""
    if not config.emulate:
        return OwnPace()
    assert plan.model is not None
    return EmulatedPace(plan, plan.model, Paces.read(run_dir, plan), rank)


def build_callbacks(config: Config, run_dir: Path, record: RunRecord, *, has_progress: bool) -> list[Callback]:
    """Those of every run, then the user's. The record comes first: it writes a step's row before the checkpoint."""
    saving = config.checkpoint
    found: list[Callback] = [record, RankGuard()]
    if has_progress:
        found.append(ProgressDisplay(record) if sys.stdout.isatty() else ProgressLines(record))
    found += [target.build() for target in config.callbacks.values()]
    if saving.monitor is not None:
        found.append(BestCheckpoints(run_dir, monitor=saving.monitor, save_top_k=saving.save_top_k))
    newest = 1 if saving.monitor is not None else saving.save_top_k
    found.append(NewestCheckpoints(run_dir, record, every_n_steps=saving.every_n_steps, save_top_k=newest))
    return found


def find_checkpoint(ckpt_path: str | None, run_dir: Path, *, tells: bool) -> Path | None:
    """The checkpoint to start from: a path, or the newest whole one of the run folder for `last`.

    Raises `CheckpointError` for a path that holds none.
    """
    if ckpt_path is None:
        return None
    if ckpt_path != "last":
        return read_checkpoint(ckpt_path).path.absolute()
    found = newest_checkpoint(run_dir)
    if tells and found is None:
        _log.info("ckpt_path=last: there is no whole checkpoint under %s, so this is a fresh start", run_dir)
    elif tells:
        _log.info("ckpt_path=last: going on from %s", found)
    return found


def quiet(rank: int) -> None:
    """Have this process say what concerns the user: rank 0 the facts of the run, the others their own warnings only."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning reads it from the environment of the process that imported it
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING if rank == 0 else logging.ERROR)
    ours = logging.getLogger("whale_trainer")
    ours.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if not ours.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
        ours.addHandler(handler)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    if rank != 0:
        warnings.filterwarnings("ignore", module=r"pytorch_lightning|lightning_fabric")


def _tell(results: Sequence[Mapping[str, float]]) -> None:
    """One line for each data set: what was found on it."""
    for metrics in results:
        _log.info("  ".join(f"{name} {value:.6g}" for name, value in metrics.items()))


def _overrides(run_dir: Path) -> list[str]:
    """The command line's overrides, as the command wrote them into the run folder."""
    with contextlib.suppress(OSError, yaml.YAMLError):
        found = yaml.safe_load((run_dir / "overrides.yaml").read_text())
        return [str(text) for text in found or ()]
    return []


def _summary(
    mode: str,
    run_dir: Path,
    plan: Plan,
    record: RunRecord,
    trainer: pl.Trainer | None,
    info: RankInfo,
    exit_code: int,
) -> dict[str, Any]:
    former: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        former = json.loads((run_dir / SUMMARY).read_text())
    samples_per_s, step_s = record.speed()
    summary = make_summary(
        plan,
        steps=0 if trainer is None else trainer.global_step,
        train_loss=record.train_loss,
        val_loss=record.val_loss,
        samples_per_s=samples_per_s,
        step_s=step_s,
        search_s=former.get("search_s"),  # known before the ranks were started
        is_comparable=info.device.type == "cuda" or record.emulation is not None,
        busy_fractions=record.busy_fractions,
        peak_memory_bytes=record.peak_memory_bytes,
        emulation=record.emulation,
        exit_code=exit_code,
    )
    if mode == "fit":
        return summary
    # what was trained in this folder before still holds
    return {
        **former,
        **{name: value for name, value in summary.items() if value or name not in former},
        "exit": exit_code,
    }
