"""Random numbers that depend on what they are drawn for, not on who draws them.

A sampler's order is seeded by (seed, epoch) and a data set's draws for a sample by (seed, epoch, index), so both are
the same for any plan and any number of workers, and other ones in the next epoch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_for(*key: object) -> int:
    """A 63-bit seed from `key`; keys that differ give seeds that have nothing to do with each other."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(*key: object) -> None:
    """Set the global generators of Python, numpy and torch (CPU) for `key`."""
    seed = seed_for(*key)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    # torch.manual_seed would also reach for the GPUs, which a forked worker must not touch
    torch.default_generator.manual_seed(seed)


@contextmanager
def kept_generators() -> Iterator[None]:
    """After the block the global generators go on as if nothing had been drawn in it."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
