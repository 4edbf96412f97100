"""How long messages and sums take between the ranks that are there, each timed on its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def message_times(
    ranks: tuple[int, int], rank: int, device: torch.device, sizes: Sequence[int], repeats: int
) -> list[list[float]] | None:
    """Seconds of a message of each size in bytes from one rank to the other, `repeats` times; None on the others.

    Half of a round trip, as clocks of two ranks differ. Receives are posted before, and each direction has its own
    communicator on GPUs, as in a run. All ranks have to call it.
    """
    first, second = ranks
    on_gpu = device.type == "cuda"
    there, back = (dist.new_group(list(ranks)) if on_gpu else None for _ in range(2))
    if rank not in ranks:
        return None

    def ask(tensor: Tensor, buffer: Tensor) -> None:
        answer = _posted(buffer, second, back)
        _sent(tensor, second, there)
        answer.wait()

    def give(tensor: Tensor, buffer: Tensor) -> None:
        _posted(buffer, first, there).wait()
        _sent(tensor, first, back)

    found = _timed(ask if rank == first else give, device, sizes, repeats)
    return [[time_s / 2 for time_s in times] for times in found]


def sum_times(device: torch.device, sizes: Sequence[int], repeats: int) -> list[list[float]]:
    """Seconds of a sum over all ranks, for a float32 tensor of each size in bytes, `repeats` times."""

    def add_up(tensor: Tensor, _buffer: Tensor) -> None:
        dist.all_reduce(tensor)

    return _timed(add_up, device, sizes, repeats)


def slowest_at_once(measure: Callable[[], float]) -> float:
    """All ranks measure at the same time: the seconds of the slowest one, on all of them."""
    dist.barrier()
    seconds = torch.tensor([measure()], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _posted(buffer: Tensor, source: int, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.irecv(buffer, source, group=group)
    assert work is not None
    return work


def _sent(tensor: Tensor, target: int, group: dist.ProcessGroup | None) -> None:
    work = dist.isend(tensor, target, group=group)
    assert work is not None
    work.wait()


def _timed(
    call: Callable[[Tensor, Tensor], None], device: torch.device, sizes: Sequence[int], repeats: int
) -> list[list[float]]:
    found = []
    for size in sizes:
        tensor, buffer = (torch.zeros(-(-size // 4), device=device) for _ in range(2))
        times = []
        for _ in range(repeats):
            _wait(device)
            begin = time.perf_counter()
            call(tensor, buffer)
            _wait(device)
            times.append(time.perf_counter() - begin)
        found.append(times)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
