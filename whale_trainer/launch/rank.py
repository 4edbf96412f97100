"""One rank's process: signals, process group, the run itself, and an end that its launcher understands.

A rank ends by itself when its launcher is gone, and within `GRACE_S` of a signal or an error, even while it waits in a
collective, where Python's own signal handlers do not run.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event

import torch
import torch.distributed as dist

from whale_trainer.errors import RankError
from whale_trainer.failure import Failure, describe_failure, failure_text, report_errors_to
from whale_trainer.launch.job import Job, connect_store, place_from
from whale_trainer.launch.signals import GRACE_S, end_soon, end_with_parent, exit_on_signals, interrupt_code
from whale_trainer.rank_info import RankInfo

CONSEQUENCE_WAIT_S = 3.0
"""A rank that only lost a peer waits, so that the process whose end was the cause is found first."""

_SCHEDULER_VARIABLES = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")

_log = logging.getLogger(__name__)


def rank_main(job: Job, all_started: Event) -> None:
    """What torchelastic calls in each process that we start ourselves.

    Nobody talks to the launcher's store before the last process was forked. The store's thread looks up the name of
    each client, and a process forked in that moment would find glibc's resolver locked for ever.
    """
    exit_on_signals()
    end_with_parent()
    os.setpgid(0, 0)  # Ctrl-C reaches the launcher, which passes it on once; the group also holds the loaders' workers
    if int(os.environ["LOCAL_RANK"]) == job.plan.num_ranks - 1:
        all_started.set()
    all_started.wait()
    for name in _SCHEDULER_VARIABLES:  # they tell of the shell that the launcher was started from, not of this rank
        os.environ.pop(name, None)
    store = connect_store(job.timeout)
    store.set(f"pid{os.environ['RANK']}", str(os.getpid()))
    code = run_job(job, store, tells=False)
    if code:
        sys.exit(code)


def run_job(job: Job, store: dist.Store, *, tells: bool) -> int:
    """Run the job's entry as the rank that the environment names; the exit code of this process.

    A failure goes into the store as `failure<rank>`. With `tells`, the first rank to fail writes it to standard error
    too; without, the launcher does that.
    """
    exit_on_signals()
    faulthandler.enable()
    torch.set_num_threads(1)
    info = place_from(os.environ, job)
    reporter = Reporter(job, info.rank, store, tells=tells)
    report_errors_to(reporter)
    try:
        with process_group(job, info, store):
            compare_plans(job, info.rank, store)
            job.entry(job.config, job.plan, job.spec, job.run_dir, info)
    except BaseException as error:
        return reporter.end_of(error)
    finally:
        report_errors_to(None)
    return 0


@contextmanager
def process_group(job: Job, info: RankInfo, store: dist.Store) -> Iterator[None]:
    """The group of all ranks. It is left alone after an error, as its end might wait for ranks that are gone."""
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # all on this machine, whatever its name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    on_gpu = info.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(info.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=job.timeout,
        device_id=info.device if on_gpu else None,
    )
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def compare_plans(job: Job, rank: int, store: dist.Store) -> None:
    """Raise `RankError` when this rank's plan is not that of rank 0."""
    own = job.plan.fingerprint
    if rank == 0:
        store.set("plan", own)
    elif (first := store.get("plan").decode()) != own:
        raise RankError(
            f"rank {rank} planned {own}, rank 0 planned {first}: "
            "the processes were started with different configs or code.\n"
            f"  Start all nodes from one checkout and one config; the plan in use is {job.run_dir}/plan.json."
        )


class Reporter:
    """Puts this rank's first error into the store."""

    def __init__(self, job: Job, rank: int, store: dist.Store, *, tells: bool) -> None:
        self._job = job
        self._rank = rank
        self._store = store
        self._tells = tells
        self.failure: Failure | None = None

    def __call__(self, error: BaseException) -> None:
        if self.failure is not None or interrupt_code(error) is not None:
            return
        end_soon(GRACE_S, 1)
        self.failure = describe_failure(self._rank, error, self._job.run_dir)
        if self.failure.is_consequence:
            _log.debug("rank %d lost a peer: %s", self._rank, self.failure.text)
        is_first = True
        with suppress(RuntimeError):  # the store is gone with its keeper
            self._store.set(f"failure{self._rank}", self.failure.to_json())
            is_first = not self.failure.is_consequence and self._store.add("failures", 1) == 1
        if self._tells and is_first:
            sys.stderr.write(failure_text(self.failure, self._job.device_text(self._rank)))

    def end_of(self, error: BaseException) -> int:
        """The exit code for `error`, once it is told."""
        if (code := interrupt_code(error)) is not None:
            return code
        self(error)
        assert self.failure is not None
        if self.failure.is_consequence and not isinstance(error, SystemExit):  # or else a signal came already
            time.sleep(CONSEQUENCE_WAIT_S)
        return 2 if self.failure.is_refusal else 1
