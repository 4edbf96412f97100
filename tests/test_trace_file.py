"""timeline.json: a step as Chrome's trace events."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from answers import answer_of, hybrid, two_replicas

from whale_trainer.planning.simulation.timeline import Activity, Span, Timeline
from whale_trainer.report.lanes import lanes_of, representatives
from whale_trainer.report.trace_file import trace_events, write_timeline


def named(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def test_every_span_is_an_event_on_the_thread_of_its_rank() -> None:
    answer, _ = answer_of(hybrid())
    plan, timeline = answer.plan, answer.timeline
    events = trace_events(timeline, plan)["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    nodes, threads = named(events, "process_name"), named(events, "thread_name")
    assert nodes == {(1, 0): "node-V100-SXM2-32GB", (2, 0): "node-P100-PCIE-16GB"}
    drawn = [e for e in events if e["ph"] == "X"]
    assert len(drawn) == len(timeline.spans)
    for event, span in zip(drawn, timeline.spans, strict=True):
        assert event["name"] == span.label
        assert event["cat"] == span.activity.value
        assert event["ts"] == pytest.approx(span.start_s * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx((span.stop_s - span.start_s) * 1e6, abs=1e-3)
        device = plan.devices[span.rank]
        assert nodes[event["pid"], 0] == device.node
        thread = threads[event["pid"], event["tid"]]
        lane = device.kind if span.activity.is_compute else "links"
        assert thread.startswith(f"rank {span.rank} {lane}")
        assert event["args"].get("bytes", 0) == span.num_bytes
    first = next(e for e in drawn if e["name"] == "1F3")
    assert first["args"] == {"rank": 2, "tile": 1, "micro_batch": 3}


def test_events_of_a_thread_never_overlap() -> None:
    answer, _ = answer_of(hybrid())
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace_events(answer.timeline, answer.plan)["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) > answer.plan.num_ranks
    for spans in threads.values():
        assert all(a[1] <= b[0] + 2e-3 for a, b in pairwise(sorted(spans)))


def test_a_measured_step_has_processes_and_threads_of_its_own() -> None:
    answer, _ = answer_of(two_replicas())
    timeline = answer.timeline
    trace = trace_events(timeline, answer.plan, measured=replace(timeline, step_s=0.25))
    events = trace["traceEvents"]
    assert list(named(events, "process_name").values()) == [
        "predicted node-V100-SXM2-32GB",
        "predicted node-P100-PCIE-16GB",
        "measured node-V100-SXM2-32GB",
        "measured node-P100-PCIE-16GB",
    ]
    threads = [tid for _, tid in named(events, "thread_name")]
    assert len(set(threads)) == len(threads)
    assert sum(e["ph"] == "X" for e in events) == 2 * len(timeline.spans)
    assert trace["otherData"]["plan"] == answer.plan.fingerprint
    assert trace["otherData"]["measured_step_s"] == 0.25


def test_write_timeline(tmp_path: Path) -> None:
    answer, _ = answer_of(two_replicas())
    path = write_timeline(tmp_path, answer.timeline, answer.plan)
    assert path == tmp_path / "timeline.json"
    assert json.loads(path.read_text()) == trace_events(answer.timeline, answer.plan)
    write_timeline(tmp_path, Timeline(0.0, (), ()), answer.plan)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["name"] for e in events} == {"process_name", "process_sort_index"}


def test_lanes() -> None:
    spans = [
        Span(0, Activity.FORWARD, "0F0", 0, 1),
        Span(0, Activity.TRANSFER, "a", 1, 3),
        Span(0, Activity.SUM, "b", 2, 4),
        Span(0, Activity.TRANSFER, "c", 3, 5),
        Span(0, Activity.OPTIMIZER, "optimizer", 4, 5),
    ]
    assert lanes_of(spans) == [0, 1, 2, 1, 0]
    assert lanes_of([]) == []


def test_representatives() -> None:
    alike = {3: "a", 1: "b", 0: "a", 5: "a"}
    assert representatives(alike, 4) == [0, 1, 3, 5]
    assert representatives(alike, 3) == [0, 1]
    assert representatives({r: r for r in range(10)}, 5) == [0, 2, 4, 6, 8]
    assert representatives({}, 5) == []
