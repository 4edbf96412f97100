"""Starts one process per device of the plan on this machine, waits for them, and says why they failed.

torchelastic starts and watches the processes; the store that it and the ranks share lives in this process, so what a
rank told before its end can still be read.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from whale_trainer.errors import ConfigError, Problem
from whale_trainer.failure import Failure, death_text, failure_text, first_failure
from whale_trainer.launch.job import Entry, Job, own_part
from whale_trainer.launch.rank import rank_main
from whale_trainer.launch.signals import interruptible
from whale_trainer.launch.torchrun import run_shared, torchrun_rank
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.plan import Plan

_ADDRESS = "127.0.0.1"

_SRUN_STEPS = 4_000_000_000
"""Step ids from here on are SLURM's own, such as that of an interactive shell."""


def launch(
    config: Any,
    plan: Plan,
    spec: ModelSpec | None,
    run_dir: Path,
    *,
    entry: Entry | None = None,
    devices: Sequence[str] | None = None,
    start_method: str | None = None,
) -> int:
    """Run the plan, one process per rank; 0 done, 1 failed, 2 refused by the ranks, 128 + n ended by signal n.

    Under torchrun the processes are there already, and this rank joins the others. `entry` is what each rank runs
    (`run_rank` of `trainer`); `devices` are torch's names by rank, CPU without.
    """
    if entry is None:
        from whale_trainer.trainer import run_rank  # imported before the fork: ranks share it
    names = tuple(devices or ["cpu"] * plan.num_ranks)
    job = Job(config, plan, spec, Path(run_dir).absolute(), entry or run_rank, names)
    if torchrun_rank() is not None:
        return run_shared(job)
    refuse_copies(os.environ)
    method = start_method or ("spawn" if sys.platform == "darwin" else "fork")
    if method != "fork":
        _check_picklable(job)
    return _run(job, method)


def _run(job: Job, start_method: str) -> int:
    server = _open_store(os.environ.get("MASTER_PORT"))
    store = own_part(server)
    strangers = multiprocessing.active_children()

    all_started = multiprocessing.get_context(start_method).Event()

    def kill_ranks() -> None:
        _kill_groups(job, store)
        for process in multiprocessing.active_children():
            if process not in strangers:
                process.kill()
                process.join()

    with interruptible(kill_ranks), _quiet_torchelastic():
        try:
            elastic_launch(_launch_config(job, server.port, start_method), rank_main)(job, all_started)
        except ChildFailedError as error:
            return _tell(job, store, {rank: f.exitcode for rank, f in error.failures.items()})
        except SignalException as interrupt:
            return 128 + interrupt.sigval
        else:
            return 0
        finally:
            kill_ranks()


def _launch_config(job: Job, port: int, start_method: str) -> LaunchConfig:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for GPUs must not start CUDA before the fork
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.plan.num_ranks,
        run_id="whale",
        rdzv_backend="static",
        rdzv_endpoint=f"{_ADDRESS}:{port}",
        rdzv_configs={"rank": 0},
        local_addr=_ADDRESS,
        max_restarts=0,
        monitor_interval=0.05,
        start_method=start_method,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",  # the others are handled here
    )


def _open_store(wanted: str | None) -> dist.TCPStore:
    """The store of this launch, on the user's MASTER_PORT or on any free port."""
    remedy = "unset MASTER_PORT, and a free port is found, or set it to one that nobody uses"
    if wanted and not (wanted.isdecimal() and int(wanted) < 1 << 16):
        raise ConfigError([Problem("MASTER_PORT", f"{wanted!r} is not a port (0 to 65535); {remedy}")])
    try:
        return dist.TCPStore(_ADDRESS, int(wanted or 0), is_master=True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        text = str(error)
        why = "is in use" if "EADDRINUSE" in text else f"cannot be had ({text.splitlines()[0]})"
        raise ConfigError([Problem("MASTER_PORT", f"port {wanted} {why}; {remedy}")]) from error


def refuse_copies(environ: Mapping[str, str]) -> None:
    """Refuse to be one of several copies that srun started: each would launch all ranks."""
    step, num_tasks = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_STEP_NUM_TASKS", "1")
    if step.isdecimal() and int(step) < _SRUN_STEPS and num_tasks.isdecimal() and int(num_tasks) > 1:
        message = (
            f"srun started this command {num_tasks} times, and each copy would start all ranks; start one copy "
            "(srun --ntasks=1), or one torchrun for each node (srun --ntasks-per-node=1 torchrun ... train.py)"
        )
        raise ConfigError([Problem("SLURM_STEP_NUM_TASKS", message)])


def _check_picklable(job: Job) -> None:
    try:
        pickle.dumps(job)
    except Exception as error:
        message = f"cannot be sent to a spawned process: {error}; define it at the top level of a module"
        raise ConfigError([Problem("config", message)]) from error


def _tell(job: Job, store: dist.Store, exit_codes: Mapping[int, int]) -> int:
    """Write the cause of the job's end to standard error; its exit code."""
    told = {
        rank: Failure.from_json(text) for rank in range(job.plan.num_ranks) if (text := _read(store, "failure", rank))
    }
    cause = first_failure(told.values())
    silent = {rank: code for rank, code in exit_codes.items() if rank not in told}
    if silent and (cause is None or cause.is_consequence or all(code not in (1, 2) for code in silent.values())):
        rank, code = next(iter(silent.items()))
        sys.stderr.write(f"rank {rank} ({job.device_text(rank)}) {death_text(code)}\n")
        return 1
    assert cause is not None
    sys.stderr.write(failure_text(cause, job.device_text(cause.rank)))
    return 2 if cause.is_refusal else 1


def _read(store: dist.Store, name: str, rank: int) -> str:
    key = f"{name}{rank}"
    return store.get(key).decode() if store.check([key]) else ""


def _kill_groups(job: Job, store: dist.Store) -> None:
    """End what is left of the ranks and of the processes that they started."""
    for rank in range(job.plan.num_ranks):
        if pid := _read(store, "pid", rank):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(pid), signal.SIGKILL)


@contextmanager
def _quiet_torchelastic() -> Iterator[None]:
    """Keep torchelastic's own log lines off the screen: what they tell is told once, in our words."""
    logger = logging.getLogger("torch.distributed.elastic")
    spawn = logging.getLogger("torch.multiprocessing.spawn")
    handler, levels = logging.NullHandler(), (logger.propagate, spawn.propagate)
    for each in (logger, spawn):
        each.addHandler(handler)
        each.propagate = False
    try:
        yield
    finally:
        for each, propagate in zip((logger, spawn), levels, strict=True):
            each.removeHandler(handler)
            each.propagate = propagate
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
