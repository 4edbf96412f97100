"""What a run leaves behind: metrics.csv, summary.json, one W&B run with a plain config, a sample of text."""

from __future__ import annotations

import csv
import json
import math
import sys
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import DummyLogger

from whale_trainer.errors import ConfigError, RankError
from whale_trainer.planning.plan import Plan, PlannedDevice, Prediction, Shard, Tile
from whale_trainer.planning.shares import Interval
from whale_trainer.report.summary import make_summary, settle_summary, write_summary
from whale_trainer.trainer.generate import generate
from whale_trainer.trainer.loggers import finish_logger, is_logged_in, make_logger, plain
from whale_trainer.trainer.metrics_file import MetricsFile
from whale_trainer.trainer.record import StepClock

PLAN = Plan(
    tiles=(Tile(Interval(0, 2), Interval(0, 3), (Shard(0),)), Tile(Interval(0, 2), Interval(3, 4), (Shard(1),))),
    layer_names=("a", "b"),
    micro_batches=1,
    global_batch=4,
    schedule="gpipe",
    devices=(PlannedDevice(0, "V100", "n", 100, 40), PlannedDevice(1, "P100", "n", 50)),
    predicted=Prediction(step_s=0.5),
)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def started(path: Path, after_step: int = 0) -> MetricsFile:
    file = MetricsFile(path, ["step", "epoch", "train/loss", "val/loss"])
    file.start(after_step)
    return file


def test_a_row_is_on_disk_when_it_is_written_and_is_completed_by_a_validation(tmp_path: Path) -> None:
    file = started(tmp_path / "m.csv")
    for step in (1, 2, 3):
        file.write({"step": step, "epoch": 0, "train/loss": 0.1 * step})
        assert rows(tmp_path / "m.csv")[-1]["step"] == str(step)
        if step == 2:
            file.write({"step": 2, "val/loss": 1 / 3})
    found = rows(tmp_path / "m.csv")
    assert [r["step"] for r in found] == ["1", "2", "3"]
    assert [r["val/loss"] for r in found] == ["", repr(1 / 3), ""]
    assert float(found[1]["train/loss"]) == 0.2
    assert float(found[2]["train/loss"]) == 0.1 * 3


def test_columns_that_come_later_keep_the_rows_before_them(tmp_path: Path) -> None:
    file = started(tmp_path / "m.csv")
    file.write({"step": 1, "train/loss": 1.0})
    file.write({"step": 1, "val/accuracy, top 1": 0.5})
    file.write({"step": 2, "train/loss": 2.0, "note": 'a "b",\nc'})
    assert rows(tmp_path / "m.csv") == [
        {"step": "1", "epoch": "", "train/loss": "1.0", "val/loss": "", "val/accuracy, top 1": "0.5", "note": ""},
        {"step": "2", "epoch": "", "train/loss": "2.0", "val/loss": "", "val/accuracy, top 1": "", "note": 'a "b",\nc'},
    ]


def test_a_resumed_run_goes_on_after_its_checkpoint_without_double_rows(tmp_path: Path) -> None:
    file = started(tmp_path / "m.csv")
    for step in range(1, 8):
        file.write({"step": step, "train/loss": float(step), "extra": step})
    with (tmp_path / "m.csv").open("a") as torn:
        torn.write("8,0,8.")  # killed while writing
    file = started(tmp_path / "m.csv", after_step=5)
    file.write({"step": 5, "val/loss": 9.0})
    for step in (6, 7):
        file.write({"step": step, "train/loss": -float(step)})
    found = rows(tmp_path / "m.csv")
    assert [int(r["step"]) for r in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [float(r["train/loss"]) for r in found] == [1, 2, 3, 4, 5, -6, -7]
    assert [r["extra"] for r in found] == ["1", "2", "3", "4", "5", "", ""]
    assert found[4]["val/loss"] == "9.0"


def test_a_fresh_start_in_a_used_folder_begins_at_step_one(tmp_path: Path) -> None:
    file = started(tmp_path / "m.csv")
    file.write({"step": 1, "train/loss": 1.0})
    file = started(tmp_path / "m.csv")
    file.write({"step": 1, "train/loss": 2.0})
    assert [r["train/loss"] for r in rows(tmp_path / "m.csv")] == ["2.0"]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "c", "train/loss"]), st.none() | st.floats() | st.text("x,\"'", max_size=4)
        ),
        max_size=6,
    ),
    st.integers(0, 6),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_are_read_back(tmp_path: Path, written: list[dict[str, Any]], cut: int) -> None:
    (tmp_path / "m.csv").unlink(missing_ok=True)
    file = started(tmp_path / "m.csv")
    for step, row in enumerate(written, start=1):
        file.write({"step": step})
        file.write({"step": step, **row})
    file = started(tmp_path / "m.csv", after_step=cut)
    found = rows(tmp_path / "m.csv")
    assert [int(r["step"]) for r in found] == list(range(1, min(cut, len(written)) + 1))
    for row, expected in zip(found, written, strict=False):
        for name, value in expected.items():
            assert row[name] == ("" if value is None else repr(value) if isinstance(value, float) else value)


