from __future__ import annotations
from typing import Any, NamedTuple
import torch
from torch.utils.data import DataLoader, Sampler, SequentialSampler, RandomSampler, BatchSampler


class RankBatch(NamedTuple):
    samples: Any
    rows: tuple
    size: int


class Order(Sampler):
    def __init__(s, n, seed):
        s.n, s.seed, s.epoch = n, seed, 0

    def __len__(s):
        return s.n

    def set_epoch(s, e):
        s.epoch = e

    def __iter__(s):
        return iter(torch.randperm(s.n, generator=torch.Generator().manual_seed(s.seed * 1000 + s.epoch)).tolist())


class Sliced:
    def __init__(s, bs, rows):
        s.bs, s.rows, s.sizes = bs, rows, []

    @property
    def sampler(s):
        return s.bs.sampler

    def __len__(s):
        return len(s.bs)

    def __iter__(s):
        for b in s.bs:
            yield [(len(b),)] + [b[i] for i in s.rows(len(b))]


class DS:
    def __init__(s, d):
        s.d = d

    def __getitem__(s, i):
        return i if isinstance(i, tuple) else s.d[i]

    def __len__(s):
        return len(s.d)


def slice_loader(loader, plan, rank, *, training, seed):
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler):
        sampler = Order(len(loader.dataset), seed)
    bs = Sliced(BatchSampler(sampler, loader.batch_size, loader.drop_last), lambda B: plan.rows_to_read(rank, B))
    col = loader.collate_fn

    def collate(items):
        B = items[0][0]
        rows = plan.rows_to_read(rank, B)
        return RankBatch(col(items[1:]) if rows else None, rows, B)

    return DataLoader(DS(loader.dataset), batch_sampler=bs, collate_fn=collate)
