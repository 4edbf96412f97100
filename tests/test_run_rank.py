"""One rank's whole run: what it writes, how it goes on, and that all of it is the same under every plan."""

from __future__ import annotations

import csv
import json
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from ranks import run_ranks
from runs import single
from safetensors.torch import load_file
from tilings import plan_of, tile

from whale_trainer.checkpoint import load_full, newest_checkpoint
from whale_trainer.config import Config, load_config
from whale_trainer.describe import describe
from whale_trainer.errors import CheckpointError
from whale_trainer.planning.plan import Plan
from whale_trainer.rank_info import RankInfo
from whale_trainer.trainer import find_checkpoint, run_rank
from whale_trainer.trainer.callbacks import ProgressLines, RankGuard, figures
from whale_trainer.trainer.record import RunRecord

pytestmark = pytest.mark.ranks

CONF = Path(__file__).parent.parent / "conf"
MODEL = {"vocab_size": 11, "width": 12, "num_layers": 2, "num_heads": 6, "num_kv_heads": 3, "context": 5}
MIXED = plan_of(
    [tile((0, 2), (0, 3), (0, 2), (1, 1)), tile((2, 4), (0, 3), 2), tile((0, 4), (3, 4), 3)],
    micro_batches=2,
    global_batch=8,
)
PIPELINE = plan_of([tile((0, 2), (0, 4), 0), tile((2, 4), (0, 4), 1)], micro_batches=2, global_batch=8)
COLUMNS = ["step", "epoch", "train/loss", "val/loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s", "time_left_s"]


def make_config(**changes: Any) -> dict[str, Any]:
    """A small run as plain data: 20 samples, batches of 8, 3 steps an epoch."""
    config: dict[str, Any] = {
        "mode": "fit",
        "seed": 5,
        "global_batch": 8,
        "strategy": yaml.safe_load((CONF / "strategy" / "single.yaml").read_text()),
        "cluster": yaml.safe_load((CONF / "cluster" / "single.yaml").read_text()),
        "model": {"_target_": "whale_trainer.models.gpt.GPT", **MODEL, "dropout": 0.1},
        "data": {
            "train": {"_target_": "lightning_runs.Tokens", "size": 20},
            "validation": {"_target_": "lightning_runs.Tokens", "size": 7, "seed": 4},
            "drop_last": False,
            "validation_batch": 3,
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01, "betas": [0.9, 0.95]},
        "scheduler": {"_target_": "whale_trainer.schedules.warmup_cosine", "warmup_steps": 2},
        "trainer": {
            "max_steps": 7,
            "precision": "64-true",
            "gradient_clip_val": 0.5,
            "val_check_interval": 2,
            "check_val_every_n_epoch": None,
        },
        "logger": {"kind": "csv"},
        "checkpoint": {"every_n_steps": 3, "save_top_k": -1},
    }
    for path, value in changes.items():
        section, _, name = path.partition("__")
        if name:
            config[section] = {**config[section], name: value}
        else:
            config[section] = value
    return config


@contextmanager
def untouched() -> Iterator[None]:
    """Put back what a run sets for its process, since the pool's processes go on."""
    names = ("whale_trainer", "pytorch_lightning", "lightning_fabric")
    before = [(logging.getLogger(n), logging.getLogger(n).level, logging.getLogger(n).handlers[:]) for n in names]
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    rank = rank_zero_only.rank
    try:
        yield
    finally:
        rank_zero_only.rank = rank
        for logger, level, old in before:
            logger.setLevel(level)
            logger.handlers[:] = old
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def run(rank: int, world_size: int, plain: dict[str, Any], plan: Plan, folder: str) -> None:
    config = load_config(plain)
    with untouched():
        run_rank(config, with_model(config, plan), None, Path(folder), RankInfo(rank, world_size, rank))


def with_model(config: Config, plan: Plan) -> Plan:
    model = config.model.build()
    sample = config.data.train.build()[0]
    return replace(plan, model=describe(model, {name: value[None] for name, value in sample.items()}))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def curve(folder: Path) -> dict[str, list[float]]:
    """The columns that no plan and no clock may change."""
    names = ("step", "epoch", "train/loss", "val/loss", "lr", "grad_norm")
    return {name: [float(row[name] or "nan") for row in rows(folder)] for name in names}


