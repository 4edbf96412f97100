"""Running at the pace of declared hardware on the CPU: real arithmetic, real messages, and the declared time for each.

Each rank keeps a clock. An action starts, on that clock, when the rank is free and what it needs has come, and takes
what the declared device would take, stretched by the run's factor; the rank does the arithmetic and then sleeps until
that moment, so what follows, on this rank and on others, sees the pace. An action whose arithmetic ends too late is
counted, and the clock goes on from there. Between actions the clock moves by the processor time that the runtime needs:
waiting for a core is no part of an emulated device, as long as the action still ends in time.

Messages and sums really travel; how long they take is reckoned from the declared links, and told on a board that the
ranks share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from whale_trainer.errors import RankError
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.pieces import gradient_buckets, parameter_layouts
from whale_trainer.planning.plan import Plan
from whale_trainer.planning.schedule.actions import Action, Message
from whale_trainer.planning.simulation.paces import ActionPace, Paces
from whale_trainer.runtime.board import Board
from whale_trainer.runtime.pace import Pace
from whale_trainer.runtime.trace import OPTIMIZER, SEND, SUM, Trace

_RING = 1024
"""Messages of a channel that may be under way."""
WARM_UP_STEPS = 5
"""Steps whose late actions do not count: they make buffers and connections, and the memory is metered."""
_MEETINGS = 4
"""Meetings of a tensor group whose times are kept: nobody is more than one ahead."""


class EmulatedPace(Pace):
    """The pace of one rank. All ranks make theirs at the same time, before their engines."""

    def __init__(self, plan: Plan, spec: ModelSpec, paces: Paces, rank: int, trace: Trace | None = None) -> None:
        self.trace = trace or Trace()
        self.paces = paces
        self.sums_wait = paces.sums_wait[rank]
        self.num_actions = 0
        """Since the warm-up, as the next two."""
        self.num_late = 0
        self.overhead_s = 0.0
        """Processor time between actions."""
        self._rank = rank
        self._stretch = paces.stretch
        self._passes = {a.tile: a for a in paces.actions if a.rank == rank}
        self._links = {(link.source, link.target): link for link in paces.links}
        self._groups = {group.ranks: group for group in paces.tensor_groups}
        self._layout = _Layout(plan, spec, paces)
        self._board = Board(self._layout.size, rank, plan.num_ranks)
        self._sums = [self._layout.sum_of(i) for i in range(len(self._layout.buckets))]
        self._sent: dict[tuple[int, int], int] = {}
        self._posted: dict[tuple[int, int], int] = {}
        self._awaited: dict[Message, int] = {}
        self._met_groups: dict[tuple[int, ...], int] = {}
        self._step = 0
        self._clock = 0.0
        self._arrived = 0.0
        self._idle_cpu_s = time.thread_time()
        """Processor time of this thread when the last action ended."""
        self._segments: list[float] = []
        self._segment_cpu_s = 0.0
        self._is_late = False
        self._met_s = 0.0

    # --- clock -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        # what goes on between steps takes the time that it takes
        self._clock = max(self._clock, time.perf_counter())
        self._idle_cpu_s = time.thread_time()
        self._step += 1
        if self._step == WARM_UP_STEPS + 1:
            self.num_actions = self.num_late = 0
            self.overhead_s = 0.0
        self.trace.begin_step(self._clock)

    @contextmanager
    def action(self, action: Action, samples: int) -> Iterator[None]:
        spent = time.thread_time() - self._idle_cpu_s
        self.overhead_s += spent
        start = max(self._clock + spent, self._arrived)
        self._arrived = 0.0
        self._clock, self._is_late = start, False
        self._segments = self._segments_of(action, samples)
        self._segment_cpu_s = time.thread_time()
        self.trace.current = str(action)
        yield
        self._end_segment()
        self._count()
        self.trace.add(str(action), start, self._clock)
        self.trace.current = ""
        self._segments = []
        self._idle_cpu_s = time.thread_time()

    def _segments_of(self, action: Action, samples: int) -> list[float]:
        """Stretched seconds of the parts of the action that are left, the last one first."""
        pace: ActionPace | None = self._passes.get(action.tile)
        if pace is None or action.op not in pace.passes:
            raise RankError(f"the emulation has no pace for {action} on rank {self._rank}: start the run again")
        factor = self._stretch * samples / pace.samples
        return [seconds * factor for seconds in reversed(pace.passes[action.op])]

    def _end_segment(self) -> None:
        """The arithmetic up to here is done: wait until the device would have done it."""
        if self._segments:
            self._wait_until(self._clock + self._segments.pop())

    def _wait_until(self, moment: float) -> None:
        left = moment - time.perf_counter()
        if left >= 0:
            time.sleep(left)
            self._clock = moment
        else:
            self._is_late = True
            self._clock = moment - left

    def _count(self) -> None:
        self.num_actions += 1
        self.num_late += self._is_late

    # --- messages ----------------------------------------------------------------------------------------------------

    def posted(self, message: Message) -> None:
        channel = message.source_rank, message.target_rank
        self._awaited[message] = self._posted[channel] = self._posted.get(channel, -1) + 1

    def sent(self, message: Message, num_bytes: int) -> None:
        channel = message.source_rank, message.target_rank
        number = self._sent[channel] = self._sent.get(channel, -1) + 1
        link = self._links[channel]
        busy_s = self._stretch * num_bytes / link.bytes_per_s
        numbers = self._board.numbers
        ports = [self._layout.port(name) for name in link.ports]
        with self._board.locked():
            begin = max(self._clock, *(float(numbers[port]) for port in ports))
            for port in ports:
                numbers[port] = begin + busy_s
        arrival = begin + busy_s + self._stretch * link.latency_s
        numbers[self._layout.message(channel, number)] = arrival
        self.trace.add(f"{SEND} {message.producer} to rank {message.target_rank}", begin, arrival)

    def received(self, message: Message) -> None:
        channel = message.source_rank, message.target_rank
        place = self._layout.message(channel, self._awaited.pop(message))
        self._arrived = max(self._arrived, float(self._board.numbers[place]))

    # --- tensor groups -----------------------------------------------------------------------------------------------

    def tensor_group(self, ranks: tuple[int, ...], group: Any) -> Any:
        return PacedGroup(group, lambda num_bytes, meet: self._meet(ranks, num_bytes, meet))

    def _meet(self, ranks: tuple[int, ...], num_bytes: int, meet: Callable[[], None]) -> None:
        """Sum inside a tensor group: it starts when the last of its ranks has come."""
        if not self._segments:  # outside an action, as when a prediction is put together
            meet()
            return
        self._end_segment()
        number = self._met_groups[ranks] = self._met_groups.get(ranks, -1) + 1
        numbers = self._board.numbers
        numbers[self._layout.meeting(ranks, self._rank, number)] = self._clock
        meet()
        last = max(float(numbers[self._layout.meeting(ranks, rank, number)]) for rank in ranks)
        pace = self._groups[ranks]
        self._clock = last + self._stretch * (pace.latency_s + num_bytes * pace.byte_s)
        self._segment_cpu_s = time.thread_time()

    # --- gradient sums -----------------------------------------------------------------------------------------------

    def sum_started(self, bucket: int) -> None:
        self._board.numbers[self._layout.ready(self._step, bucket, self._rank)] = self._now()

    def _now(self) -> float:
        """The clock; inside an action it has gone on with the part of the arithmetic that is done."""
        if not self._segments:
            return self._clock
        whole = self._segments[-1]
        done = (time.thread_time() - self._segment_cpu_s) / self.paces.core_s[self._rank] * self._stretch
        return self._clock + min(whole, done)

    def sums_waited(self) -> None:
        self._clock += time.thread_time() - self._idle_cpu_s
        self._board.numbers[self._layout.clock(self._step, self._rank)] = self._clock

    def met(self) -> None:
        numbers, layout = self._board.numbers, self._layout
        free = [float(numbers[layout.clock(self._step, rank)]) for rank in range(layout.num_ranks)]
        ends = dict.fromkeys(range(layout.num_ranks), 0.0)
        for bucket, (ranks, seconds) in enumerate(self._sums):
            start = max(max(float(numbers[layout.ready(self._step, bucket, r)]), ends[r]) for r in ranks)
            ends.update(dict.fromkeys(ranks, start + self._stretch * seconds))
            if self._rank in ranks:
                self.trace.add(f"{SUM}{bucket}", start, ends[self._rank])
        self._is_late = False
        self._clock = max(*free, *ends.values())
        self._wait_until(self._clock)
        self._count()
        self._met_s = self._clock
        self._idle_cpu_s = time.thread_time()

    def optimizer_done(self) -> None:
        self._is_late = False
        self._wait_until(self._clock + self._stretch * self.paces.optimizer_s[self._rank])
        self._count()
        self.trace.add(OPTIMIZER, self._met_s, self._clock)
        self._idle_cpu_s = time.thread_time()


class _Layout:
    """Where on the board which number stands."""

    def __init__(self, plan: Plan, spec: ModelSpec, paces: Paces) -> None:
        self.num_ranks = plan.num_ranks
        layouts = parameter_layouts(plan, spec)
        self.buckets = gradient_buckets(layouts)
        costs = {entry.ranks: entry for entry in paces.sums}
        self._sums = []
        for bucket in self.buckets:
            num_bytes = 0
            for entry in bucket.entries:
                layout = layouts[entry.parameter]
                row_bytes = layout.parameter.size_bytes // max(1, layout.size)
                num_bytes += len(entry.segment.interval) * row_bytes
            cost = costs[bucket.ranks]
            self._sums.append((bucket.ranks, cost.latency_s + num_bytes * cost.byte_s))
        self.size = 0
        self._ports = {name: self._take(1) for name in sorted({p for link in paces.links for p in link.ports})}
        self._channels = {(link.source, link.target): self._take(_RING) for link in paces.links}
        self._meetings = {
            (group.ranks, rank): self._take(_MEETINGS) for group in paces.tensor_groups for rank in group.ranks
        }
        # of this step and the one before: nobody begins the next but one before all have met in the next
        self._ready = [self._take(len(self.buckets) * plan.num_ranks) for _ in range(2)]
        self._clocks = [self._take(plan.num_ranks) for _ in range(2)]

    def _take(self, count: int) -> int:
        place, self.size = self.size, self.size + count
        return place

    def sum_of(self, bucket: int) -> tuple[tuple[int, ...], float]:
        """The ranks of a bucket, and the seconds of its sum on the declared links."""
        return self._sums[bucket]

    def port(self, name: str) -> int:
        """Until when the port is taken."""
        return self._ports[name]

    def message(self, channel: tuple[int, int], number: int) -> int:
        """When a channel's message arrives."""
        return self._channels[channel] + number % _RING

    def meeting(self, ranks: tuple[int, ...], rank: int, number: int) -> int:
        """When `rank` came to a meeting of its tensor group."""
        return self._meetings[ranks, rank] + number % _MEETINGS

    def ready(self, step: int, bucket: int, rank: int) -> int:
        """When the rank had its gradients of a bucket."""
        return self._ready[step % 2] + bucket * self.num_ranks + rank

    def clock(self, step: int, rank: int) -> int:
        """When the rank had ended its last action."""
        return self._clocks[step % 2] + rank


class _Over(dist.Work):
    """Work that is over when it is returned."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class PacedGroup(dist.ProcessGroup):
    """A tensor group whose sums take the time of the declared links."""

    def __init__(self, group: dist.ProcessGroup, meet: Callable[[int, Callable[[], None]], None]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # torch's stub lacks this form
        self._group = group
        self._meet = meet

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        def meet() -> None:
            self._group.allreduce(tensors, opts).wait()

        self._meet(sum(tensor.nbytes for tensor in tensors), meet)
        return _Over()
