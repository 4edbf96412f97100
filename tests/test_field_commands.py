"""Field cases of the whole command: folders, paths, two at once, launchers, failures. Each starts real processes."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

TRAIN = Path(__file__).parent.parent / "train.py"
SMALL = [
    "trainer.max_steps=2", "global_batch=8", "strategy=replicate", "cluster=cpu_uneven", "data.validation_batch=8",
    "trainer.limit_val_batches=1", "trainer.val_check_interval=2", "model.num_layers=2", "model.width=32",
]  # fmt: skip

BOOM = """
import os, signal
from pytorch_lightning import Callback

class Boom(Callback):
    def __init__(self, how):
        self.how = how

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            if self.how == "raise":
                raise ValueError("probe-17")
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def start(folder: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(TRAIN), *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def processes_with(probe: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if probe in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def steps(folder: Path) -> list[str]:
    with (folder / "metrics.csv").open() as file:
        return [row["step"] for row in csv.DictReader(file)]


def own_configs(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("config.yaml") if "wandb" not in p.parts]


def test_h01_one_command_has_one_folder(tmp_path: Path) -> None:
    code, _, err = finish(start(tmp_path, *SMALL, "hydra.run.dir=out/${now:%H-%M-%S-%f}"))
    assert code == 0, err
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (folder,) = (tmp_path / "out").iterdir()
    assert own_configs(tmp_path) == [folder / "config.yaml"]
    assert steps(folder) == ["1", "2"]
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1


def test_h04_h05_paths_mean_the_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a dog and a cat met a bird and a fish. " * 400)
    data = ["data=text", "data.path=./words.txt", "logger=none"]
    folder = "runs/a b,c=d"
    code, _, err = finish(start(tmp_path, *SMALL, *data, f"hydra.run.dir={folder}", "hydra.job.chdir=true"))
    assert code == 0, err
    config = yaml.safe_load((tmp_path / folder / "config.yaml").read_text())
    assert config["data"]["path"] == str(tmp_path / "words.txt")
    (checkpoint,) = (tmp_path / folder / "checkpoints").iterdir()
    printed = os.path.relpath(checkpoint, tmp_path)
    more = ["hydra.run.dir=more", "trainer.max_steps=3"]
    code, _, err = finish(start(tmp_path, *SMALL, *data, f"ckpt_path={printed}", *more))
    assert code == 0, err
    assert steps(tmp_path / "more") == ["3"]


def test_h07_l04_two_commands_at_once(tmp_path: Path) -> None:
    runs = [start(tmp_path, *SMALL, "logger=none", f"seed={seed}") for seed in (1, 2)]
    for code, _, err in map(finish, runs):
        assert code == 0, err
    folders = [p.parent for p in own_configs(tmp_path)]
    assert sorted(yaml.safe_load((f / "config.yaml").read_text())["seed"] for f in folders) == [1, 2]
    assert all(steps(f) == ["1", "2"] for f in folders)


@pytest.mark.parametrize(
    ("how", "words"), [("raise", ["probe-17", "rank 1"]), ("exit", ["rank 1", "3"]), ("kill", ["rank 1", "SIGKILL"])]
)
def test_l01_the_first_failure_ends_the_command(tmp_path: Path, how: str, words: list[str]) -> None:
    (tmp_path / "boom.py").write_text(BOOM)
    probe = uuid.uuid4().hex
    callback = f"callbacks.boom={{_target_: boom.Boom, how: {how}}}"
    begin = time.monotonic()
    process = start(tmp_path, *SMALL, callback, "logger=none", "trainer.max_steps=50", "hydra.run.dir=out", PROBE=probe)
    code, out, err = finish(process)
    assert code == 1, err
    assert time.monotonic() - begin < 40  # start included
    for word in words:
        assert word in err
    assert err.count("probe-17") <= 2  # the short form, and the line of its traceback
    assert "Connection closed" not in out + err
    assert not processes_with(probe)


def test_an_interrupt_ends_the_command(tmp_path: Path) -> None:
    probe = uuid.uuid4().hex
    process = start(tmp_path, *SMALL, "logger=none", "trainer.max_steps=5000", "hydra.run.dir=out", PROBE=probe)
    wait_for(lambda: (tmp_path / "out" / "metrics.csv").exists())
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, 30)
    assert code == 130, err
    assert not processes_with(probe)


def wait_for(condition: Any, timeout: float = 60) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout
        time.sleep(0.1)


def test_w01_torchrun_runs_the_command_once(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    two = "cluster.nodes=[{name: here, devices: {CPU: 2}, link: pcie3}]"
    ended = subprocess.run(
        [torchrun, "--nproc-per-node=2", str(TRAIN), *SMALL, two, "hydra.run.dir=out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert own_configs(tmp_path) == [tmp_path / "out" / "config.yaml"]
    assert steps(tmp_path / "out") == ["1", "2"]
    assert len(list((tmp_path / "out" / "wandb").glob("offline-run-*"))) == 1
