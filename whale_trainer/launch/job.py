"""What all ranks of one run share, and how they reach it and each other: the job, the store, the place of a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.plan import Plan
from whale_trainer.rank_info import RankInfo

Entry = Callable[..., Any]
"""`entry(config, plan, spec, run_dir, rank_info)`: one rank's whole run."""


@dataclass(frozen=True)
class Job:
    """One run, as every rank gets it."""

    config: Any
    plan: Plan
    spec: ModelSpec | None
    run_dir: Path
    entry: Entry
    devices: tuple[str, ...]
    """Torch's name of the device of each rank, such as `cpu` or `cuda:1`."""

    @property
    def timeout(self) -> timedelta:
        """How long a collective may take before its ranks give up."""
        return timedelta(seconds=self.config.timeout_s)

    def device_text(self, rank: int) -> str:
        device = self.plan.devices[rank]
        return f"{device.kind} on {device.node}"


def device_of(job: Job, rank: int, local_rank: int) -> torch.device:
    """The rank's device; on a GPU the index counts within its machine."""
    device = torch.device(job.devices[rank])
    return torch.device("cuda", local_rank) if device.type == "cuda" and device.index is None else device


def place_from(environ: Mapping[str, str], job: Job) -> RankInfo:
    """What torchelastic wrote into the environment of this process."""
    rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    return RankInfo(rank, int(environ["WORLD_SIZE"]), local_rank, device_of(job, rank, local_rank))


def connect_store(timeout: timedelta) -> dist.Store:
    """The store that torchelastic's agent keeps, or that rank 0 keeps where the agent does not share its own."""
    environ = os.environ
    agent_keeps_it = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=environ["RANK"] == "0" and not agent_keeps_it,
        timeout=timeout,
        wait_for_workers=False,
    )
    return own_part(store, environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def own_part(store: dist.Store, restart: str = "0") -> dist.Store:
    """The part of torchelastic's store that holds our keys."""
    return dist.PrefixStore(f"whale{restart}", store)
