"""On straight pipelines our compute orders are those of torch.distributed.pipelining, as that library executes them."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from whale_trainer.planning.plan import Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.schedule.schedule import build_schedule
from whale_trainer.planning.shares import Interval


def pipeline(stages: int, micro_batches: int, schedule: str, num_ranks: int = 0) -> Plan:
    """One layer a stage, one sample a micro-batch; stages go round over the ranks, by default one for each."""
    num_ranks = num_ranks or stages
    return Plan(
        tiles=tuple(Tile(Interval(s, s + 1), Interval(0, 1), (Shard(s % num_ranks),)) for s in range(stages)),
        layer_names=tuple(f"layer{s}" for s in range(stages)),
        micro_batches=micro_batches,
        global_batch=micro_batches,
        schedule=schedule,
        devices=tuple(PlannedDevice(s, "CPU", "node0", 1 << 30) for s in range(num_ranks)),
    )


class Recorder:
    """Stands where the library wants a stage: notes what is computed, and has nobody to send to."""

    is_first = is_last = False

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.computed: list[str] = []

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.computed.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.computed.append(f"{self.stage_index}B{micro_batch}")

    def no_operations(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations

    def perform_reduce_grad(self, scale: int) -> None:
        """The library sums gradients here; nothing was computed."""


def library_order(kind: type[PipelineScheduleSingle], stage: int, stages: int, micro_batches: int) -> list[str]:
    recorder = Recorder(stage, stages)
    schedule = kind(recorder, micro_batches)  # type: ignore[arg-type]
    schedule._initialize_stage = lambda *args, **kwargs: None  # type: ignore[method-assign]  # nothing to allocate
    schedule._step_microbatches()
    return recorder.computed


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize(("name", "kind"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
def test_same_order_as_the_library(name: str, kind: type[PipelineScheduleSingle], stages: int) -> None:
    """1F1B in the library refuses fewer micro-batches than stages."""
    compared = 0
    for micro_batches in range(stages if name == "1f1b" else 1, 9):
        schedule = build_schedule(pipeline(stages, micro_batches, name), micro_batches)
        for stage in range(stages):
            ours = [str(action) for action in schedule.actions_of(stage)]
            assert ours == library_order(kind, stage, stages, micro_batches)
            compared += 1
    assert compared == stages * (9 - stages if name == "1f1b" else 8)


def interleaved_order(rank: int, num_ranks: int, chunks: int, micro_batches: int) -> list[str]:
    """What the library computes on a rank, without its idle slots."""
    schedule = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = num_ranks, chunks, micro_batches
    schedule.number_of_rounds = max(1, micro_batches // num_ranks)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    return [str(action) for action in schedule._calculate_single_rank_operations(rank) if action is not None]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("num_ranks", range(2, 6))
def test_same_interleaved_order_as_the_library(num_ranks: int, chunks: int) -> None:
    """For all numbers of micro-batches that the library takes: those that fill whole rounds."""
    compared = 0
    for micro_batches in range(1, 4 * num_ranks + 1):
        if micro_batches % max(1, micro_batches // num_ranks):
            continue
        plan = pipeline(num_ranks * chunks, micro_batches, "interleaved", num_ranks)
        schedule = build_schedule(plan, micro_batches)
        for rank in range(num_ranks):
            ours = [str(action) for action in schedule.actions_of(rank)]
            assert ours == interleaved_order(rank, num_ranks, chunks, micro_batches)
            compared += 1
    assert compared >= 6 * num_ranks
