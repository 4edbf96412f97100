"""A rank's loader: its own samples of each global batch, drawn alike in every layout, resumable within an epoch.

The batch sampler asks, a worker reads, seeds and joins, the loader counts what it hands out. No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from whale_trainer.data.draws import kept_generators, seed_for, seed_generators
from whale_trainer.data.order import EpochOrder, plain_index
from whale_trainer.errors import CheckpointError, ConfigError, Problem
from whale_trainer.planning.plan import Plan

_OTHER_ORDER = (
    "the checkpoint was taken after batch {batch} of epoch {epoch}, whose order ({saved}) is not that of this run "
    "({found}): go on with the same data, seed and global_batch; a sampler of your own needs a set_epoch(epoch) on "
    "which alone its order depends; or start from a checkpoint of an epoch's end"
)


class RankBatch(NamedTuple):
    """A rank's part of one global batch."""

    samples: Any
    """The samples as the user's collate function joins them; None where the rank reads none."""
    rows: tuple[int, ...]
    """Their positions in the global batch, ascending."""
    size: int
    """Samples in the global batch."""


class _Request(NamedTuple):
    """What a worker is asked for: the samples of one rank in one global batch."""

    epoch: int
    indices: list[Any]
    rows: tuple[int, ...]
    size: int


class _RankSamples(Dataset[Any]):
    """Reads, seeds and joins the samples of a request; the rest of the batch is never touched."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._is_seeded = getattr(dataset, "deterministic", False) is not True
        """Whether reading a sample may draw random numbers."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: _Request) -> RankBatch:
        if not request.indices:
            return RankBatch(None, (), request.size)
        if not self._is_seeded and self._collate is default_collate:
            samples = self._collate(self._read(request))
        else:
            with kept_generators():
                items = self._read(request)
                # a collate function that draws sees a part of the batch, so its numbers depend on the plan: they are
                # only kept from being the same for all ranks or epochs
                seed_generators("collate", self._seed, request.epoch, plain_index(request.indices[0]))
                samples = self._collate(items)
        return RankBatch(samples, request.rows, request.size)

    def _read(self, request: _Request) -> list[Any]:
        if not self._is_seeded:
            read_many = getattr(self.dataset, "__getitems__", None)
            return read_many(request.indices) if read_many else [self.dataset[i] for i in request.indices]
        items = []
        for index in request.indices:
            seed_generators("sample", self._seed, request.epoch, plain_index(index))
            items.append(self.dataset[index])
        return items


class _RankRequests:
    """The batch sampler of a rank: one request for each global batch, also where the rank reads nothing of it."""

    def __init__(self, order: EpochOrder, plan: Plan, rank: int, *, training: bool) -> None:
        self.sampler = order  # Lightning finds `set_epoch` here
        self.first: tuple[int, int] = (0, 0)
        """(epoch, batch) to begin with; other epochs begin with their first batch."""
        self._plan = plan
        self._rank = rank
        self._training = training
        self._rows: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[_Request]:
        order = self.sampler
        batches = order.batches()
        if self._training:
            _check_sizes(batches, self._plan.global_batch)
        epoch, first = self.first
        self.first = (order.epoch, 0)
        for batch in batches[first if epoch == order.epoch else 0 :]:
            rows = self._rows_of(len(batch))
            yield _Request(order.epoch, [batch[row] for row in rows], rows, len(batch))

    def _rows_of(self, size: int) -> tuple[int, ...]:
        if size not in self._rows:
            self._rows[size] = self._plan.rows_to_read(self._rank, size)
        return self._rows[size]