def assert_same_curve(folder: Path, expected: Path) -> None:
    found, wanted = curve(folder), curve(expected)
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=1e-9, nan_ok=True), name


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_the_same_record_under_every_plan(tmp_path: Path) -> None:
    one, mixed = tmp_path / "one", tmp_path / "mixed"
    one.mkdir()
    mixed.mkdir()
    run_ranks(run, 1, make_config(), single(MIXED), str(one))
    run_ranks(run, 4, make_config(), MIXED, str(mixed))

    assert list(rows(one)[0]) == COLUMNS
    assert [row["step"] for row in rows(one)] == list("1234567")
    assert [bool(row["val/loss"]) for row in rows(one)] == [False, True, False, True, False, True, False]
    assert_same_curve(mixed, one)
    assert sorted(p.name for p in mixed.iterdir()) == [
        "checkpoints",
        "measured.json",
        "metrics.csv",
        "summary.json",
    ]
    assert sorted(p.name for p in (mixed / "checkpoints").iterdir()) == ["step-000003", "step-000006", "step-000007"]
    found = summary(mixed)
    assert (found["steps"], found["exit"], found["search_s"], found["predicted_step_s"]) == (7, 0, None, None)
    assert found["train_loss"] == float(rows(mixed)[-1]["train/loss"])
    assert found["val_loss"] == float(rows(mixed)[5]["val/loss"])
    assert found["samples_per_s"] > 0
    assert found["step_s"] > 0
    assert [entry["rank"] for entry in found["ranks"]] == [0, 1, 2, 3]
    assert all(entry["peak_memory_bytes"] > 1 << 20 for entry in found["ranks"])
    weights, expected = (load_full(folder / "checkpoints" / "step-000007") for folder in (mixed, one))
    config = load_config(make_config())
    config.model.build().double().load_state_dict(weights, strict=True)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("killed_after", [3, 6])
def test_last_goes_on_as_if_the_run_had_never_stopped(tmp_path: Path, killed_after: int) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    run_ranks(run, 2, make_config(), PIPELINE, str(whole))
    run_ranks(run, 2, make_config(), PIPELINE, str(stopped))
    for later in (stopped / "checkpoints").iterdir():
        if int(later.name.removeprefix("step-")) > killed_after:
            (later / "rank1.safetensors").unlink()  # damaged, so passed over
    newest = newest_checkpoint(stopped)
    assert newest is not None
    assert newest.name == f"step-{killed_after:06d}"
    run_ranks(run, 2, make_config(ckpt_path="last"), PIPELINE, str(stopped))
    assert repr(curve(stopped)) == repr(curve(whole))
    assert summary(stopped)["steps"] == 7
    again = newest_checkpoint(stopped)
    assert again is not None
    assert again.name == "step-000007"


def test_p06_the_best_and_the_newest_are_kept_side_by_side(tmp_path: Path) -> None:
    config = make_config(checkpoint={"every_n_steps": 1, "monitor": "val/loss", "save_top_k": 1}, optimizer__lr=0.2)
    run_ranks(run, 2, config, PIPELINE, str(tmp_path))
    losses = {int(row["step"]): float(row["val/loss"]) for row in rows(tmp_path) if row["val/loss"]}
    best = min(losses, key=lambda step: losses[step])
    kept = sorted(int(p.name.removeprefix("step-")) for p in (tmp_path / "checkpoints").iterdir())
    assert kept == sorted({best, 7})


def test_other_modes_take_a_checkpoint_and_keep_the_training_s_summary(tmp_path: Path) -> None:
    run_ranks(run, 2, make_config(), PIPELINE, str(tmp_path))
    trained = summary(tmp_path)
    run_ranks(run, 1, make_config(mode="validate", ckpt_path="last"), single(PIPELINE), str(tmp_path))
    validated = summary(tmp_path)
    assert validated["val_loss"] != trained["val_loss"]  # of step 6, and of the checkpoint of step 7
    assert {k: v for k, v in validated.items() if k not in ("val_loss", "ranks", "plan_fingerprint")} == {
        k: v for k, v in trained.items() if k not in ("val_loss", "ranks", "plan_fingerprint")
    }
    run_ranks(run, 2, make_config(mode="predict", ckpt_path="last"), PIPELINE, str(tmp_path))
    assert load_file(tmp_path / "predictions.safetensors")["outputs"].shape == (7, 5, 11)
    assert len(rows(tmp_path)) == 7


