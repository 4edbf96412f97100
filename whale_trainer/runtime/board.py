"""Numbers that the ranks of one machine share: each is written by one rank and read by others.

Only emulation needs it: ranks tell each other until when, on the emulated hardware, something takes.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch.distributed as dist


class Board:
    """float64 numbers by place, in memory that all ranks of the machine map. All ranks make it at the same time."""

    def __init__(self, size: int, rank: int, num_ranks: int) -> None:
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        name: list[str | None] = [None]
        if rank == 0:
            handle, name[0] = tempfile.mkstemp(prefix="whale-board-", dir=shared)
            os.ftruncate(handle, size * 8)
            os.close(handle)
        if num_ranks > 1:
            dist.broadcast_object_list(name, src=0)
        path = Path(str(name[0]))
        self._file = path.open("r+b")
        self.numbers = np.memmap(self._file, dtype=np.float64, mode="r+", shape=(size,))
        if num_ranks > 1:
            dist.barrier()
        if rank == 0:
            path.unlink()  # the maps keep it for as long as a rank lives

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other rank is inside such a block at the same time."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