class RankLoader(DataLoader[Any]):
    """Yields a `RankBatch` for each global batch of an epoch. Its state, the place in the order, is no rank's own."""

    def __init__(self, requests: _RankRequests, dataset: Dataset[Any], **options: Any) -> None:
        super().__init__(dataset, batch_sampler=requests, collate_fn=_as_it_is, **options)  # type: ignore[arg-type]
        self._requests = requests
        self._reached = (0, 0)
        """Epoch and number of its batches that were handed out."""
        self._progress: Callable[[], tuple[int, int]] | None = None

    @property
    def order(self) -> EpochOrder:
        return self._requests.sampler

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def follow(self, progress: Callable[[], tuple[int, int]]) -> None:
        """Ask `progress` where training stands, (epoch, batches of it done), when an epoch begins or a state is taken.

        Without it the epoch is what `set_epoch` was told, the first batch that of a loaded state, and a batch counts
        as done when it is handed out. Lightning (2.6.6) tells an epoch too many after it resumed from the end of one,
        and loads no state where a scheduler asked for `estimated_stepping_batches`; its own counts are right.
        """
        self._progress = progress

    def order_digest(self) -> str:
        """Hash of the order of the epoch, equal on all ranks unless a sampler of the user's draws by itself."""
        return self.order.digest()

    def __iter__(self) -> Iterator[RankBatch]:  # type: ignore[override]
        # a generator, so that nothing is read before the first `next`: Lightning tells the epoch after `iter`
        if self._progress is not None:
            self._requests.first = self._progress()
            self.set_epoch(self._requests.first[0])
        epoch, first = self._requests.first
        self._reached = (self.order.epoch, first if epoch == self.order.epoch else 0)
        for batch in super().__iter__():
            self._reached = (self._reached[0], self._reached[1] + 1)
            yield RankBatch(batch.samples, tuple(batch.rows), batch.size)  # pinning turns the rows into a list

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of its batches that are done, and a hash of its order."""
        epoch, batch = self._reached
        batch = batch if epoch == self.order.epoch else 0
        if self._progress is not None:
            batch = min(batch, self._progress()[1])  # one may be handed out, but not trained on yet
        return {"epoch": self.order.epoch, "batch": batch, "order": self.order_digest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches that are done. Raises `CheckpointError` when the epoch's order is another one."""
        self.set_epoch(state["epoch"])
        self._requests.first = self._reached = (state["epoch"], state["batch"])
        if 0 < state["batch"] < len(self) and state["order"] != self.order_digest():
            raise CheckpointError(
                _OTHER_ORDER.format(
                    batch=state["batch"], epoch=state["epoch"], saved=state["order"], found=self.order_digest()
                )
            )


def make_rank_loader(loader: DataLoader[Any], plan: Plan, rank: int, *, training: bool, seed: int) -> RankLoader:
    """`loader` with its dataset, collate function, workers and order, for the samples of `rank`. Checks nothing."""
    has_samples = bool(plan.rows_to_read(rank, plan.global_batch))
    options: dict[str, Any] = {"pin_memory": loader.pin_memory}
    if has_samples and loader.num_workers:  # a rank between the first and the last layer reads nothing
        options |= {
            "num_workers": loader.num_workers,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    samples = _RankSamples(loader.dataset, loader.collate_fn, seed)
    requests = _RankRequests(EpochOrder(loader.batch_sampler, seed), plan, rank, training=training)
    # what a worker draws outside of samples differs by rank, worker and epoch
    generator = torch.Generator().manual_seed(seed_for("workers", seed, rank))
    return RankLoader(requests, samples, generator=generator, **options)


def _check_sizes(batches: list[list[Any]], global_batch: int) -> None:
    """Raises `ConfigError` unless all batches but the last have `global_batch` samples, and the last no more."""
    for number, batch in enumerate(batches):
        is_short_end = number == len(batches) - 1 and 0 < len(batch) < global_batch
        if len(batch) != global_batch and not is_short_end:
            message = (
                f"batch {number} has {len(batch)} samples, but global_batch is {global_batch}: a training batch is the "
                "global batch of one step, and only the last of an epoch may be smaller"
            )
            raise ConfigError([Problem("DataLoader.batch_sampler", message)])


def _as_it_is(batch: RankBatch) -> RankBatch:
    return batch
