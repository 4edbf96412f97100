"""A warm pool of ranks: `run_ranks(fn, world_size, *args)` calls `fn(rank, world_size, *args)` in processes over gloo.

The processes are started once and stay; each call gets a process group of its own, over a store that worker 0 keeps.
`fn` is a module-level function, named to the workers and imported there. A call costs a few milliseconds. After a hang
or a dead process the pool is thrown away, and the next call starts a new one.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

PRELOAD = ["pytest", "numpy", "torch", "torch.distributed", "whale_trainer.runtime.engine"]
"""Imported once by the server that workers are forked from."""

GRACE_S = 3.0
"""After the first failure: how long the other ranks may take to notice it before the pool is thrown away."""


class RankFailureError(RuntimeError):
    """A rank hung, died, or raised what cannot be sent between processes."""


@dataclass(frozen=True)
class Call:
    """What a worker is asked to do; `payload` is the pickled function and its arguments."""

    index: int
    rank: int
    world_size: int
    timeout_s: float
    filters: Sequence[Any]
    payload: bytes


@dataclass(frozen=True)
class Reply:
    """What a worker gives back: a result, or an exception with its text and the moment at which it was raised."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    raised_at: float = 0.0


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Results of `fn(rank, world_size, *args)` by rank.

    The exception that was raised first, on any rank, is raised again with a note that holds its rank and traceback.
    """
    global _pool
    if _pool is None:
        _pool = Pool()
    try:
        replies = _pool.call(fn, world_size, args, timeout)
    except BaseException:
        close_pool()
        raise
    failed = sorted((r for r in replies if r.error is not None), key=lambda r: r.raised_at)
    if failed:
        if len(replies) < world_size:  # some ranks never noticed; what they hold is unknown
            close_pool()
        raise _with_note(failed[0])
    return [r.result for r in sorted(replies, key=lambda r: r.rank)]


def close_pool() -> None:
    """End the workers; the next call starts new ones."""
    global _pool
    if _pool is not None:
        pool, _pool = _pool, None
        pool.kill()


class Pool:
    """Workers of this session, started when first needed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._port = 0
        self._calls = 0

    @property
    def pids(self) -> list[int]:
        return [w.process.pid for w in self._workers]

    def call(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float) -> list[Reply]:
        """Replies of all ranks, or of those that noticed a failure in time."""
        self._grow(world_size)
        self._calls += 1
        payload = pickle.dumps((fn, args))
        for rank, worker in enumerate(self._workers[:world_size]):
            call = Call(self._calls, rank, world_size, timeout_s, list(warnings.filters), payload)
            worker.connection.send_bytes(pickle.dumps(call))
        return self._collect(fn, world_size, time.monotonic() + timeout_s)

    def _collect(self, fn: Callable[..., Any], world_size: int, deadline: float) -> list[Reply]:
        replies: list[Reply] = []
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers[:world_size])}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and any(r.error is not None for r in replies):
                break
            if not ready:
                raise RankFailureError(self._hang_text(fn, sorted(waiting.values())))
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    reply = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    process = self._workers[rank].process
                    process.join(5)
                    raise RankFailureError(
                        f"rank {rank} of {world_size} died in {fn.__qualname__} (exit code {process.exitcode})"
                    ) from None
                replies.append(reply)
                if reply.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _hang_text(self, fn: Callable[..., Any], ranks: list[int]) -> str:
        test = os.environ.get("PYTEST_CURRENT_TEST", "outside a test").removesuffix(" (call)")
        stacks = [f"rank {rank} is in:\n{self._workers[rank].stack()}" for rank in ranks]
        return "\n".join([f"{test}: ranks {ranks} still run {fn.__qualname__}; the pool was ended", *stacks])

    def _grow(self, size: int) -> None:
        """Start what is missing, all at once; worker 0 comes first, as it holds the store that the others join."""
        if not self._workers:
            first = Worker(self._context, self._folder.name, 0, 0)
            self._port = pickle.loads(first.connection.recv_bytes())
            self._workers.append(first)
        started = [Worker(self._context, self._folder.name, i, self._port) for i in range(len(self._workers), size)]
        for worker in started:
            worker.connection.recv_bytes()
        self._workers.extend(started)

    def kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(10)
            worker.connection.close()
        self._folder.cleanup()


class Worker:
    """Handle on one process, kept by the test session."""

    def __init__(self, context: Any, folder: str, index: int, port: int) -> None:
        self.connection, theirs = context.Pipe()
        self._stack_file = Path(folder, f"{index}.stack")
        self.process = context.Process(target=_work, args=(theirs, port, str(self._stack_file)), daemon=True)
        self.process.start()
        theirs.close()

    def stack(self) -> str:
        """Where the process is now."""
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while not (text := self._stack_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)
        return self._stack_file.read_text() or text


def _work(connection: Connection, port: int, stack_file: str) -> None:
    """Body of a worker: calls until the session goes away."""
    _end_with_parent()
    faulthandler.register(signal.SIGUSR1, file=open(stack_file, "w"))  # noqa: SIM115 (open as long as the process)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's; it ends the workers
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)
    connection.send_bytes(pickle.dumps(store.port))
    while True:
        try:
            call: Call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(_answer(call, store))


def _answer(call: Call, store: Any) -> bytes:
    """Pickled reply of one call, in a process group of its own."""
    try:
        with warnings.catch_warnings():
            warnings.filters[:] = call.filters  # type: ignore[index]
            fn, args = pickle.loads(call.payload)
            _reset_state()
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"call{call.index}", store),
                rank=call.rank,
                world_size=call.world_size,
                timeout=timedelta(seconds=call.timeout_s),
            )
            reply = pickle.dumps(Reply(call.rank, result=fn(call.rank, call.world_size, *args)))
    except BaseException as error:
        reply = _failure(call.rank, error, time.monotonic())
        traceback.clear_frames(error.__traceback__)  # frames may hold groups; peers see a failure when those close
    if dist.is_initialized():
        _leave_group()
    return reply


def _leave_group() -> None:
    """Destroy the groups of a call. Gloo sleeps 10 ms for each peer when it closes, so a thread waits for that."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    held = [group]
    del group
    threading.Thread(target=held.clear).start()


def _failure(rank: int, error: BaseException, raised_at: float) -> bytes:
    trace = "".join(traceback.format_exception(error))
    sent = error.with_traceback(None)
    try:
        data = pickle.dumps(Reply(rank, error=sent, trace=trace, raised_at=raised_at))
        pickle.loads(data)
    except Exception:
        sent = RankFailureError(f"{type(error).__name__}: {error}")
        data = pickle.dumps(Reply(rank, error=sent, trace=trace, raised_at=raised_at))
    return data


def _with_note(reply: Reply) -> BaseException:
    assert reply.error is not None
    reply.error.add_note(f"raised first on rank {reply.rank}:\n{reply.trace}")
    return reply.error


def _reset_state() -> None:
    """What a call before this one may have left behind."""
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def _end_with_parent() -> None:
    """Have the kernel end this process when the fork server, and so the session, is gone."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


_pool: Pool | None = None
atexit.register(close_pool)
