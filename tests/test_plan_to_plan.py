"""A checkpoint saved under one plan goes on under any other: same bits after loading, same losses as if never stopped.

A dozen ordered pairs by default; `-m slow` runs all 64 in float64 and in float32.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_runs import Fit, loader, make_module, quiet_trainer
from ranks import run_ranks
from runs import gpt, single
from safetensors.torch import load_file
from test_equivalence import grid, three_of_four
from tilings import tile

from whale_trainer.checkpoint import load_full, read_checkpoint
from whale_trainer.checkpoint.snapshot import held_tensors
from whale_trainer.planning.plan import Plan

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`.*"),
]

STOP, STEPS = 3, 8
"""Saved in the middle of the second epoch of two batches, the second of which is short; 5 steps follow."""

PLANS = {
    "single": single(grid([4], [0, 6], [1])),
    "DP 3:1": grid([3, 1], [0, 6], [1]),
    "TP 2:1": grid([4], [0, 6], [2, 1]),
    "PP 3:1": grid([4], [0, 5, 6], [1]),
    "DPxTP": grid([3, 1], [0, 6], [2, 1]),
    "TPxPP": grid([4], [0, 4, 6], [2, 1]),
    "DPxTPxPP": grid([3, 1], [0, 4, 6], [2, 1]),
    "irregular": three_of_four(
        tile((0, 4), (0, 3), (0, 5), (1, 3)),
        tile((0, 2), (3, 4), 2),
        tile((4, 6), (0, 2), 3),
        tile((2, 6), (3, 4), 2),
        tile((4, 6), (2, 3), 1),
    ),
}
DOZEN = [
    ("single", "DPxTPxPP"), ("single", "irregular"), ("DP 3:1", "TP 2:1"), ("TP 2:1", "PP 3:1"), ("TP 2:1", "single"),
    ("PP 3:1", "DP 3:1"), ("DPxTP", "TPxPP"), ("TPxPP", "DPxTP"), ("DPxTPxPP", "single"), ("DPxTPxPP", "irregular"),
    ("irregular", "DPxTPxPP"), ("irregular", "irregular"),
]  # fmt: skip


class Steps(pl.Callback):
    """Losses and rates of the steps done here; saves after step `STOP`; compares what was loaded with the files."""

    def __init__(self, saved: Path | None, loaded: Path | None) -> None:
        self.saved, self.loaded = saved, loaded
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.differing: list[str] = []
        self.compared = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self.loaded is None:
            return
        with read_checkpoint(self.loaded) as reader:
            for key, name, cut, tensor in held_tensors(trainer.strategy.runner, trainer.optimizers):
                self.compared += 1
                if not torch.equal(tensor, reader.read(name, cut, key=key)):
                    self.differing.append(f"{key} {name} {cut}")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(trainer.strategy.last_step.loss)
        if self.saved is not None and trainer.global_step == STOP:
            trainer.save_checkpoint(self.saved)


@dataclass
class Went:
    losses: list[float]
    rates: list[float]
    differing: list[str]
    compared: int


def train_rank(_rank: int, _world_size: int, fit: Fit, saved: str | None, loaded: str | None) -> Went:
    plan, module = make_module(fit)
    steps = Steps(None if saved is None else Path(saved), None if loaded is None else Path(loaded))
    trainer = quiet_trainer(plan, fit.precision, max_steps=STEPS, callbacks=[steps])
    trainer.fit(module, loader(20, 12, shuffle=True), ckpt_path=loaded)
    return Went(steps.losses, steps.rates, steps.differing, steps.compared)


def fit_of(plan: Plan, precision: str) -> Fit:
    # no kv group shared unevenly: in float32 the sums of its copies would differ in the last bit by plan
    return Fit(plan, model={"dropout": 0.1}, precision=precision, lr=1e-2 if precision == "64-true" else 1e-3)


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(what an unstopped run went through, its checkpoint after `STOP`), once for each plan and precision."""
    folder = tmp_path_factory.mktemp("saved")
    known: dict[tuple[str, str], tuple[Went, Path]] = {}

    def get(name: str, precision: str) -> tuple[Went, Path]:
        if (name, precision) not in known:
            path = folder / f"{len(known)}"
            plan = PLANS[name]
            went = run_ranks(train_rank, plan.num_ranks, fit_of(plan, precision), str(path), None, timeout=100)[0]
            known[name, precision] = went, path
        return known[name, precision]

    yield get
    shutil.rmtree(folder)


