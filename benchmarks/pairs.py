"""Two jobs measured in turns: both stay alive, one works while the other waits, so that noise hits both alike.

A job is a number of ranks; each runs `body(turns, rank, world_size, port)` in its own process and calls
`turns.step_done()` after every training step. The parent gives the turn to one job for a block of steps, then to the
other.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Body = Callable[["Turns", int, int, int], None]


class StopRunError(Exception):
    """Ends a job's training loop when all pairs are measured."""


class Turns:
    """One rank's side: counts steps, and waits at the end of a block until its job's next turn."""

    def __init__(self, connection: Connection, block: int) -> None:
        self._connection = connection
        self._block = block
        self._steps = 0
        self._wait()

    def _wait(self) -> None:
        if self._connection.recv() == "stop":
            raise StopRunError
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """What is done here belongs to no block."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._wall += time.perf_counter() - wall
        self._cpu += time.process_time() - cpu

    def step_done(self) -> None:
        self._steps += 1
        if self._steps % self._block == 0:
            wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            self._connection.send((wall, cpu))
            self._wait()


@dataclass(frozen=True)
class Ratio:
    """ours / theirs over interleaved pairs: median, and a 95 % interval of it by bootstrap."""

    pairs: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        generator = random.Random(0)
        medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(4000))
        return cls(len(ratios), statistics.median(ratios), medians[100], medians[-101])


@dataclass(frozen=True)
class Measurement:
    """Seconds for a block of steps: wall (of the slowest rank) and CPU (of all ranks), by pair."""

    block: int
    wall: tuple[tuple[float, float], ...]
    cpu: tuple[tuple[float, float], ...]

    def ratio(self, what: str) -> Ratio:
        values = self.wall if what == "wall" else self.cpu
        return Ratio.of([v[0] for v in values], [v[1] for v in values])

    def step_ms(self, job: int) -> float:
        return 1000 * statistics.median(v[job] for v in self.wall) / self.block


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def measure(
    ours: Body, theirs: Body, *, world_size: int, pairs: int, block: int, warm_up_blocks: int = 2
) -> Measurement:
    """Run both jobs in turns. Every second pair begins with the other job."""
    jobs = [(ours, world_size), (theirs, world_size)]
    found = measure_jobs(jobs, pairs=pairs, block=block, warm_up_blocks=warm_up_blocks)
    return Measurement(block, tuple(zip(*found.wall, strict=True)), tuple(zip(*found.cpu, strict=True)))


@dataclass(frozen=True)
class Blocks:
    """Seconds of every block by job: wall (of the slowest rank), CPU (of all ranks)."""

    wall: tuple[tuple[float, ...], ...]
    cpu: tuple[tuple[float, ...], ...]


def measure_jobs(
    bodies: Sequence[tuple[Body, int]],
    *,
    pairs: int,
    block: int,
    warm_up_blocks: int = 6,
    start_method: str = "spawn",
) -> Blocks:
    """Run jobs, each with its number of ranks, in turns. Every second round goes the other way.

    With `fork` ranks share what was imported; the caller must not have done any arithmetic with torch.
    """
    context: Any = multiprocessing.get_context(start_method)
    jobs: list[list[Connection]] = []
    processes = []
    for body, world_size in bodies:
        port = free_port()
        ends = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(body, there, block, rank, world_size, port), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            ends.append(here)
        jobs.append(ends)
    try:
        for _ in range(warm_up_blocks):
            for job in jobs:
                _turn(job)
        wall: list[list[float]] = [[] for _ in jobs]
        cpu: list[list[float]] = [[] for _ in jobs]
        for pair in range(pairs):
            order = range(len(jobs)) if pair % 2 == 0 else reversed(range(len(jobs)))
            for job_index in order:
                wall_s, cpu_s = _turn(jobs[job_index])
                wall[job_index].append(wall_s)
                cpu[job_index].append(cpu_s)
    finally:
        for end in (end for job in jobs for end in job):
            end.send("stop")
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
    return Blocks(tuple(map(tuple, wall)), tuple(map(tuple, cpu)))


def _turn(job: list[Connection]) -> tuple[float, float]:
    for end in job:
        end.send("go")
    times = [end.recv() for end in job]
    return max(t[0] for t in times), sum(t[1] for t in times)


def _rank(body: Body, connection: Connection, block: int, rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="benchmark", GROUP_RANK="0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        body(Turns(connection, block), rank, world_size, port)
    except StopRunError:
        os._exit(0)


def environment() -> dict[str, Any]:
    import pytorch_lightning
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": pytorch_lightning.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def write_json(name: str, rows: Sequence[dict[str, Any]]) -> Path:
    path = Path("outputs") / f"benchmark-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2) + "\n")
    return path


def row(name: str, measurement: Measurement) -> dict[str, Any]:
    """One line of a benchmark's table, as plain data."""
    return {
        "what": name,
        "ours_step_ms": measurement.step_ms(0),
        "theirs_step_ms": measurement.step_ms(1),
        "wall": asdict(measurement.ratio("wall")),
        "cpu": asdict(measurement.ratio("cpu")),
    }
