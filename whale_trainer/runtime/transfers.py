"""How long messages and sums take between the ranks that are there, each timed on its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def message_times(
    ranks: tuple[int, int], rank: int, device: torch.device, sizes: Sequence[int], repeats: int
) -> list[list[float]] | None:
    """Seconds of a message of each size in bytes from one rank to the other, `repeats` times; None on the others.

    Half of a round trip, as clocks of two ranks differ. All ranks of the run have to call it.
    """
    first, second = ranks
    group = dist.new_group(list(ranks)) if device.type == "cuda" else None
    if rank not in ranks:
        return None

    def round_trip(tensor: torch.Tensor) -> None:
        if rank == first:
            dist.send(tensor, second, group=group)
            dist.recv(tensor, second, group=group)
        else:
            dist.recv(tensor, first, group=group)
            dist.send(tensor, first, group=group)

    return [[time_s / 2 for time_s in times] for times in _timed(round_trip, device, sizes, repeats)]


def sum_times(device: torch.device, sizes: Sequence[int], repeats: int) -> list[list[float]]:
    """Seconds of a sum over all ranks, for a float32 tensor of each size in bytes, `repeats` times."""

    def add_up(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    return _timed(add_up, device, sizes, repeats)


def _timed(
    call: Callable[[torch.Tensor], None], device: torch.device, sizes: Sequence[int], repeats: int
) -> list[list[float]]:
    found = []
    for size in sizes:
        tensor = torch.zeros(-(-size // 4), device=device)
        times = []
        for _ in range(repeats):
            _wait(device)
            begin = time.perf_counter()
            call(tensor)
            _wait(device)
            times.append(time.perf_counter() - begin)
        found.append(times)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
