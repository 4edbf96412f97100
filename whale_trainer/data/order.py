"""The order of an epoch: which samples make each global batch, a function of (seed, epoch) alone.

Every rank lists the whole order from the user's sampler and takes its own part of it elsewhere. Nothing here knows the
plan, and nothing is communicated: `digest` is what ranks, or a checkpoint and a new run, may compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import torch

from whale_trainer.data.draws import kept_generators, seed_for, seed_generators


class EpochOrder:
    """Lists the global batches of a batch sampler, epoch by epoch.

    The sampler runs with the generators of (seed, epoch), its own `generator` included, and has been told the epoch:
    torch's samplers thus give the same order on every rank, and so does a user's that draws from these only.
    """

    def __init__(self, batch_sampler: Any, seed: int) -> None:
        self.epoch = 0
        self._batch_sampler = batch_sampler
        self._seed = seed
        self._listed: tuple[int, list[list[Any]]] | None = None
        self._digest: tuple[int, str] | None = None

    def __len__(self) -> int:
        """Number of global batches of an epoch."""
        return len(self._batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Go to another epoch, and tell the user's samplers that have a `set_epoch`."""
        self.epoch = epoch
        for sampler in self._samplers():
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)

    def batches(self) -> list[list[Any]]:
        """The indices of each global batch of this epoch, in order."""
        if self._listed is None or self._listed[0] != self.epoch:
            key = "order", self._seed, self.epoch
            with kept_generators():
                seed_generators(*key)
                for sampler in self._samplers():
                    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                        generator.manual_seed(seed_for(*key))
                self._listed = self.epoch, [list(batch) for batch in islice(self._batch_sampler, len(self))]
        return self._listed[1]

    def digest(self) -> str:
        """Hash of this epoch's order; ranks or runs with different ones must not go on together."""
        if self._digest is None or self._digest[0] != self.epoch:
            known = hashlib.sha256()
            for batch in self.batches():
                known.update(repr([plain_index(index) for index in batch]).encode())
            self._digest = self.epoch, known.hexdigest()[:16]
        return self._digest[1]

    def _samplers(self) -> Iterator[Any]:
        """The batch sampler and what it is wrapped around, outermost first."""
        sampler, seen = self._batch_sampler, set[int]()
        while sampler is not None and id(sampler) not in seen:
            seen.add(id(sampler))
            yield sampler
            sampler = getattr(sampler, "sampler", None)


def plain_index(index: Any) -> Any:
    """A sample's index without its wrapping: tensors and numpy scalars become Python numbers."""
    return index.tolist() if hasattr(index, "tolist") else index


def has_length(sampler: object) -> bool:
    """True when `sampler` can tell how much it gives in an epoch."""
    if not isinstance(sampler, Sized):
        return False
    try:
        return len(sampler) >= 0
    except TypeError:  # a batch sampler around one that cannot
        return False