def test_a_file_that_cannot_be_written_names_path_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = started(tmp_path / "m.csv")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(RankError, match=r"m.csv cannot be written \(.*No space left on device\): free some space"):
        file.write({"step": 1})


def test_the_speed_of_a_run_leaves_its_warm_up_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = StepClock()
    assert clock.usual_s is None
    for seconds in (9.0, 5.0, 5.0, 1.0, 2.0, 3.0):
        now[0] += seconds
        clock.tick()
        now[0] += 100.0  # a validation
        clock.restart()
    assert clock.warm == [1.0, 2.0, 3.0]
    assert clock.usual_s == 4.0
    clock.steps = [9.0, 1.0]
    assert clock.warm == [1.0]


def test_a_summary_is_json_with_null_for_what_a_run_does_not_have(tmp_path: Path) -> None:
    summary = make_summary(
        PLAN, steps=3, train_loss=math.inf, step_s=0.25, busy_fractions={1: 0.5}, peak_memory_bytes={0: 7}
    )
    read = json.loads(write_summary(tmp_path, summary).read_text())
    assert read == {
        "schema_version": 1,
        "steps": 3,
        "train_loss": None,
        "val_loss": None,
        "samples_per_s": None,
        "step_s": 0.25,
        "predicted_step_s": None,
        "bubble_fraction": 0.5,
        "predicted_bubble_fraction": None,
        "search_s": None,
        "plan_fingerprint": PLAN.fingerprint,
        "ranks": [
            {
                "rank": 0,
                "device": "V100",
                "busy_fraction": None,
                "predicted_busy_fraction": None,
                "peak_memory_bytes": 7,
                "planned_memory_bytes": 40,
                "framework_bytes": 0,
            },
            {
                "rank": 1,
                "device": "P100",
                "busy_fraction": 0.5,
                "predicted_busy_fraction": None,
                "peak_memory_bytes": None,
                "planned_memory_bytes": None,
                "framework_bytes": 0,
            },
        ],
        "emulation": None,
        "exit": 0,
    }
    assert make_summary(PLAN, is_comparable=True)["predicted_step_s"] == 0.5
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_the_command_s_exit_code_is_settled_even_when_no_rank_wrote_a_summary(tmp_path: Path) -> None:
    settle_summary(tmp_path, PLAN, 1)
    assert json.loads((tmp_path / "summary.json").read_text())["exit"] == 1
    write_summary(tmp_path, make_summary(PLAN, steps=5, exit_code=143))
    settle_summary(tmp_path, PLAN, 130, search_s=0.25)
    read = json.loads((tmp_path / "summary.json").read_text())
    assert (read["steps"], read["exit"], read["search_s"]) == (5, 130, 0.25)


class FakeRun:
    """Stands for a W&B run: keeps what it is told."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.id = "fake"
        self.metrics: list[dict[str, Any]] = []
        self.exit_code: int | None = None

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.metrics.append(dict(metrics))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """A stub of wandb; the runs that were started."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    runs: list[FakeRun] = []

    def init(**arguments: Any) -> FakeRun:
        if arguments["mode"] == "online":
            raise ConnectionError("connection refused")
        runs.append(FakeRun(**arguments))
        return runs[-1]

    stub = types.ModuleType("wandb")
    stub.__dict__.update(init=init)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return runs


