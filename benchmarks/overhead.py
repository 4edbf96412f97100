"""What our runtime costs: one rank against a bare PyTorch loop, two equal ranks against Lightning's own DDP.

    python -m benchmarks.overhead [--pairs 24] [--block 5]

Same model, same batches, same optimizer, one thread a rank, dropout 0. Ratios are ours / theirs.
"""

from __future__ import annotations

import argparse
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset
from whale_trainer.models.gpt import GPT

from benchmarks.pairs import Turns, measure, row, write_json
from whale_trainer import TrainingModule, WhaleStrategy, make_plan

BATCH = 16
CONTEXT = 128


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Endless enough; sample i is always the same."""

    deterministic = True

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(256, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1], "targets": tokens[1:]}


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=256, width=192, num_layers=4, num_heads=6, num_kv_heads=2, context=CONTEXT)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class TakeTurns(Callback):
    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_batch_end(self, *_: Any) -> None:
        self.turns.step_done()


def make_trainer(turns: Turns, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        callbacks=[TakeTurns(turns)],
        **options,
    )


def ours(turns: Turns, rank: int, world_size: int, port: int) -> None:
    cluster = {"nodes": [{"name": "here", "devices": {"CPU": world_size}, "link": "pcie3"}]}
    strategy = {"micro_batches": 1, "schedule": "1f1b", "scopes": [{"layers": "*", "replicate": world_size}]}
    loader = DataLoader(RandomTokens(), batch_size=BATCH)
    plan = make_plan(make_model(), cluster, strategy, global_batch=BATCH, example=next(iter(loader)))
    module = TrainingModule(make_model(), make_optimizer)
    make_trainer(turns, strategy=WhaleStrategy(plan), devices=1).fit(module, loader)


def bare(turns: Turns, rank: int, world_size: int, port: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for batch in DataLoader(RandomTokens(), batch_size=BATCH):
        loss_sum, count = model.loss(model(batch["tokens"]), batch)
        optimizer.zero_grad()
        (loss_sum / count).backward()
        optimizer.step()
        turns.step_done()


class UsualModule(pl.LightningModule):
    """The same model as one writes it for DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss_sum, count = self.model.loss(self.model(batch["tokens"]), batch)
        return loss_sum / count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model.parameters())


def lightning_ddp(turns: Turns, rank: int, world_size: int, port: int) -> None:
    loader = DataLoader(RandomTokens(), batch_size=BATCH // world_size)
    strategy = DDPStrategy(process_group_backend="gloo")
    make_trainer(turns, strategy=strategy, devices=world_size).fit(UsualModule(), loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--block", type=int, default=5, help="steps of one turn")
    arguments = parser.parse_args()
    rows = [
        row(
            "1 rank / bare PyTorch loop",
            measure(ours, bare, world_size=1, pairs=arguments.pairs, block=arguments.block),
        ),
        row(
            "2 ranks / Lightning DDP",
            measure(ours, lightning_ddp, world_size=2, pairs=arguments.pairs, block=arguments.block),
        ),
    ]
    table = Table("ours / theirs", "pairs", "ours", "theirs", "wall median [95 %]", "CPU median [95 %]")
    for r in rows:
        spans = [f"{r[k]['median']:.3f} [{r[k]['low']:.3f}, {r[k]['high']:.3f}]" for k in ("wall", "cpu")]
        table.add_row(
            r["what"], str(r["wall"]["pairs"]), f"{r['ours_step_ms']:.1f} ms", f"{r['theirs_step_ms']:.1f} ms", *spans
        )
    console = Console()
    console.print(table)
    console.print(f"written to {write_json('overhead', rows)}")


if __name__ == "__main__":
    main()
