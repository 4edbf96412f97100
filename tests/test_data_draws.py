"""Random numbers of data sets and collate functions, loader workers, and what of a DataLoader is kept."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from rank_loaders import Draws, Ids, data_parallel, epochs, loaders, pipeline
from torch.utils.data import DataLoader

from whale_trainer.data import PydocText, RankBatch, slice_loader
from whale_trainer.planning.plan import Plan

# workers are forked; the loader's parent has no lock that they could miss
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def drawn(plan: Plan, count: int = 2, *, seed: int = 0, **options: Any) -> list[tuple[int, ...]]:
    """(id, draws of numpy, torch and Python) of all samples of `count` epochs, sorted within each epoch."""
    ranks = loaders(plan, DataLoader(Draws(8), batch_size=4, shuffle=True, **options), seed=seed)
    found: list[tuple[int, ...]] = []
    for epoch in epochs(ranks, count):
        columns = [b.samples for batches in epoch for b in batches]
        found += sorted(row for c in columns for row in zip(*(column.tolist() for column in c), strict=True))
    return found


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_s01_draws_differ_by_sample_and_epoch_and_come_again(options: dict[str, Any]) -> None:
    first = drawn(data_parallel(4, 2, 2), **options)
    for kind in (1, 2, 3):
        assert len({row[kind] for row in first}) == 16
    assert drawn(data_parallel(4, 2, 2), **options) == first
    assert not set(drawn(data_parallel(4, 2, 2), seed=1, **options)) & set(first)


def test_draws_depend_on_neither_plan_nor_workers() -> None:
    alone = drawn(data_parallel(4, 4))
    assert drawn(data_parallel(4, 3, 1)) == alone
    assert drawn(data_parallel(4, 1, 1, micro_batches=2), num_workers=1) == alone


def states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_callers_generators_go_on_as_if_nothing_was_drawn(num_workers: int) -> None:
    before = states()
    drawn(data_parallel(4, 4), num_workers=num_workers)
    assert states() == before


def test_a_collate_function_draws_otherwise_on_each_rank_and_epoch() -> None:
    def with_noise(items: list[int]) -> float:
        return float(torch.rand(()))

    ranks = loaders(data_parallel(4, 2, 2), DataLoader(Ids(8), batch_size=4, collate_fn=with_noise))
    found = [b.samples for epoch in epochs(ranks, 2) for batches in epoch for b in batches]
    assert len(set(found)) == 8
    assert [b.samples for epoch in epochs(ranks, 2) for batches in epoch for b in batches] == found


def test_a_deterministic_data_set_is_read_without_seeding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*key: object) -> None:
        raise AssertionError(key)

    loader = DataLoader(PydocText(16), batch_size=4)
    rank = slice_loader(loader, data_parallel(4, 3, 1), 1, training=True, seed=0)
    rank.order.batches()
    monkeypatch.setattr("whale_trainer.data.rank_loader.seed_generators", refuse)
    batch = next(iter(rank))
    assert batch.rows == (3,)
    assert torch.equal(batch.samples["tokens"][0], PydocText(16)[3]["tokens"])


def test_a_data_set_that_reads_many_at_once_is_asked_so() -> None:
    class Table(Ids):
        deterministic = True

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [100 + i for i in indices]

    rank = slice_loader(DataLoader(Table(8), batch_size=4), data_parallel(4, 3, 1), 0, training=True, seed=0)
    assert [b.samples.tolist() for b in rank] == [[100, 101, 102], [104, 105, 106]]


def test_a_rank_reads_its_own_samples_only() -> None:
    class Watched(Ids):
        def __init__(self) -> None:
            super().__init__(8)
            self.read: list[int] = []

        def __getitem__(self, index: int) -> int:
            self.read.append(index)
            return index

    data = Watched()
    for plan, rank, expected in ((data_parallel(4, 3, 1), 1, [3, 7]), (pipeline(4), 1, [])):
        data.read.clear()
        batches = list(slice_loader(DataLoader(data, batch_size=4), plan, rank, training=True, seed=0))
        assert data.read == expected
        assert [b.size for b in batches] == [4, 4]
    assert batches == [RankBatch(None, (), 4)] * 2


def test_the_options_of_the_loader_are_kept() -> None:
    def start(worker: int) -> None:
        pass

    given = {
        "num_workers": 1,
        "timeout": 7,
        "worker_init_fn": start,
        "multiprocessing_context": "fork",
        "prefetch_factor": 3,
        "persistent_workers": True,
    }
    loader = DataLoader(Ids(8), batch_size=4, **given)  # type: ignore[arg-type]
    first, middle, _ = loaders(pipeline(4), loader)
    for name in ("num_workers", "timeout", "worker_init_fn", "prefetch_factor", "persistent_workers", "pin_memory"):
        assert getattr(first, name) == getattr(loader, name), name
    assert first.multiprocessing_context.get_start_method() == "fork"
    assert middle.num_workers == 0  # it reads nothing
