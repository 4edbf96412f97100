"""Live tensor storage of one process, counted at every operator: a measure that shares nothing with the planner.

It also is the memory of an emulated device: with a limit, the operator that passes it fails.

    with MemoryMeter() as meter:
        ...                     # everything that makes tensors
        meter.restart()
        optimizer_step()
    meter.peak                  # bytes

Each storage counts once, from the operator that makes it until its last reference goes away. What an operator takes and
gives back inside itself is no tensor, and is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whale_trainer.errors import RankError

SNAPSHOT_GROWTH = 1.002
"""A peak that is higher by this factor is looked at anew, storage by storage."""


@dataclass(frozen=True)
class Held:
    """A storage, and what made it: operator, shape and dtype of the first tensor on it."""

    num_bytes: int
    origin: str


class MemoryMeter(TorchDispatchMode):
    """Counts storages while it is entered. Tensors that were made before count once an operator meets them.

    With `limit_bytes`, raises `RankError` where more is alive at once; `device` is whose limit it is, for the message.
    """

    def __init__(self, limit_bytes: int | None = None, device: str = "the device") -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._device = device
        self.live = 0
        self.peak = 0
        self._held: dict[int, Held] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._at_peak: dict[int, Held] = {}
        self._seen = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(tree_leaves((args, kwargs)), "found by")
        self.add(tree_leaves(out), func._overloadpacket.__name__)
        return out

    def add(self, leaves: Iterable[Any], origin: str) -> None:
        """Count the storages of these tensors; anything else among the leaves is passed over."""
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._add(leaf, origin)

    def _add(self, tensor: Tensor, origin: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._held[key] = Held(storage.nbytes(), f"{origin} {tuple(tensor.shape)} {tensor.dtype}")
        self._alive[key] = weakref.ref(storage, lambda _: self._drop(key))
        self.live += storage.nbytes()
        if self.live > self.peak:
            self.peak = self.live
            if self.peak > self._seen * SNAPSHOT_GROWTH:
                self._seen = self.peak
                self._at_peak = dict(self._held)
        if self._limit_bytes is not None and self.live > self._limit_bytes:
            self._refuse()

    def _refuse(self) -> None:
        live, limit = self.live, self._limit_bytes
        self._at_peak, self._limit_bytes = dict(self._held), None
        biggest = "\n  ".join(self.biggest(5))
        raise RankError(
            f"out of memory, as {self._device} would be: {live:,} bytes are needed at once, it has {limit:,}. "
            f"The biggest (bytes, number, what made them):\n  {biggest}\n"
            "Use more micro-batches, a smaller global_batch, or strategy=auto, which plans for the memory"
        )

    def _drop(self, key: int) -> None:
        del self._alive[key]
        self.live -= self._held.pop(key).num_bytes

    def restart(self) -> None:
        """Look for the peak from here on."""
        self.peak, self._seen, self._at_peak = self.live, self.live, dict(self._held)

    def items(self, named: Mapping[str, Iterable[Tensor | None]]) -> dict[str, int]:
        """Bytes at the peak by name; what none of the named tensors holds is `others`."""
        names = {t.untyped_storage()._cdata: name for name, ts in named.items() for t in ts if t is not None}
        found: Counter[str] = Counter(dict.fromkeys((*named, "others"), 0))
        for key, held in self._at_peak.items():
            is_alive = self._held.get(key) is held  # its address may belong to another storage by now
            found[names.get(key, "others") if is_alive else "others"] += held.num_bytes
        return dict(found)

    def biggest(self, count: int = 12) -> list[str]:
        """What made the largest part of the storage at the peak, in words."""
        found: Counter[str] = Counter()
        number: Counter[str] = Counter()
        for held in self._at_peak.values():
            found[held.origin] += held.num_bytes
            number[held.origin] += 1
        return [f"{size:>12,} {number[origin]:>4} x {origin}" for origin, size in found.most_common(count)]


class StepMeter:
    """The peak of a run's first steps; then it lets the rank run unmetered.

    It counts inside steps only: what loads the data between them is in no device's memory.
    """

    WARM_UP, STEPS = 2, 3
    """Steps after which optimizer state and buckets are there; measured ones, of which the least counts, as gloo's
    threads let go of what they summed at a moment of their own."""

    def __init__(self, limit_bytes: int, device: str) -> None:
        self._meter = MemoryMeter(limit_bytes, device)
        self._peaks: list[int] = []
        self._num_begun = 0
        self._is_on = False

    def begin_step(self) -> None:
        """A training step begins: count, unless enough steps were."""
        if self._num_begun < self.WARM_UP + self.STEPS:
            self._num_begun += 1
            self._meter.restart()
            self._meter.__enter__()
            self._is_on = True

    def end_step(self) -> None:
        """The step, with its optimizer, is over."""
        if self._is_on:
            self.stop()
            if self._num_begun > self.WARM_UP:
                self._peaks.append(self._meter.peak)

    def stop(self) -> None:
        """Count no longer, as when the step failed. Does nothing a second time."""
        if self._is_on:
            self._meter.__exit__(None, None, None)
            self._is_on = False

    @property
    def peak(self) -> int:
        """Bytes; of a run that is too short for a measured step, the most there was in its last one."""
        return min(self._peaks, default=self._meter.peak)
