"""When a rank's actions begin and end: as fast as its device runs them, or at the pace of an emulated one.

The executor, the bridges and the gradient sums tell a `Pace` what they do. `OwnPace` writes it down; `EmulatedPace`
(`runtime.emulated`) also holds each action until the declared device would have ended it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch.distributed as dist

from whale_trainer.planning.schedule.actions import Action, Message
from whale_trainer.runtime.trace import OPTIMIZER, SUM, Trace

_Group = TypeVar("_Group", dist.ProcessGroup, None)


class Pace(ABC):
    """What an engine tells of its doing; times are seconds of `time.perf_counter`, which ranks of a machine share."""

    trace: Trace
    sums_wait: bool
    """Gradient sums start after the last action only, whatever the mesh would allow."""

    @abstractmethod
    def begin_step(self) -> None:
        """A training step starts on this rank."""

    @abstractmethod
    def action(self, action: Action, samples: int) -> AbstractContextManager[None]:
        """The block computes an action for that many samples; what it needs is there."""

    @abstractmethod
    def posted(self, message: Message) -> None:
        """A receive is posted; told in the order of its channel."""

    @abstractmethod
    def sent(self, message: Message, num_bytes: int) -> None:
        """A message leaves; told in the order of its channel."""

    @abstractmethod
    def received(self, message: Message) -> None:
        """A message is there, and will be used by the next action."""

    @abstractmethod
    def tensor_group(self, ranks: tuple[int, ...], group: _Group) -> _Group:
        """The group that a split tile's layers meet in."""

    @abstractmethod
    def sum_started(self, bucket: int) -> None:
        """This rank's gradients of a bucket are whole, and their sum starts; numbered as in `gradient_buckets`."""

    @abstractmethod
    def sums_waited(self) -> None:
        """This rank's sums are over; next it meets all others."""

    @abstractmethod
    def met(self) -> None:
        """All ranks have met at the end of their sums."""

    @abstractmethod
    def optimizer_done(self) -> None:
        """The optimizer has stepped."""


class OwnPace(Pace):
    """As fast as the device runs; only writes down."""

    sums_wait = False

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace or Trace()
        self._met_s = 0.0
        self._summing: dict[int, float] = {}
        """When the sums that are under way were started."""

    def begin_step(self) -> None:
        self.trace.begin_step(time.perf_counter())

    @contextmanager
    def action(self, action: Action, samples: int) -> Iterator[None]:
        with self.trace.span(str(action)):
            yield

    def posted(self, message: Message) -> None:
        pass

    def sent(self, message: Message, num_bytes: int) -> None:
        pass

    def received(self, message: Message) -> None:
        pass

    def tensor_group(self, ranks: tuple[int, ...], group: _Group) -> _Group:
        return group

    def sum_started(self, bucket: int) -> None:
        self._summing[bucket] = time.perf_counter()

    def sums_waited(self) -> None:
        now = time.perf_counter()
        for bucket, start in self._summing.items():
            self.trace.add(f"{SUM}{bucket}", start, now)
        self._summing.clear()

    def met(self) -> None:
        self._met_s = time.perf_counter()

    def optimizer_done(self) -> None:
        self.trace.add(OPTIMIZER, self._met_s, time.perf_counter())
