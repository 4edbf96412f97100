"""What each rank reads of the global batches, and in which order; no processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_loaders import Ids, TakingTurns, data_parallel, epochs, ids, loaders, pipeline, step_sets, tensor_parallel
from tilings import plans
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from whale_trainer.data import RankBatch, slice_loader
from whale_trainer.errors import ConfigError
from whale_trainer.planning.plan import Plan

# --- global batches in any layout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 6, 7, 19, 20])
@pytest.mark.parametrize("shuffle", [False, True])
def test_u02_each_sample_once_and_the_same_steps_on_all_ranks(size: int, shuffle: bool) -> None:
    ranks = loaders(data_parallel(6, 4, 2), DataLoader(Ids(size), batch_size=6, shuffle=shuffle))
    for epoch in epochs(ranks, 2):
        read = [i for batches in epoch for step in ids(batches) for i in step]
        assert sorted(read) == list(range(size))
        assert [len(batches) for batches in epoch] == [-(-size // 6)] * 2 == [len(r) for r in ranks]


@pytest.mark.parametrize("size", [6, 7, 19, 20])
def test_u02_drop_last_leaves_whole_batches(size: int) -> None:
    ranks = loaders(data_parallel(6, 4, 2), DataLoader(Ids(size), batch_size=6, shuffle=True, drop_last=True))
    (epoch,) = epochs(ranks)
    read = {i for batches in epoch for step in ids(batches) for i in step}
    assert len(read) == size // 6 * 6
    assert all(b.size == 6 for batches in epoch for b in batches)


@pytest.mark.parametrize("plan", [data_parallel(4, 4), data_parallel(4, 2, 2), data_parallel(4, 3, 1), pipeline(4)])
def test_u03_each_validation_sample_counts_once(plan: Plan) -> None:
    (epoch,) = epochs(loaders(plan, DataLoader(Ids(7), batch_size=4), training=False))
    last = [i for batches in epoch for step in ids(batches) for i in step]
    if plan.num_ranks == 3:  # the first and the last stage read, the one between them does not
        assert [b.samples for b in epoch[1]] == [None, None]
        last = [i for step in ids(epoch[2]) for i in step]
    assert sorted(last) == list(range(7))
    assert {tuple(b.size for b in batches) for batches in epoch} == {(4, 3)}


def test_u07_a_global_batch_is_the_same_in_every_layout() -> None:
    layouts = {
        "one": data_parallel(12, 12),
        "1:1": data_parallel(12, 6, 6),
        "2:1": data_parallel(12, 8, 4),
        "micro": data_parallel(12, 2, 1, micro_batches=4),
        "split": tensor_parallel(12),
        "stages": pipeline(12),
    }
    loader = DataLoader(Ids(48), batch_size=12, shuffle=True)
    found = {name: epochs(loaders(plan, loader))[0] for name, plan in layouts.items()}
    steps = step_sets(found["one"])
    assert [len(s) for s in steps] == [12] * 4
    assert all(step_sets(ranks) == steps for ranks in found.values())
    for name in ("1:1", "2:1", "micro"):
        each = [{i for step in ids(batches) for i in step} for batches in found[name]]
        assert sum(map(len, each)) == 48
    assert ids(found["split"][0]) == ids(found["split"][1])
    assert ids(found["stages"][0]) == ids(found["stages"][2])
    assert {b.rows for b in found["micro"][1]} == {(2, 5, 8, 11)}


def test_u07_an_odd_global_batch_is_shared_whole() -> None:
    (epoch,) = epochs(loaders(data_parallel(13, 7, 6), DataLoader(Ids(26), batch_size=13)))
    assert [[len(b.rows) for b in batches] for batches in epoch] == [[7, 7], [6, 6]]


@settings(max_examples=60, deadline=None)
@given(plan=plans(), size=st.integers(1, 40), shuffle=st.booleans())
def test_any_plan_reads_each_row_where_it_begins_and_ends(plan: Plan, size: int, shuffle: bool) -> None:
    loader = DataLoader(Ids(size), batch_size=plan.global_batch, shuffle=shuffle)
    (epoch,) = epochs(loaders(plan, loader))
    alone = ids(epochs(loaders(data_parallel(plan.global_batch, plan.global_batch), loader))[0][0])
    for step, whole in enumerate(alone):
        batches = [ranks[step] for ranks in epoch]
        assert {b.size for b in batches} == {len(whole)}
        assert {row for b in batches for row in b.rows} == set(range(len(whole)))
        for batch in batches:
            assert ids([batch]) == [[whole[row] for row in batch.rows]]


# --- order -----------------------------------------------------------------------------------------------------------


def samplers(size: int) -> dict[str, dict[str, Any]]:
    """Keyword arguments of DataLoaders with global batches of 6."""
    every = Ids(size)
    generator = torch.Generator().manual_seed(5)
    return {
        "shuffle": {"batch_size": 6, "shuffle": True},
        "own generator": {"batch_size": 6, "sampler": RandomSampler(every, generator=generator)},
        "own batch sampler": {"batch_sampler": TakingTurns(size, 6)},
        "batch sampler around a sampler": {"batch_sampler": BatchSampler(RandomSampler(every), 6, False)},
        "subset": {"batch_size": 6, "sampler": SubsetRandomSampler(range(size))},
    }


@pytest.mark.parametrize("name", samplers(24))
def test_s02_the_order_changes_by_epoch_and_is_that_of_every_layout(name: str) -> None:
    def run(plan: Plan) -> list[list[list[RankBatch]]]:
        # each rank is a process that makes its own samplers
        ranks = [loaders(plan, DataLoader(Ids(24), **samplers(24)[name]))[r] for r in range(plan.num_ranks)]
        return epochs(ranks, 3)

    uneven, alone = run(data_parallel(6, 4, 2)), run(data_parallel(6, 6))
    orders = [[i for step in ids(epoch[0]) for i in step] for epoch in alone]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    for epoch, whole in zip(uneven, alone, strict=True):
        assert [[len(s) for s in ids(batches)] for batches in epoch] == [[4] * 4, [2] * 4]
        assert step_sets(epoch) == step_sets(whole)
    assert ids(run(data_parallel(6, 6))[2][0]) == ids(alone[2][0])


@pytest.mark.parametrize(
    ("sampler", "length"),
    [
        (RandomSampler(Ids(9), replacement=True), 9),
        (RandomSampler(Ids(9), num_samples=21), 21),
        (WeightedRandomSampler([1.0, 2.0, 3.0], num_samples=12), 12),
    ],
)
def test_draws_with_replacement_are_alike_on_all_ranks(sampler: Sampler[int], length: int) -> None:
    ranks = loaders(data_parallel(3, 2, 1), DataLoader(Ids(9), batch_size=3, sampler=sampler))
    torch.manual_seed(1)
    first = epochs(ranks)[0]
    torch.manual_seed(2)
    assert list(map(ids, epochs(ranks)[0])) == list(map(ids, first))
    assert sum(len(s) for batches in first for s in ids(batches)) == length


def test_another_seed_is_another_order() -> None:
    loader = DataLoader(Ids(24), batch_size=6, shuffle=True)
    digests = [slice_loader(loader, data_parallel(6, 6), 0, training=True, seed=s).order_digest() for s in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_a_sampler_that_draws_by_itself_shows_in_the_digest() -> None:
    class Own(SequentialSampler):
        order = random.Random(4)

        def __iter__(self) -> Iterator[int]:
            return iter(self.order.sample(range(24), 24))

    loader = DataLoader(Ids(24), batch_size=6, sampler=Own(Ids(24)))
    assert len({rank.order_digest() for rank in loaders(data_parallel(6, 4, 2), loader)}) == 2


@pytest.mark.parametrize(("sizes", "found"), [([6, 7, 6], "batch 1 has 7"), ([5, 6], "batch 0 has 5")])
def test_a_training_batch_of_another_size_is_refused_when_it_is_met(sizes: list[int], found: str) -> None:
    batches = [list(range(size)) for size in sizes]
    rank = slice_loader(DataLoader(Ids(9), batch_sampler=batches), data_parallel(6, 6), 0, training=True, seed=0)
    with pytest.raises(ConfigError, match=f"(?s)DataLoader.batch_sampler.*{found} samples, but global_batch is 6"):
        next(iter(rank))
    free = slice_loader(DataLoader(Ids(9), batch_sampler=batches), data_parallel(6, 6), 0, training=False, seed=0)
    assert [b.size for b in free] == sizes
