"""What a rank did and when: the last actions with their start and end, for reports, tests and post-mortems."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

STEP, SUM, SEND, OPTIMIZER = "STEP", "SUM", "SEND", "optimizer"
"""What names of events begin with that are no actions: the start of a training step, the sum of a bucket, a message on
its way, the optimizer's step."""


@dataclass(frozen=True)
class Event:
    """One action of this rank; times in seconds of `time.perf_counter`."""

    name: str
    start_s: float
    end_s: float

    @property
    def is_compute(self) -> bool:
        """False for what runs beside the rank's own work."""
        return not self.name.startswith((SUM, SEND))


class Trace:
    """A ring of the last actions, and what part of each of the last steps the rank computed."""

    def __init__(self, capacity: int = 4096) -> None:
        self.events: deque[Event] = deque(maxlen=capacity)
        self.current: str = ""
        self._begun_s: float | None = None
        self._busy_s = 0.0
        self._steps: deque[tuple[float, float]] = deque(maxlen=256)

    def add(self, name: str, start_s: float, end_s: float) -> None:
        event = Event(name, start_s, end_s)
        self.events.append(event)
        if event.is_compute:
            self._busy_s += end_s - start_s

    def begin_step(self, now_s: float) -> None:
        """A training step starts, and with it ends the one before."""
        if self._begun_s is not None:
            self._steps.append((now_s - self._begun_s, self._busy_s))
        self._begun_s, self._busy_s = now_s, 0.0
        self.events.append(Event(STEP, now_s, now_s))

    def last_steps(self, count: int) -> list[tuple[float, float, list[Event]]]:
        """(start, end, events) of up to `count` of the last training steps that are over, the oldest first."""
        marks = [i for i, event in enumerate(self.events) if event.name == STEP]
        events = list(self.events)
        found = []
        for first, after in pairwise(marks[-count - 1 :]):
            start, end = events[first].start_s, events[after].start_s
            inside = [e for e in events[first + 1 : after] if start <= e.start_s <= end]
            found.append((start, end, inside))
        return found

    @property
    def busy_fraction(self) -> float | None:
        """Of the last steps that are over, the median part in which the rank computed, from 0 to 1; None before any.

        What the rank computes for itself counts, and its waits inside a tensor group; waits for messages do not.
        """
        if not self._steps:
            return None
        return min(1.0, statistics.median(busy_s / step_s for step_s, busy_s in self._steps if step_s > 0))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block as one action; while it runs, `current` names it."""
        start, self.current = time.perf_counter(), name
        yield
        self.add(name, start, time.perf_counter())
        self.current = ""
