"""From a user's DataLoader of global batches to each rank's loader of its own samples of them.

The plan says which rows of a global batch a rank reads; the dataset, the order, the collate function and the workers
are the user's. A global batch is the same samples in every layout, and all ranks have the same number of batches.
What cannot be sliced so is refused here, by name. No communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from whale_trainer.data.order import has_length
from whale_trainer.data.rank_loader import RankLoader, make_rank_loader
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.planning.plan import Plan


def slice_loader(loader: object, plan: Plan, rank: int, *, training: bool, seed: int) -> RankLoader:
    """The loader of `rank`: a `RankBatch` for each global batch of `loader`, with the samples that the plan gives it.

    The order of an epoch and the draws of a sample depend on `seed`, epoch and index only. Raises `ConfigError` with
    all that stands against it: a training batch that is not the plan's global batch, data that cannot be indexed.
    """
    if not isinstance(loader, DataLoader):
        message = f"{_name(loader)} is not a DataLoader: give a torch.utils.data.DataLoader of global batches"
        raise ConfigError([Problem("DataLoader", message)])
    if problems := list(_problems(loader, plan, training)):
        raise ConfigError(problems)
    return make_rank_loader(loader, plan, rank, training=training, seed=seed)


def _problems(loader: DataLoader[Any], plan: Plan, training: bool) -> Iterator[Problem]:
    if type(loader).__iter__ is not DataLoader.__iter__:
        yield Problem(
            "DataLoader",
            f"{_name(loader)} has an __iter__ of its own, which a plan cannot slice: put that work into the dataset "
            "or the collate function of a plain DataLoader",
        )
    if isinstance(loader.dataset, IterableDataset):
        yield Problem(
            "DataLoader.dataset",
            f"{_name(loader.dataset)} is an IterableDataset, which cannot be asked for single samples: give a dataset "
            "with __getitem__ and __len__",
        )
        return
    if not loader.in_order:
        yield Problem("DataLoader.in_order", "false would let the order depend on the workers: leave it true")
    if loader.batch_sampler is None:
        yield Problem(
            "DataLoader.batch_size",
            f"None leaves batches to the dataset, which a plan cannot slice: give batch_size={plan.global_batch} "
            "and a dataset of single samples",
        )
        return
    yield from _order_problems(loader, plan, training)


def _order_problems(loader: DataLoader[Any], plan: Plan, training: bool) -> Iterator[Problem]:
    own, where = loader.batch_sampler, "batch_size" if loader.batch_size is not None else "batch_sampler"
    for sampler in (own, getattr(own, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            yield Problem(
                "DataLoader.sampler",
                f"{_name(sampler)} deals the samples out to ranks, which the plan does itself: give the same sampler "
                "on all ranks (shuffle=True, or none), and Trainer(use_distributed_sampler=False)",
            )
            return
    if not has_length(own):
        yield Problem(
            f"DataLoader.{'sampler' if where == 'batch_size' else where}",
            "has no length, so that ranks and a resumed run could not agree on the batches of an epoch: give it a "
            "__len__",
        )
        return
    size = getattr(own, "batch_size", None)
    if training and isinstance(size, int) and size != plan.global_batch:
        yield Problem(
            f"DataLoader.{where}",
            f"{size} samples, but the plan has a global batch of {plan.global_batch}: a DataLoader's batch is the "
            f"global batch, of which each rank gets its part; give batch_size={plan.global_batch}, or plan with "
            f"global_batch={size}",
        )
    elif training and not len(own):  # type: ignore[arg-type]
        yield Problem(
            "DataLoader.dataset",
            f"{len(loader.dataset)} samples make no batch of {plan.global_batch}: give more data, a smaller "  # type: ignore[arg-type]
            "global_batch, or drop_last=False",
        )


def _name(thing: object) -> str:
    return type(thing).__name__
