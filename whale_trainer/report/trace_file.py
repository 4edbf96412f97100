"""timeline.json: a step in Chrome's trace event format, for Perfetto and chrome://tracing.

A process is a node. Each of its ranks has a thread for what it computes and, below it, as many threads as it has
transfers and sums at once, since events of one thread may not overlap. A measured step stands beside the predicted one
as further processes of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from whale_trainer.planning.plan import Plan
from whale_trainer.planning.simulation.timeline import Activity, Span, Timeline
from whale_trainer.report.lanes import action_of, lanes_of, spans_by_rank

FILE = "timeline.json"
COLOURS = {
    Activity.FORWARD: "thread_state_running",
    Activity.BACKWARD: "thread_state_runnable",
    Activity.INPUT: "thread_state_uninterruptible",
    Activity.WEIGHT: "thread_state_runnable",
    Activity.TRANSFER: "thread_state_iowait",
    Activity.SUM: "terrible",
    Activity.OPTIMIZER: "grey",
}
"""Names of the format's own colours; Perfetto colours by name instead."""

Event = dict[str, Any]


def trace_events(timeline: Timeline, plan: Plan, *, measured: Timeline | None = None) -> dict[str, Any]:
    """The trace as plain data; times in microseconds from the start of the step."""
    events = list(_events(timeline, plan, "predicted" if measured else ""))
    if measured:
        events += _events(measured, plan, "measured", after=events)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": plan.fingerprint,
            "schedule": plan.schedule,
            "predicted_step_s": timeline.step_s,
            "measured_step_s": measured.step_s if measured else None,
        },
    }


def write_timeline(
    run_dir: str | os.PathLike[str], timeline: Timeline, plan: Plan, *, measured: Timeline | None = None
) -> Path:
    """Write timeline.json, an event a line."""
    trace = trace_events(timeline, plan, measured=measured)
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace.pop("traceEvents"))
    others = json.dumps(trace)[1:]
    path = Path(run_dir, FILE)
    path.write_text(f'{{"traceEvents": [\n{events}\n], {others}\n')
    return path


def _events(timeline: Timeline, plan: Plan, prefix: str, after: Sequence[Event] = ()) -> Iterator[Event]:
    """The events of one step, in processes and threads with ids above those of the events before it."""
    nodes = list(dict.fromkeys(device.node for device in plan.devices))
    pid_before, tid = (max((event[key] for event in after), default=0) for key in ("pid", "tid"))
    pids = {node: pid for pid, node in enumerate(nodes, pid_before + 1)}
    for node, pid in pids.items():
        yield _named("process_name", pid, name=f"{prefix} {node}".strip())
        yield _named("process_sort_index", pid, sort_index=pid)
    by_rank = spans_by_rank(timeline)
    for device in plan.devices:
        spans, pid = by_rank.get(device.rank, []), pids[device.node]
        lanes = lanes_of(spans)
        for lane in range(1 + max(lanes, default=-1)):
            what = device.kind if lane == 0 else "links" if lane == 1 else f"links {lane}"
            yield _named("thread_name", pid, tid + 1 + lane, name=f"rank {device.rank} {what}")
            yield _named("thread_sort_index", pid, tid + 1 + lane, sort_index=tid + 1 + lane)
        yield from (_event(span, pid, tid + 1 + lane) for span, lane in zip(spans, lanes, strict=True))
        tid += 1 + max(lanes, default=-1)


def _named(kind: str, pid: int, tid: int = 0, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _event(span: Span, pid: int, tid: int) -> Event:
    args: dict[str, Any] = {"rank": span.rank}
    if (action := action_of(span)) is not None:
        args |= {"tile": action.tile, "micro_batch": action.micro_batch}
    if span.num_bytes:
        args["bytes"] = span.num_bytes
    return {
        "ph": "X",
        "name": span.label,
        "cat": span.activity.value,
        "ts": round(span.start_s * 1e6, 3),
        "dur": round((span.stop_s - span.start_s) * 1e6, 3),
        "pid": pid,
        "tid": tid,
        "cname": COLOURS[span.activity],
        "args": args,
    }
