"""Emulated jobs for benchmarks: a config, its plan on a declared cluster, the paces, and the ranks that take turns."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pairs import Body, Turns
from whale_trainer.calibration import PROFILE, calibrate, measure_paces
from whale_trainer.cli import (
    Planned,
    compose_config,
    config_groups,
    example_batch,
    make_plan_of,
    meta_model,
    plain_of,
)
from whale_trainer.config import Config, load_config
from whale_trainer.describe import describe
from whale_trainer.model_spec import ModelSpec
from whale_trainer.overrides import prepare
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.paces import Paces

QUIET = (
    "emulate=true", "logger=none", "trainer.max_steps=100000", "trainer.limit_val_batches=0",
    "trainer.enable_progress_bar=false", "checkpoint.every_n_steps=null", "checkpoint.save_top_k=0",
)  # fmt: skip


@dataclass(frozen=True)
class EmulatedJob:
    """A plan that is ready to run at the pace of its cluster."""

    config: Config
    plan: Plan
    spec: ModelSpec
    folder: Path
    paces: Paces

    @property
    def body(self) -> Body:
        """What each rank runs."""
        return partial(_run_rank, self.config, self.plan, self.spec, self.folder)

    def late_fraction(self) -> float:
        """Of all ranks' actions so far, after the warm-up."""
        counts = self._counts()
        return sum(c["late"] for c in counts) / max(1, sum(c["actions"] for c in counts))

    def overhead_us(self) -> float:
        """Microseconds of the runtime's own work per action."""
        counts = self._counts()
        return 1e6 * sum(c["overhead_s"] for c in counts) / max(1, sum(c["actions"] for c in counts))

    def peak_memory_bytes(self) -> list[int]:
        """Most bytes that each rank held at once in a step."""
        return [int(c["peak_memory_bytes"]) for c in self._counts()]

    def _counts(self) -> list[dict[str, float]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("counts*.json"))]


def _plain(overrides: Sequence[str]) -> dict[str, Any]:
    arguments = prepare([*QUIET, *overrides], config_groups())
    return plain_of(compose_config(arguments), os.getcwd())


def config_of(overrides: Sequence[str], cluster: Mapping[str, Any]) -> Config:
    """The config of a command with these overrides on a cluster that is written out."""
    plain = _plain(overrides)
    return load_config({**plain, "cluster": dict(cluster)})


def profiled(config: Config, folder: Path) -> Config:
    """The config with a profile of its emulated devices, which is measured now."""
    batch = example_batch(config)
    folder.mkdir(parents=True, exist_ok=True)
    found = calibrate(config, describe(meta_model(config), batch), batch, folder)
    if found.profile is None or found.code:
        raise SystemExit(f"calibration ended with {found.code}; see {folder / PROFILE}")
    return config.model_copy(update={"profile": found.profile})


def with_strategy(config: Config, overrides: Sequence[str]) -> Config:
    """The same run under another strategy."""
    changed = load_config({**config.resolved, "strategy": _plain(overrides)["strategy"]})
    return changed.model_copy(update={"profile": config.profile})


def plan_job(config: Config, folder: Path) -> EmulatedJob:
    """Plan, and measure the paces of the plan."""
    planned: Planned = make_plan_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    batch = example_batch(config)
    paces = measure_paces(config, planned.plan, planned.spec, batch, planned.cluster, folder)
    paces.write(folder)
    return EmulatedJob(config, planned.plan, planned.spec, folder, paces)


def _run_rank(
    config: Config, plan: Plan, spec: ModelSpec, folder: Path, turns: Turns, rank: int, world_size: int, port: int
) -> None:
    from dataclasses import replace

    import torch
    import torch.distributed as dist
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers.logger import DummyLogger

    from whale_trainer.rank_info import RankInfo
    from whale_trainer.runtime.meter import StepMeter
    from whale_trainer.strategy import WhaleStrategy
    from whale_trainer.trainer.parts import build_loaders, build_module
    from whale_trainer.trainer.record import RunRecord
    from whale_trainer.trainer.run import build_trainer, quiet

    class TakeTurns(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            strategy = trainer.strategy
            assert isinstance(strategy, WhaleStrategy)
            pace: Any = strategy.pace
            counts = {
                "actions": pace.num_actions,
                "late": pace.num_late,
                "overhead_s": pace.overhead_s,
                "peak_memory_bytes": meter.peak,
            }
            (folder / f"counts{rank}.json").write_text(json.dumps(counts))
            turns.step_done()

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    quiet(rank)
    info = RankInfo(rank, world_size, rank, torch.device("cpu"))
    device = plan.devices[rank]
    meter = StepMeter(device.memory_bytes - device.framework_bytes, device.kind)
    record = RunRecord(folder, global_batch=config.global_batch, meter=meter)
    trainer = build_trainer(config, replace(plan, model=spec), folder, info, logger=DummyLogger(), record=record)
    trainer.callbacks.append(TakeTurns())  # type: ignore[attr-defined]
    module = build_module(config, rank)
    trainer.fit(module, build_loaders(config)["train"])