def test_a_sample_of_text_is_the_same_under_every_plan(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be, or not to be, that is the question: " * 5)
    data = {"_target_": "whale_trainer.data.TextFiles", "path": str(tmp_path / "text"), "context": 5}
    config = make_config(
        model__vocab_size=256,
        data={"train": data, "validation": {**data, "split": "validation"}, "drop_last": False},
        mode="predict",
    )
    texts = []
    for plan in (single(PIPELINE), PIPELINE):
        folder = tmp_path / f"{plan.num_ranks}"
        folder.mkdir()
        run_ranks(run, plan.num_ranks, config, plan, str(folder))
        texts.append((folder / "sample.txt").read_text())
    assert texts[0] == texts[1]
    assert len(texts[0].encode()) >= 256


class Fails(Callback):
    """Raises at a step of one rank."""

    def __init__(self, code: int | None = None) -> None:
        self.code = code

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            if self.code is None:
                raise ValueError("probe-17")
            raise SystemExit(self.code)


@pytest.mark.parametrize(("code", "expected"), [(None, 1), (143, 143)])
def test_a_run_that_ends_early_leaves_its_record_all_the_same(tmp_path: Path, code: int | None, expected: int) -> None:
    callbacks = {"fails": {"_target_": "test_run_rank.Fails", "code": code}}
    with pytest.raises(BaseException, match="probe-17" if code is None else "143"):
        run_ranks(run, 1, make_config(callbacks=callbacks), single(PIPELINE), str(tmp_path))
    assert [row["step"] for row in rows(tmp_path)] == list("1234")
    assert (summary(tmp_path)["steps"], summary(tmp_path)["exit"]) == (4, expected)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_the_place_to_start_from_is_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert find_checkpoint(None, tmp_path, tells=True) is None
    assert find_checkpoint("last", tmp_path, tells=True) is None
    assert "there is no whole checkpoint under" in caplog.text
    with pytest.raises(CheckpointError, match="elsewhere does not exist"):
        find_checkpoint(str(tmp_path / "elsewhere"), tmp_path, tells=True)


def test_the_launcher_s_signal_handlers_are_put_back_when_a_loop_starts() -> None:
    with untouched():
        mine = [lambda *_: None, lambda *_: None]
        signal.signal(signal.SIGINT, mine[0])
        signal.signal(signal.SIGTERM, mine[1])
        guard = RankGuard()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Lightning does in between
        guard.on_train_start(None, None)  # type: ignore[arg-type]
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == mine


def test_progress_without_a_terminal_is_a_line_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    record = RunRecord(tmp_path, global_batch=8)
    lines = ProgressLines(record)
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    record.samples_per_s = 1234.5
    record.clock.recent.append(0.5)
    for step in range(1, 8):
        record.train_loss, record.time_left_s = 7.0 / step, (7 - step) * 600.0
        trainer: Any = SimpleNamespace(global_step=step, estimated_stepping_batches=7)
        lines.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
        now[0] += 2.0
    assert [r.getMessage() for r in caplog.records] == [
        "step 1/7  loss 7.0000  samples/s 1,234.5  left 1:00:00",
        "step 4/7  loss 1.7500  samples/s 1,234.5  left 30:00",
        "step 7/7  loss 1.0000  samples/s 1,234.5  left 0:00",
    ]
    assert dict(figures(record))["left"] == "0:00"


def test_the_trainer_is_silent_about_what_a_plan_makes_untrue(tmp_path: Path) -> None:
    text = run_ranks(heard, 1, str(tmp_path))[0]
    assert text == ""


def heard(_rank: int, _world_size: int, folder: str) -> str:
    """What a run on rank 0 writes to standard error."""
    import io

    stream, sys.stderr = sys.stderr, io.StringIO()
    try:
        run(0, 1, make_config(trainer__max_steps=1), single(PIPELINE), folder)
        return sys.stderr.getvalue()
    finally:
        sys.stderr = stream