def goes_on(saved_under: str, loaded_under: str, precision: str, unstopped: Any) -> float:
    """Check one pair; the largest relative difference of a loss."""
    whole, path = unstopped(saved_under, precision)
    plan = PLANS[loaded_under]
    worst = 0.0
    for went in run_ranks(train_rank, plan.num_ranks, fit_of(plan, precision), None, str(path), timeout=100):
        assert went.differing == []
        assert went.compared > 0
        assert went.rates == whole.rates[STOP:]
        assert len(went.losses) == STEPS - STOP == 5
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(went.losses, whole.losses[STOP:], strict=True)))
    return worst


@pytest.mark.parametrize(("saved_under", "loaded_under"), DOZEN, ids=["->".join(p) for p in DOZEN])
def test_c01_a_run_goes_on_under_another_plan(saved_under: str, loaded_under: str, unstopped: Any) -> None:
    assert goes_on(saved_under, loaded_under, "64-true", unstopped) < 1e-9


@pytest.mark.parametrize(("saved_under", "loaded_under"), DOZEN[:3], ids=["->".join(p) for p in DOZEN[:3]])
def test_c01_in_float32(saved_under: str, loaded_under: str, unstopped: Any) -> None:
    assert goes_on(saved_under, loaded_under, "32-true", unstopped) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("precision", "limit"), [("64-true", 1e-9), ("32-true", 1e-5)])
def test_every_ordered_pair(precision: str, limit: float, unstopped: Any) -> None:
    worst = {pair: goes_on(*pair, precision, unstopped) for pair in product(PLANS, PLANS)}
    rows = [[f"{worst[a, b]:.0e}" for b in PLANS] for a in PLANS]
    lines = [" ".join(f"{cell:>10}" for cell in ["", *PLANS])]
    lines += [" ".join(f"{cell:>10}" for cell in [a, *row]) for a, row in zip(PLANS, rows, strict=True)]
    table = "\n".join(lines)
    assert len(worst) == 64
    assert max(worst.values()) < limit, table
    print(f"largest relative difference of a loss, {precision}, saved under (row), gone on under (column)\n{table}")  # noqa: T201


@pytest.mark.parametrize("name", PLANS)
def test_a_checkpoint_is_as_large_as_one_copy(name: str, unstopped: Any) -> None:
    _, path = unstopped(name, "64-true")
    num_bytes = sum(tensor.nbytes for file in path.glob("*.safetensors") for tensor in load_file(file).values())
    parameters = list(gpt().parameters())
    # weights and two moments in float64, and a count of steps in float32
    assert num_bytes == 3 * 8 * sum(p.numel() for p in parameters) + 4 * len(parameters)
    gpt().double().load_state_dict(load_full(path), strict=True)


def test_another_optimizer_s_state_is_refused_by_name(unstopped: Any) -> None:
    _, path = unstopped("single", "64-true")
    with pytest.raises(RuntimeError, match=r"saved with AdamW, and this run has SGD"):
        run_ranks(sgd_rank, 1, PLANS["single"], str(path))


def sgd_rank(_rank: int, _world_size: int, plan: Plan, path: str) -> None:
    plan, module = make_module(replace(fit_of(plan, "64-true"), plan=plan))
    module._make_scheduler = None
    module._make_optimizer = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    quiet_trainer(plan, max_steps=STEPS).fit(module, loader(20, 12, shuffle=True), ckpt_path=path)
