"""Loaders that no plan can slice: each refused by name, with the numbers and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rank_loaders import Ids, TakingTurns, data_parallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from whale_trainer.data import slice_loader
from whale_trainer.errors import ConfigError

PLAN = data_parallel(12, 8, 4)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class OwnLoader(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter([1, 2, 3])


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from iter(int, 1)


def distributed() -> DistributedSampler[int]:
    return DistributedSampler(Ids(24), num_replicas=2, rank=0)


REFUSED: dict[str, tuple[Any, str, list[str]]] = {
    "batch size": (
        DataLoader(Ids(24), batch_size=8),
        "DataLoader.batch_size",
        ["8 samples", "global batch of 12", "batch_size=12", "global_batch=8"],
    ),
    "own batch sampler's size": (
        DataLoader(Ids(24), batch_sampler=TakingTurns(24, 6)),
        "DataLoader.batch_sampler",
        ["6 samples", "global batch of 12"],
    ),
    "stream": (
        DataLoader(Stream(), batch_size=12),
        "DataLoader.dataset",
        ["Stream is an IterableDataset", "__getitem__ and __len__"],
    ),
    "no batches": (
        DataLoader(Ids(24), batch_size=None),
        "DataLoader.batch_size",
        ["None leaves batches to the dataset", "batch_size=12"],
    ),
    "distributed sampler": (
        DataLoader(Ids(24), batch_size=12, sampler=distributed()),
        "DataLoader.sampler",
        ["DistributedSampler deals the samples out", "use_distributed_sampler=False"],
    ),
    "distributed sampler in a batch sampler": (
        DataLoader(Ids(24), batch_sampler=BatchSampler(distributed(), 12, False)),
        "DataLoader.sampler",
        ["DistributedSampler"],
    ),
    "no length": (
        DataLoader(Ids(24), batch_size=12, sampler=Endless()),
        "DataLoader.sampler",
        ["has no length", "__len__"],
    ),
    "no batch": (
        DataLoader(Ids(5), batch_size=12, drop_last=True),
        "DataLoader.dataset",
        ["5 samples make no batch of 12", "drop_last=False"],
    ),
    "order of the workers": (
        DataLoader(Ids(24), batch_size=12, in_order=False),
        "DataLoader.in_order",
        ["leave it true"],
    ),
    "own iteration": (
        OwnLoader(Ids(24), batch_size=12),
        "DataLoader",
        ["OwnLoader has an __iter__ of its own", "collate function"],
    ),
    "no loader": ([1, 2, 3], "DataLoader", ["list is not a DataLoader", "torch.utils.data.DataLoader"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    loader, path, words = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        slice_loader(loader, PLAN, 0, training=True, seed=0)
    (problem,) = error.value.problems
    assert problem.path == path
    for word in words:
        assert word in problem.message


def test_all_problems_are_told_at_once() -> None:
    loader = OwnLoader(Ids(24), batch_size=8, in_order=False)
    with pytest.raises(ConfigError) as error:
        slice_loader(loader, PLAN, 0, training=True, seed=0)
    assert [p.path for p in error.value.problems] == ["DataLoader", "DataLoader.in_order", "DataLoader.batch_size"]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5},
        {"batch_size": 12, "drop_last": True},
        {"batch_sampler": TakingTurns(24, 6)},
        {"batch_size": 40, "sampler": SequentialSampler(Ids(24))},
    ],
)
def test_validation_may_have_batches_of_any_size(options: dict[str, Any]) -> None:
    loader = DataLoader(Ids(24), **options)
    read = [
        i
        for rank in (0, 1)
        for b in slice_loader(loader, PLAN, rank, training=False, seed=0)
        if b.samples is not None
        for i in b.samples.tolist()
    ]
    assert sorted(read) == list(range(24))
