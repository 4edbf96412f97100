"""What a checkpoint costs: 4 ranks save and load about 200 MB, against one process with torch.save, fsync, torch.load.

    python -m benchmarks.checkpoints [--pairs 24] [--folder .]

A GPT and its AdamW moments, two stages of two uneven tensor shards; all bytes are written once, each rank's by itself.
Saving ends when the folder is whole, synced and renamed; loading fills weights and moments. `stall` is how long
training stands still for a save in the background; the writing that follows is not in it. Ratios are ours / theirs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from whale_trainer.models.gpt import GPT

from benchmarks.pairs import Turns, measure, row, write_json
from whale_trainer import make_plan
from whale_trainer.checkpoint import read_checkpoint
from whale_trainer.checkpoint.background import BackgroundWriter
from whale_trainer.checkpoint.snapshot import Snapshot, load_optimizers, load_weights, take_snapshot
from whale_trainer.runtime.engine import Engine

RANKS = 4
CONTEXT = 32
CLUSTER = {"nodes": [{"name": "here", "devices": {"CPU": RANKS}, "link": "pcie3"}]}
STRATEGY = {"micro_batches": 2, "schedule": "1f1b", "scopes": [{"layers": "*", "stages": 2, "split": 2}]}


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=256, width=384, num_layers=9, num_heads=6, num_kv_heads=6, context=CONTEXT)


def with_moments(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer after a step, so that its moments are there."""
    parameters = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class OurRank:
    """One of the ranks, with its pieces of the model."""

    def __init__(self, rank: int, world_size: int, port: int, folder: Path) -> None:
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300))
        tokens = torch.zeros(4, CONTEXT, dtype=torch.int64)
        model, example = make_model(), {"tokens": tokens, "targets": tokens}
        plan = make_plan(model, CLUSTER, STRATEGY, global_batch=4, example=example)
        assert plan.model is not None
        self.engine = Engine(plan, plan.model, model, rank=rank, seed=0)
        self.optimizers = [with_moments(model.parameters())]
        self.path = folder / "ours"
        self.own_group = dist.new_group(backend="gloo")

    def exchange(self, value: Any, group: Any = None) -> list[Any]:
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, value, group=group)
        return found

    def snapshot(self) -> Snapshot:
        return take_snapshot(self.path, {"global_step": 1}, self.engine, self.optimizers, RANKS)

    def save(self) -> None:
        self.snapshot().write(self.exchange)

    def load(self) -> None:
        with read_checkpoint(self.path) as reader:
            load_weights(reader, self.engine)
            load_optimizers(reader, self.engine, self.optimizers)


def save_ours(turns: Turns, rank: int, world_size: int, port: int, *, folder: Path) -> None:
    ours = OurRank(rank, world_size, port, folder)
    while True:
        ours.save()
        turns.step_done()


def load_ours(turns: Turns, rank: int, world_size: int, port: int, *, folder: Path) -> None:
    ours = OurRank(rank, world_size, port, folder)
    ours.save()
    while True:
        ours.load()
        turns.step_done()


def stall_ours(turns: Turns, rank: int, world_size: int, port: int, *, folder: Path) -> None:
    ours = OurRank(rank, world_size, port, folder)
    writer = BackgroundWriter(partial(ours.exchange, group=ours.own_group))
    while True:
        writer.start(ours.snapshot())
        with turns.untimed():
            writer.wait()
        turns.step_done()


class OneProcess:
    """The whole model in the first process; the others only take their turns."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.path = folder / "theirs.pt"
        self.model = make_model() if rank == 0 else None
        self.optimizer = None if self.model is None else with_moments(self.model.parameters())

    def save(self) -> None:
        if self.model is None or self.optimizer is None:
            return
        with self.path.open("wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> None:
        if self.model is not None:
            torch.load(self.path)


def save_theirs(turns: Turns, rank: int, world_size: int, port: int, *, folder: Path) -> None:
    theirs = OneProcess(rank, folder)
    while True:
        theirs.save()
        turns.step_done()


def load_theirs(turns: Turns, rank: int, world_size: int, port: int, *, folder: Path) -> None:
    theirs = OneProcess(rank, folder)
    theirs.save()
    while True:
        theirs.load()
        turns.step_done()


JOBS = {
    "save / torch.save + fsync": (save_ours, save_theirs),
    "load / torch.load": (load_ours, load_theirs),
    "stall in the background / torch.save + fsync": (stall_ours, save_theirs),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the checkpoints are written meanwhile")
    arguments = parser.parse_args()
    rows = []
    for name, (ours, theirs) in JOBS.items():
        folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=arguments.folder.absolute()))
        try:
            bodies = [partial(body, folder=folder) for body in (ours, theirs)]
            found = measure(*bodies, world_size=RANKS, pairs=arguments.pairs, block=1)
            rows.append(row(name, found))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    num_bytes = 12 * sum(p.numel() for p in make_model().parameters())
    table = Table("ours / theirs", "pairs", "ours", "theirs", "wall median [95 %]", "CPU median [95 %]")
    for r in rows:
        spans = [f"{r[k]['median']:.2f} [{r[k]['low']:.2f}, {r[k]['high']:.2f}]" for k in ("wall", "cpu")]
        times = [f"{r[k]:.0f} ms" for k in ("ours_step_ms", "theirs_step_ms")]
        table.add_row(r["what"], str(r["wall"]["pairs"]), *times, *spans)
    console = Console()
    console.print(f"{num_bytes / 1e6:.0f} MB of weights and moments, {RANKS} ranks")
    console.print(table)
    console.print(f"written to {write_json('checkpoints', rows)}")


if __name__ == "__main__":
    main()
