"""What a rank did and when: the last actions with their start and end, for reports, tests and post-mortems."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One action of this rank; times in seconds of `time.perf_counter`."""

    name: str
    start_s: float
    end_s: float


class Trace:
    """A ring of the last actions."""

    def __init__(self, capacity: int = 4096) -> None:
        self.events: deque[Event] = deque(maxlen=capacity)
        self.current: str = ""

    def add(self, name: str, start_s: float, end_s: float) -> None:
        self.events.append(Event(name, start_s, end_s))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block as one action; while it runs, `current` names it."""
        start, self.current = time.perf_counter(), name
        yield
        self.add(name, start, time.perf_counter())
        self.current = ""
