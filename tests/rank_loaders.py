"""Data sets, plans and loaders of all ranks in one process, for tests of the data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from tilings import plan_of, tile
from torch.utils.data import DataLoader, Dataset, Sampler

from whale_trainer.data import RankBatch, RankLoader, slice_loader
from whale_trainer.planning.plan import Plan


class Ids(Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Draws(Ids):
    """The sample's number and one 32-bit draw from each of the three generators."""

    def __getitem__(self, index: int) -> Any:
        drawn = int(np.random.randint(2**32, dtype=np.uint64)), int(torch.randint(2**32, ())), random.getrandbits(32)
        return index, *drawn


class TakingTurns(Sampler[list[int]]):
    """A user's batch sampler: blocks of `batch_size`, which turn by `set_epoch`."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size, self.epoch = size, batch_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = [(i + self.epoch) % self.size for i in range(self.size)]
        return (order[i : i + self.batch_size] for i in range(0, self.size, self.batch_size))


def data_parallel(global_batch: int, *shares: int, micro_batches: int = 1) -> Plan:
    bounds = [sum(shares[:i]) for i in range(len(shares) + 1)]
    tiles = [tile((0, 2), (bounds[i], bounds[i + 1]), i) for i in range(len(shares))]
    return plan_of(tiles, micro_batches=micro_batches, global_batch=global_batch)


def tensor_parallel(size: int) -> Plan:
    return plan_of([tile((0, 2), (0, size), 0, 1)], micro_batches=1, global_batch=size)


def pipeline(size: int) -> Plan:
    tiles = [tile((0, 1), (0, size), 0), tile((1, 2), (0, size), 1), tile((2, 3), (0, size), 2)]
    return plan_of(tiles, micro_batches=1, global_batch=size)


def loaders(plan: Plan, loader: DataLoader[Any], *, training: bool = True, seed: int = 0) -> list[RankLoader]:
    return [slice_loader(loader, plan, rank, training=training, seed=seed) for rank in range(plan.num_ranks)]


def epochs(ranks: list[RankLoader], count: int = 1) -> list[list[list[RankBatch]]]:
    """[epoch][rank][step]"""
    found = []
    for epoch in range(count):
        for loader in ranks:
            loader.order.set_epoch(epoch)
        found.append([list(loader) for loader in ranks])
    return found


def ids(batches: list[RankBatch]) -> list[list[int]]:
    return [[] if b.samples is None else b.samples.tolist() for b in batches]


def step_sets(ranks: list[list[RankBatch]]) -> list[set[int]]:
    """Ids of each global step, over all ranks."""
    return [set(chain.from_iterable(step)) for step in zip(*map(ids, ranks), strict=True)]
