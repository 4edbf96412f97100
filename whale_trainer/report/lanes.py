"""Which spans of a rank are drawn side by side, and which ranks of a large plan stand for the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from whale_trainer.errors import PlanError
from whale_trainer.planning.schedule.actions import Action
from whale_trainer.planning.simulation.timeline import Span, Timeline


def spans_by_rank(timeline: Timeline) -> dict[int, list[Span]]:
    """The spans of each rank that has any."""
    found: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        found[span.rank].append(span)
    return dict(found)


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """A lane for each span: 0 for compute; what travels takes the first lane from 1 on that is free by then."""
    free: list[float] = []
    lanes = [0] * len(spans)
    travelling = [i for i, span in enumerate(spans) if not span.activity.is_compute]
    for i in sorted(travelling, key=lambda i: (spans[i].start_s, spans[i].stop_s)):
        lane = next((n for n, until in enumerate(free) if until <= spans[i].start_s), len(free))
        free[lane : lane + 1] = [spans[i].stop_s]
        lanes[i] = lane + 1
    return lanes


def action_of(span: Span) -> Action | None:
    """The action that a compute span runs; None where its label is none."""
    try:
        return Action.parse(span.label)
    except PlanError:
        return None


def pass_seconds(timeline: Timeline) -> dict[int, dict[str, float]]:
    """For each tile the mean seconds of its forward and its backward passes, by `F` and `B`."""
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline.spans:
        action = action_of(span) if span.activity.is_compute else None
        if action is not None:
            found[action.tile][action.op].append(span.stop_s - span.start_s)
    return {tile: {op: sum(s) / len(s) for op, s in by_op.items()} for tile, by_op in found.items()}


def representatives(likeness: Mapping[int, Hashable], most: int) -> list[int]:
    """All ranks, ascending, if they are at most `most`; else the first of each sort that has a likeness.

    Of more than `most` sorts some are taken at even distances.
    """
    if len(likeness) <= most:
        return sorted(likeness)
    first: dict[Hashable, int] = {}
    for rank in sorted(likeness):
        first.setdefault(likeness[rank], rank)
    sorts = list(first.values())
    return sorts if len(sorts) <= most else [sorts[i * len(sorts) // most] for i in range(most)]
