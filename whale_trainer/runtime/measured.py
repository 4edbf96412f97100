"""The last steps of all ranks as they were measured, from their traces."""

from __future__ import annotations

import re

import torch.distributed as dist

from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.timeline import Activity, Span, Timeline
from whale_trainer.runtime.trace import OPTIMIZER, SEND, SUM, Event, Trace

_ACTIVITIES = {"F": Activity.FORWARD, "B": Activity.BACKWARD, "I": Activity.INPUT, "W": Activity.WEIGHT}
_Step = tuple[float, float, list[Event]]


def gather_steps(trace: Trace, plan: Plan, rank: int, count: int, *, stretch: float = 1.0) -> list[Timeline]:
    """Up to `count` of the last steps, the oldest first, on rank 0; nothing on the others. All ranks call this.

    Times are divided by `stretch`. Steps start when the first rank starts them; clocks are those of one machine.
    """
    mine = trace.last_steps(count)
    found: list[list[_Step] | None] = [None] * plan.num_ranks if rank == 0 else []
    if plan.num_ranks > 1:
        dist.gather_object(mine, found if rank == 0 else None, dst=0)
    else:
        found = [mine]
    if rank != 0:
        return []
    by_rank = [steps or [] for steps in found]
    num_steps = min(map(len, by_rank))
    return [_timeline([steps[-1 - i] for steps in by_rank], stretch) for i in reversed(range(num_steps))]


def _timeline(steps: list[_Step], stretch: float) -> Timeline:
    begin = min(start for start, _, _ in steps)
    step_s = (steps[0][1] - steps[0][0]) / stretch
    spans = []
    busy = []
    for rank, (_, _, events) in enumerate(steps):
        own = [_span(rank, event, begin, stretch) for event in events]
        spans += sorted(own, key=lambda span: (span.start_s, span.stop_s))
        computed = sum(span.stop_s - span.start_s for span in own if span.activity.is_compute)
        busy.append(min(1.0, computed / step_s) if step_s > 0 else 0.0)
    return Timeline(step_s, tuple(spans), tuple(busy))


def _span(rank: int, event: Event, begin: float, stretch: float) -> Span:
    label, activity = event.name, Activity.OPTIMIZER
    if event.name.startswith(SEND):
        label, activity = event.name.removeprefix(SEND).strip(), Activity.TRANSFER
    elif event.name.startswith(SUM):
        label, activity = f"gradient sum {event.name.removeprefix(SUM)}", Activity.SUM
    elif event.name != OPTIMIZER:
        letter = re.sub(r"\d", "", event.name)
        activity = _ACTIVITIES.get(letter, Activity.BACKWARD)
    return Span(rank, activity, label, (event.start_s - begin) / stretch, (event.end_s - begin) / stretch)