class Colour(Enum):
    RED = "red"


def test_w01_w03_one_run_for_all_ranks_with_a_plain_resolved_config(tmp_path: Path, wandb: list[FakeRun]) -> None:
    facts = {
        "config": {
            "lr": 1e-3,
            "betas": (0.9, 0.95),
            "path": Path("/data"),
            "nested": {1: {"none": None, "colour": Colour.RED}},
        },
        "plan": PLAN.to_dict(),
        "overrides": ["seed=1", "hydra.run.dir=out/${now:%H}"],
    }
    made = [make_logger("wandb", tmp_path, rank=rank, facts=facts, options={"tags": ["a"]}) for rank in (1, 0, 2)]
    assert len(wandb) == 1
    run = wandb[0]
    assert run.arguments["mode"] == "offline"
    assert run.arguments["dir"] == str(tmp_path)
    assert run.arguments["tags"] == ["a"]
    config = run.arguments["config"]
    assert config["config"] == {
        "lr": 1e-3, "betas": [0.9, 0.95], "path": "/data", "nested": {"1": {"none": None, "colour": "red"}}
    }  # fmt: skip
    assert config["plan"]["tiles"][0]["shards"] == [{"rank": 0, "device": "V100", "weight": 1}]
    assert config["overrides"] == ["seed=1"]
    assert "${" not in json.dumps(config)
    assert isinstance(made[1], WandbLogger)
    made[1].log_metrics({"train/loss": 2.0}, step=4)
    assert run.metrics == [{"train/loss": 2.0, "trainer/global_step": 4}]
    for logger in made:
        finish_logger(logger, 1)
    assert run.exit_code == 1


def test_w04_a_server_that_cannot_be_reached_costs_one_warning(
    tmp_path: Path, wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    make_logger("wandb", tmp_path, rank=0, facts={}, options={})
    assert [run.arguments["mode"] for run in wandb] == ["offline"]
    assert [r.getMessage() for r in caplog.records] == [
        f"W&B cannot be reached (connection refused): this run is kept offline in {tmp_path}"
    ]


def test_a_user_is_logged_in_by_key_or_by_netrc(
    tmp_path: Path, wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert is_logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not is_logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert is_logged_in()


@pytest.mark.parametrize("kind", ["csv", "none"])
def test_without_a_tracker_nothing_is_imported(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    assert isinstance(make_logger(kind, tmp_path, rank=0, facts={}, options={}), DummyLogger)


def test_loggers_that_are_not_there_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"logger  'wanbd' is not one of wandb, csv, tensorboard, none"):
        make_logger("wanbd", tmp_path, rank=0, facts={}, options={})

    def missing(**_: object) -> None:
        raise ModuleNotFoundError

    monkeypatch.setattr("whale_trainer.trainer.loggers.TensorBoardLogger", missing)
    with pytest.raises(ConfigError, match=r"logger  tensorboard is not installed: pip install tensorboard"):
        make_logger("tensorboard", tmp_path, rank=0, facts={}, options={})


def test_plain_data_only_comes_out_of_plain() -> None:
    assert plain({"a": (1, {2.5}), Colour.RED: Path("x"), "t": True}) == {"a": [1, [2.5]], "Colour.RED": "x", "t": True}


def follow(tokens: torch.Tensor) -> torch.Tensor:
    """A language model over 10 tokens that is sure of the next number, and never looks at padding."""
    assert tokens.shape == (1, 4)
    return torch.nn.functional.one_hot((tokens + 1) % 10, 10).double() * 3


def test_text_goes_on_from_its_prompt_past_the_window() -> None:
    assert list(generate(follow, [7, 8], context=4, num_tokens=6, temperature=0)) == [9, 0, 1, 2, 3, 4]


def test_drawn_text_depends_on_the_seed_only() -> None:
    drawn = [list(generate(follow, [1], context=4, num_tokens=30, temperature=1.0, seed=seed)) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ValueError, match="at least one token"):
        list(generate(follow, [], context=4, num_tokens=1))
