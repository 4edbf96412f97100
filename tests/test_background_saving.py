"""Saving in the background: what was copied is what is written, older checkpoints wait, errors come out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from whale_trainer.checkpoint import Piece, load_full, read_checkpoint
from whale_trainer.checkpoint.background import BackgroundWriter
from whale_trainer.checkpoint.snapshot import Snapshot
from whale_trainer.errors import CheckpointError


class Gate:
    """An exchange of one rank that stands still until it is opened, and counts who passes."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.passed = 0

    def __call__(self, value: Any) -> list[Any]:
        assert self.opened.wait(20)
        self.passed += 1
        return [value]


def snapshot(path: Path, weight: torch.Tensor, state: dict[str, Any] | None = None) -> Snapshot:
    state = {"global_step": 1, **(state or {})}
    return Snapshot(path, state, (Piece("weight", weight),), {"weight": tuple(weight.shape)}, {}, 0, 1)


def test_what_training_changes_meanwhile_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    gate, weight, counts = Gate(), torch.ones(4), [1, 2]
    writer = BackgroundWriter(gate)
    writer.start(snapshot(tmp_path / "c", weight, {"counts": counts}))
    weight.zero_()
    counts.append(3)
    assert not (tmp_path / "c").exists()
    gate.opened.set()
    writer.wait()
    assert torch.equal(load_full(tmp_path / "c")["weight"], torch.ones(4))
    assert read_checkpoint(tmp_path / "c").state["counts"] == [1, 2]


def test_the_next_save_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    gate, weight = Gate(), torch.ones(4)
    writer = BackgroundWriter(gate)
    writer.start(snapshot(tmp_path / "a", weight))
    second = threading.Thread(target=lambda: writer.start(snapshot(tmp_path / "b", weight + 1)))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.opened.set()
    second.join(20)
    assert (tmp_path / "a" / "index.json").is_file()
    writer.wait()
    assert torch.equal(load_full(tmp_path / "a")["weight"], torch.ones(4))  # its memory was taken again, after it
    assert torch.equal(load_full(tmp_path / "b")["weight"], torch.ones(4) + 1)


def test_an_older_checkpoint_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    gate = Gate()
    gate.opened.set()
    writer = BackgroundWriter(gate)
    writer.start(snapshot(tmp_path / "old", torch.ones(4)))
    writer.wait()
    gate.opened.clear()
    writer.start(snapshot(tmp_path / "new", torch.ones(4)))
    writer.remove(tmp_path / "old")
    assert torch.equal(load_full(tmp_path / "old")["weight"], torch.ones(4))
    gate.opened.set()
    writer.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
    writer.remove(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_is_heard_of_at_the_next_step_and_removes_nothing(tmp_path: Path) -> None:
    gate = Gate()
    writer = BackgroundWriter(gate)
    (tmp_path / "file").write_text("")
    (tmp_path / "old").mkdir()
    writer.start(snapshot(tmp_path / "file" / "new", torch.ones(4)))
    writer.remove(tmp_path / "old")
    writer.check()  # still in flight
    gate.opened.set()
    assert writer._thread is not None
    writer._thread.join(20)
    with pytest.raises(CheckpointError, match=r"file/new could not be written by rank 0"):
        writer.check()
    writer.check()  # told once
    assert (tmp_path / "old").is_dir()


def test_state_that_is_not_plain_is_refused_in_the_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mine is a builtins.object"):
        BackgroundWriter(Gate()).start(snapshot(tmp_path / "c", torch.ones(1), {"mine": object()}))
