"""Checkpoints of whole commands: another layout, one plain file, a full disk, a kill while saving. Real processes."""

from __future__ import annotations

import csv
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from launched import Command, start
from safetensors.torch import load_file
from whale_trainer.models.gpt import GPT

from whale_trainer.checkpoint import load_full, newest_checkpoint, read_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

TRAIN = Path(__file__).parent.parent / "train.py"
MODEL = {"num_layers": 2, "width": 32, "num_heads": 4, "num_kv_heads": 2}
SMALL = [
    "global_batch=8", "cluster.nodes=[{name: here, devices: {CPU: 2}, link: pcie3}]", "logger=none",
    "trainer.limit_val_batches=1", "data.validation_batch=8", "hydra.run.dir=out", "timeout_s=60",
    *(f"model.{k}={v}" for k, v in MODEL.items()),
]  # fmt: skip

SMALL_DISK = """
import resource
from pytorch_lightning import Callback

class SmallDisk(Callback):
    '''From a step on, no file of one rank may grow beyond some bytes.'''

    def __init__(self, rank, step, num_bytes):
        self.rank, self.step, self.num_bytes = rank, step, num_bytes

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes, resource.RLIM_INFINITY))
"""


def train(folder: Path, *arguments: str) -> Command:
    return start([TRAIN, *SMALL, *arguments], folder)


def done(command: Command, code: int = 0, timeout: float = 150) -> Command:
    assert command.end(timeout) == code, command.out + command.err
    return command


def losses(folder: Path) -> dict[int, float]:
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file)}


def test_c01_another_layout_and_one_plain_file(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    save = ["checkpoint.every_n_steps=3", "checkpoint.save_top_k=-1", "trainer.max_steps=6"]
    runs = [
        train(whole, *save, "strategy=split"),
        train(stopped, *save, "strategy=split", "checkpoint.asynchronous=true"),
    ]
    for run in runs:
        done(run)
    shutil.rmtree(stopped / "out" / "checkpoints" / "step-000006")
    done(train(stopped, *save, "strategy=pipeline", "ckpt_path=last"))
    found, expected = losses(stopped / "out"), losses(whole / "out")
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert found == pytest.approx(expected, rel=1e-5)
    model = ["mode=export", "ckpt_path=last"]
    exported = done(train(stopped, *model))
    assert "model.safetensors: the weights of step-000006" in exported.out
    weights = load_file(stopped / "out" / "model.safetensors")
    config = yaml.safe_load((stopped / "out" / "config.yaml").read_text())["model"]
    config.pop("_target_")
    plain = GPT(**config)
    plain.load_state_dict(weights, strict=True)
    saved = load_full(stopped / "out" / "checkpoints" / "step-000006")
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    # first weights from that file, without a step: the loss is the one that a seventh step would begin with
    again = done(train(whole, "strategy=replicate", "init_from=../stopped/out/model.safetensors", "mode=validate"))
    assert "val/loss" in again.out
    refused = train(whole, "init_from=../stopped/out/model.safetensors", "model.width=64", "strategy=replicate")
    assert refused.end(60) == 2
    assert "init_from" in refused.err
    assert "the model's is" in refused.err


@pytest.mark.parametrize(("rank", "asynchronous"), [(1, False), (0, True)], ids=["rank 1", "rank 0, background"])
def test_a_full_disk_on_any_rank_ends_the_command(tmp_path: Path, rank: int, asynchronous: bool) -> None:
    (tmp_path / "small_disk.py").write_text(SMALL_DISK)
    callback = f"callbacks.disk={{_target_: small_disk.SmallDisk, rank: {rank}, step: 3, num_bytes: 20000}}"
    save = [
        "checkpoint.every_n_steps=2",
        "trainer.max_steps=500",
        f"checkpoint.asynchronous={str(asynchronous).lower()}",
    ]
    begin = time.monotonic()
    command = done(train(tmp_path, *save, "strategy=split", callback), 1)
    assert time.monotonic() - begin < 100  # the start of a busy machine included
    assert "step-000004 could not be written" in command.err
    assert f"rank {rank} ([Errno 27] File too large)" in command.err
    assert "checkpoints saved before it are untouched" in command.err
    assert command.err.count("could not be written") == 1
    assert command.leaves_nothing()
    newest = newest_checkpoint(tmp_path / "out")
    assert newest is not None
    assert newest.name == "step-000002"
    with read_checkpoint(newest) as reader:
        assert all(reader.read(name, key=key).isfinite().all() for key in reader.keys for name in reader.names(key))
    assert [p.name for p in newest.parent.iterdir()] == ["step-000002"]
    done(train(tmp_path, "strategy=replicate", "ckpt_path=last", "trainer.max_steps=3"))
    assert list(losses(tmp_path / "out")) == [1, 2, 3]


def killed_while_saving(tmp_path: Path, times: int, *arguments: str) -> None:
    """Kill all processes soon after a checkpoint begins, resume from the last one, compare with a whole run."""
    generator = random.Random(7)
    save = ["checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1", "strategy=split", *arguments]
    num_steps = 4 * times + 4
    (tmp_path / "whole").mkdir()
    done(train(tmp_path / "whole", *save, f"trainer.max_steps={num_steps}", "checkpoint.every_n_steps=null"))
    expected = losses(tmp_path / "whole" / "out")
    checkpoints = tmp_path / "out" / "checkpoints"
    for time_ in range(times):
        before = {p.name for p in checkpoints.glob("*")}
        command = train(tmp_path, *save, f"trainer.max_steps={num_steps}", "ckpt_path=last")
        deadline = time.monotonic() + 120
        wanted = generator.randint(1, 3)
        while len({p.name for p in checkpoints.glob("*")} - before) < wanted:
            assert time.monotonic() < deadline
            assert command.process.poll() is None, command.process.communicate()
            time.sleep(0.002)
        time.sleep(generator.uniform(0.0, 0.2))
        for pid in command.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.end(30)
        newest = newest_checkpoint(tmp_path / "out")
        assert newest is not None, time_
        load_full(newest)
    damaged = newest_checkpoint(tmp_path / "out")
    assert damaged is not None
    (damaged / "rank1.safetensors").unlink()
    resumed = done(train(tmp_path, *save, f"trainer.max_steps={num_steps}", "ckpt_path=last"))
    assert damaged.name not in resumed.out.split("going on from")[1].splitlines()[0]
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-6)


def test_c03_killed_while_saving(tmp_path: Path) -> None:
    killed_while_saving(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_c03_twenty_kills(tmp_path: Path, asynchronous: str) -> None:
    killed_while_saving(tmp_path, 20, f"checkpoint.asynchronous={asynchronous}")
