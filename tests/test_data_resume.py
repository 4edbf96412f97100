"""A run that was interrupted goes on with the next batch of the same order: by the loader's state, and in a Trainer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from rank_loaders import Draws, Ids, data_parallel, ids, pipeline
from torch import Tensor, nn
from torch.utils.data import DataLoader

from whale_trainer import WhaleStrategy
from whale_trainer.data import RankLoader, slice_loader
from whale_trainer.errors import CheckpointError
from whale_trainer.planning.plan import Plan

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
]

PLAN = data_parallel(6, 4, 2)


def rank_loader(plan: Plan = PLAN, rank: int = 0, *, seed: int = 0, **options: Any) -> RankLoader:
    options = {"batch_size": 6, "shuffle": True, **options}
    return slice_loader(DataLoader(Ids(20), **options), plan, rank, training=True, seed=seed)


# --- the loader's own state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 3, 4])
def test_a_loaded_state_goes_on_after_the_batches_that_were_handed_out(num_workers: int, done: int) -> None:
    loader = rank_loader(num_workers=num_workers)
    loader.order.set_epoch(2)
    whole = ids(list(loader))
    loader = rank_loader(num_workers=num_workers)
    loader.order.set_epoch(2)
    running = iter(loader)
    for _ in range(done):
        next(running)
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["batch"]) == (2, done)

    resumed = rank_loader(num_workers=num_workers)
    resumed.load_state_dict(state)
    assert len(resumed) == 4
    assert ids(list(resumed)) == whole[done:]
    resumed.order.set_epoch(3)
    loader.order.set_epoch(3)
    assert resumed.state_dict()["batch"] == 0
    assert ids(list(resumed)) == ids(list(loader))


def test_the_state_is_that_of_every_rank_and_plan() -> None:
    states = []
    for plan, rank in ((PLAN, 0), (PLAN, 1), (pipeline(6), 1), (data_parallel(6, 6), 0)):
        loader = rank_loader(plan, rank)
        next(batches := iter(loader))
        next(batches)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    other = rank_loader(data_parallel(6, 1, 1, micro_batches=3), 1)
    other.load_state_dict(states[0])
    assert [b.size for b in other] == [6, 2]


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle": False}])
def test_another_order_than_the_checkpoints_is_refused_within_an_epoch(change: dict[str, Any]) -> None:
    loader = rank_loader()
    next(iter(loader))
    with pytest.raises(CheckpointError, match=r"after batch 1 of epoch 0, .*same data, seed and global_batch"):
        rank_loader(**change).load_state_dict(loader.state_dict())
    list(loader)
    rank_loader(**change).load_state_dict(loader.state_dict())  # at its end nothing is left to go wrong


def test_a_loader_that_follows_asks_where_training_stands() -> None:
    loader, place = rank_loader(), (0, 0)
    loader.follow(lambda: place)
    whole = {}
    for epoch in (0, 1):
        loader.order.set_epoch(epoch)
        whole[epoch] = [list(batch) for batch in loader.order.batches()]
    batches = iter(loader)
    loader.set_epoch(7)  # what was told is not what is
    place = 1, 2
    assert ids([next(batches)]) == [whole[1][2][:4]]
    assert loader.state_dict()["batch"] == 2  # handed out, not trained on yet
    place = 1, 3
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 3)


# --- in a Trainer ----------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.seen: list[tuple[Any, ...]] = []

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        self.seen.append((self.current_epoch, batch_index, *(column.tolist() for column in batch)))
        return self.line(batch[2][:, None] / 2**32).square().mean()

    def validation_step(self, batch: list[Tensor], batch_index: int) -> None:
        self.log("val", batch[0].float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(pl.Callback):
    """A checkpoint by the number of steps, each time the hook is met."""

    def __init__(self, folder: Path, hook: str) -> None:
        setattr(self, hook, lambda trainer, *_: trainer.save_checkpoint(folder / str(trainer.global_step)))


def fit(*callbacks: pl.Callback, ckpt_path: Path | None = None, num_workers: int = 0, **options: Any) -> list[Any]:
    """What a module sees in 11 steps over 20 samples in global batches of 6."""
    trainer = pl.Trainer(
        strategy=WhaleStrategy(data_parallel(6, 6), seed=3),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        max_steps=11,
        callbacks=list(callbacks),
        **options,
    )
    module = Module()
    train = DataLoader(Draws(20), batch_size=6, shuffle=True, num_workers=num_workers)
    validation = DataLoader(Draws(5), batch_size=3)
    trainer.fit(module, train, validation, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return module.seen


@pytest.mark.parametrize(
    ("hook", "options"),
    [
        ("on_train_batch_end", {}),
        ("on_train_batch_end", {"val_check_interval": 3, "check_val_every_n_epoch": None}),
        ("on_train_batch_end", {"limit_train_batches": 3}),
        ("on_train_batch_end", {"num_workers": 2}),
        ("on_validation_end", {"val_check_interval": 2}),
    ],
)
def test_interrupted_and_resumed_is_uninterrupted(tmp_path: Path, hook: str, options: dict[str, Any]) -> None:
    whole = fit(SaveAt(tmp_path, hook), **options)
    saved = sorted(int(path.name) for path in tmp_path.iterdir())
    assert len(saved) >= 4
    for steps in [s for s in saved if s < 11][:: 3 if len(saved) > 5 else 1]:
        assert fit(ckpt_path=tmp_path / str(steps), **options) == whole[steps:], steps
