"""One measuring process for each device: messages from the first to the others, and sums over all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_trainer.calibration.journal import Journal
from whale_trainer.calibration.statistics import robust, without_warm_up
from whale_trainer.config import Config
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.plan import Plan
from whale_trainer.rank_info import RankInfo
from whale_trainer.runtime.transfers import message_times, sum_times

REPEATS = 20
MOST_PAIRS = 8
SIZES = {
    "cpu": tuple(1 << i for i in (10, 12, 13, 16, 20, 22, 23, 24, 25)),
    "cuda": tuple(1 << i for i in (10, 12, 13, 16, 20, 22, 24, 26, 27, 28)),
}
"""Bytes of a message by the type of device."""


@dataclass(frozen=True)
class LinkJob:
    """What the measuring processes of the links get."""

    config: Config
    journal: Path

    @property
    def timeout_s(self) -> float:
        return self.config.timeout_s


def pairs_of(num_ranks: int) -> list[tuple[int, int]]:
    """The pairs of ranks whose link is measured."""
    return [(0, other) for other in range(1, min(num_ranks, MOST_PAIRS + 1))]


def measure_links(job: LinkJob, plan: Plan, spec: ModelSpec | None, run_dir: Path, info: RankInfo) -> None:
    """A rank's entry; rank 0 writes the journal."""
    journal = Journal(job.journal) if info.rank == 0 else None
    sizes = SIZES[info.device.type]
    for pair in pairs_of(info.world_size):
        _note(journal, f"link {pair[0]} {pair[1]}", sizes, message_times(pair, info.rank, info.device, sizes, REPEATS))
    _note(journal, "sum", sizes, sum_times(info.device, sizes, REPEATS))


def _note(journal: Journal | None, name: str, sizes: tuple[int, ...], times: list[list[float]] | None) -> None:
    if journal is None or times is None:
        return
    rows: list[dict[str, Any]] = []
    for size, found in zip(sizes, times, strict=True):
        figure = robust(without_warm_up(found))
        rows.append({"num_bytes": size, "seconds": figure.median_s, "spread_s": figure.spread_s})
    journal.end(name, {"rows": rows})
