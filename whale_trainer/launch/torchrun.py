"""Under torchrun the processes exist before there is a plan: rank 0 plans, and shares each job through the store.

The other ranks call `join_torchrun` and never compose a config. Rank 0 ends with `release_torchrun`, with or without
jobs before it, so that nobody waits for one that does not come.
"""

from __future__ import annotations

import os
import pickle
import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from whale_trainer.errors import ConfigError, Problem
from whale_trainer.launch.job import Job, connect_store
from whale_trainer.launch.rank import run_job
from whale_trainer.launch.signals import end_with_parent, exit_on_signals

_CONNECT_TIMEOUT = timedelta(minutes=5)
_POLL_S = 0.1


def torchrun_rank() -> int | None:
    """This process's rank if torchrun started it; None where RANK is unset or left over from something else."""
    environ = os.environ
    return int(environ["RANK"]) if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ else None


def run_shared(job: Job) -> int:
    """Rank 0: hand the job to all ranks and take part in it."""
    _check_world_size(job)
    channel = _channel()
    channel.send(job)
    return run_job(job, channel.store_of_job(), tells=True)


def join_torchrun() -> int:
    """Ranks above 0: take part in the jobs that rank 0 shares, until it ends; the exit code of this process."""
    end_with_parent()
    exit_on_signals()
    channel = _channel()
    while True:
        message = channel.receive()
        if isinstance(message, int):
            return message
        if code := run_job(message, channel.store_of_job(), tells=True):
            return code


def release_torchrun(code: int) -> None:
    """Rank 0: no job comes any more, the other ranks end with `code`. Does nothing where torchrun is not used."""
    if torchrun_rank() == 0:
        _channel().send(code)


def _check_world_size(job: Job) -> None:
    started, planned = int(os.environ["WORLD_SIZE"]), job.plan.num_ranks
    if started != planned:
        message = (
            f"the plan has {planned} ranks, torchrun started {started} processes (WORLD_SIZE); start one for each "
            f"planned device (--nproc-per-node, adding up to {planned} over all nodes), or declare {started} devices"
        )
        raise ConfigError([Problem("cluster", message)])


class _Channel:
    """Messages from rank 0 to all others, in order: jobs, and an exit code as the last."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._num_messages = 0

    def send(self, message: Job | int) -> None:
        self._num_messages += 1
        self._store.set(f"message{self._num_messages}", pickle.dumps(message))  # type: ignore[arg-type]

    def receive(self) -> Any:
        """The next message; waits as long as rank 0 plans. Signals come through while it waits."""
        self._num_messages += 1
        key = f"message{self._num_messages}"
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        return pickle.loads(self._store.get(key))

    def store_of_job(self) -> dist.Store:
        """A part of the store for the job that came last."""
        return dist.PrefixStore(f"job{self._num_messages}", self._store)


@cache
def _channel() -> _Channel:
    return _Channel(connect_store(_CONNECT_TIMEOUT))
