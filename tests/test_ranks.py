"""The pool of ranks itself: results, failures, hangs, dead processes, cost."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import RankFailureError, run_ranks
from torch import Tensor

pytestmark = pytest.mark.ranks


def place(rank: int, world_size: int) -> tuple[int, int, int, int]:
    return rank, world_size, dist.get_rank(), dist.get_world_size()


def total(rank: int, world_size: int, value: Tensor) -> Tensor:
    value = value * (rank + 1)
    dist.all_reduce(value)
    return value


def pid(rank: int, world_size: int) -> int:
    return os.getpid()


def num_threads(rank: int, world_size: int) -> int:
    return torch.get_num_threads()


def draw(rank: int, world_size: int) -> float:
    torch.set_default_dtype(torch.float64)
    return torch.rand(()).item()


def fail_on(rank: int, world_size: int, failing: int, collective: bool) -> None:
    if rank == failing:
        raise ValueError("probe-17")
    if collective:
        dist.all_reduce(torch.ones(1))


def fail_while_peers_sleep(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("probe-18")
    time.sleep(60)


def fail_oddly(rank: int, world_size: int) -> None:
    class LocalError(Exception):
        """Cannot be pickled: it has no name outside."""

    raise LocalError("probe-19")


def hang(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()


def die(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)
    dist.all_reduce(torch.ones(1))


def warn(rank: int, world_size: int) -> None:
    warnings.warn("probe-20", UserWarning, stacklevel=1)


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def pool_pids() -> Any:
    """Ids of the pool's processes before the test."""
    run_ranks(pid, 2)
    assert ranks._pool is not None
    return ranks._pool.pids


@pytest.mark.parametrize("world_size", [1, 2, 4, 3])
def test_each_rank_knows_its_place(world_size: int) -> None:
    assert run_ranks(place, world_size) == [(r, world_size, r, world_size) for r in range(world_size)]


def test_tensors_go_in_and_come_out() -> None:
    for result in run_ranks(total, 3, torch.tensor([1.0, 2.0])):
        torch.testing.assert_close(result, torch.tensor([6.0, 12.0]), rtol=0, atol=0)


def test_processes_stay_and_run_one_thread() -> None:
    first = run_ranks(pid, 2)
    assert run_ranks(pid, 2) == first
    assert os.getpid() not in first
    assert run_ranks(num_threads, 2) == [1, 1]


def test_a_call_starts_from_the_same_state() -> None:
    assert run_ranks(draw, 2) == run_ranks(draw, 2)


def test_fifty_calls_in_a_few_seconds() -> None:
    run_ranks(place, 4)
    start = time.perf_counter()
    for _ in range(50):
        run_ranks(place, 4)
    assert time.perf_counter() - start < 10  # about 1 s on a quiet machine


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("collective", [False, True])
def test_the_first_exception_is_raised_with_rank_and_traceback(failing: int, collective: bool) -> None:
    with pytest.raises(ValueError, match="probe-17") as caught:
        run_ranks(fail_on, 3, failing, collective)
    (note,) = caught.value.__notes__
    assert note.startswith(f"raised first on rank {failing}:")
    assert 'raise ValueError("probe-17")' in note
    assert len(run_ranks(place, 3)) == 3


def test_peers_that_do_not_notice_a_failure_are_ended(pool_pids: list[int]) -> None:
    start = time.perf_counter()
    with pytest.raises(ValueError, match="probe-18"):
        run_ranks(fail_while_peers_sleep, 2)
    assert time.perf_counter() - start < 15
    assert not any(map(is_running, pool_pids))
    assert len(run_ranks(place, 2)) == 2


def test_an_exception_that_cannot_be_sent_is_told_in_words() -> None:
    with pytest.raises(RankFailureError, match="LocalError: probe-19"):
        run_ranks(fail_oddly, 2)


def test_a_hang_names_the_test_and_the_place_and_ends_the_pool(pool_pids: list[int]) -> None:
    with pytest.raises(RankFailureError) as caught:
        run_ranks(hang, 2, timeout=1.0)
    message = str(caught.value)
    assert "test_a_hang_names_the_test" in message
    assert "ranks [1] still run hang" in message
    assert "test_ranks.py" in message.split("rank 1 is in:")[1]
    assert not any(map(is_running, pool_pids))
    assert len(run_ranks(place, 2)) == 2


@pytest.mark.parametrize(("how", "code"), [("kill", -9), ("exit", 3)])
def test_a_dead_process_is_told_with_its_exit_code(how: str, code: int, pool_pids: list[int]) -> None:
    with pytest.raises(RankFailureError, match=f"rank 1 of 2 died in die .exit code {code}.") as caught:
        run_ranks(die, 2, how)
    assert caught.value.__cause__ is None
    assert not any(map(is_running, pool_pids))
    assert len(run_ranks(place, 2)) == 2


def test_warnings_are_errors_in_the_ranks_too() -> None:
    with pytest.raises(UserWarning, match="probe-20"):
        run_ranks(warn, 2)
