"""The command as a user types it: refusals in words and soon, `mode=plan`, folders, paths, a whole run."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from whale_trainer.cli import compose_config, config_groups, plain_of
from whale_trainer.config import load_config
from whale_trainer.devices import FoundGpu, assign, found_cluster
from whale_trainer.errors import ConfigError
from whale_trainer.overrides import prepare, quoted
from whale_trainer.planning.plan import Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.shares import Interval

TRAIN = Path(__file__).parent.parent / "train.py"


def compose_and_check(*arguments: str) -> Any:
    return load_config(plain_of(compose_config(prepare(arguments, config_groups())), "/start"))


def command(folder: Path, *arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TRAIN), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["strateg=hybrid"], ["strateg", "unknown key", "did you mean strategy?"]),
        (["strategy=hybird"], ["strategy", "'hybird'", "did you mean hybrid?"]),
        (["optimizer.lrr=3"], ["optimizer.lrr", "3", "did you mean lr?"]),
        (["trainer.max_steps=3.5"], ["trainer.max_steps", "3.5 is not an integer"]),
        (["data=text"], ["data.path", "has to be given", "key=value"]),
        (["seed=[1"], ["seed", "'seed=[1'", "cannot be read", "quotes"]),
        (["seed=${nowhere}"], ["seed", "nowhere", "interpolation"]),
        (["trainer.accumulate_grad_batches=2"], ["trainer.accumulate_grad_batches", "strategy.micro_batches"]),
        (["mode=fitt"], ["mode", "fitt", "fit"]),
        (
            ["global_batch=-1", "timeout_s=nan", "model.width=x"],
            ["global_batch", "timeout_s", "model.width", "3 problems"],
        ),
    ],
    ids=lambda value: " ".join(value) if value[0].count("=") else "",
)
def test_refusals_in_our_form(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose_and_check(*arguments)
    for word in words:
        assert word in str(refusal.value)


def test_paths_need_no_quoting() -> None:
    path = "runs/a b,c=d/step-000002"
    config = compose_and_check(f"ckpt_path={path}")
    assert config.ckpt_path == f"/start/{path}"
    assert compose_and_check("ckpt_path=last").ckpt_path == "last"
    assert quoted("plain/path-1.0") == "plain/path-1.0"
    assert quoted("${now:%H}") == "${now:%H}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimizer.lrr=3", "global_batch=-1"], ["2 problems", "optimizer.lrr", "global_batch"]),
        (["cluster=single", "strategy=hybrid"], ["4", "1"]),
        (["trainer.precision=bf16-mixed"], ["bf16", "V100", "P100"]),
        (["global_batch=3"], ["global_batch", "3"]),
        (["strategy.scopes=[{layers: blok.*, replicate: auto}]"], ["blok.*", "blocks.0"]),
        (["data=text", "data.path=missing.txt"], ["missing.txt"]),
    ],
    ids=lambda value: " ".join(value) if value[0].count("=") else "",
)
def test_refused_commands_end_soon_and_leave_nothing(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    begin = time.monotonic()
    ended = command(tmp_path, *arguments)
    assert ended.returncode == 2, ended.stderr
    assert time.monotonic() - begin < 15
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr) < 2000
    for word in words:
        assert word in ended.stderr
    assert not list(tmp_path.rglob("*.*"))


def test_mode_plan(tmp_path: Path) -> None:
    ended = command(tmp_path, "mode=plan", "model=gpt2_xl", "cluster=a100_h100", "hydra.run.dir=out/a b,c")
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "out" / "a b,c"
    files = ("config.yaml", "overrides.yaml", "plan.json", "report.html", "summary.json", "timeline.json")
    assert sorted(p.name for p in folder.iterdir()) == list(files)
    plan = json.loads((folder / "plan.json").read_text())
    predicted = plan["predicted"]
    assert 0 < predicted["ideal_step_s"] < predicted["step_s"] <= predicted["even_step_s"]
    assert 0 < predicted["bubble_fraction"] < 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["predicted_step_s"] == predicted["step_s"]
    assert 0 < summary["search_s"] < 60
    for line in ("predicted: ", "bound by: ", "gain: ", "report.html"):
        assert line in ended.stdout
    assert {d["rank"] for d in plan["devices"]} == set(range(len(plan["devices"])))
    assert "cuts" in plan["tiles"][0]
    text = (folder / "config.yaml").read_text()
    assert "${" not in text
    assert yaml.safe_load(text)["model"]["width"] == 1600
    assert "A100" in ended.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_mode_plan_loads_neither_lightning_nor_wandb_nor_the_compiler(tmp_path: Path) -> None:
    code = (
        "import sys; from whale_trainer.cli import run; code = run(['mode=plan', 'hydra.run.dir=out']); "
        "print(code, [m for m in ('pytorch_lightning', 'wandb', 'torch._dynamo') if m in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stdout.splitlines()[-1] == "0 []"


def test_mode_plan_says_why_nothing_fits(tmp_path: Path) -> None:
    ended = command(tmp_path, "mode=plan", "strategy=auto", "model=gpt2_xl", "cluster=cpu_uneven", "hydra.run.dir=out")
    assert ended.returncode == 2
    assert ended.stderr.startswith("PlanError: no plan of this model fits on this cluster.")
    assert "GiB optimizer state" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_of_the_paper_tells_what_the_paper_measured(tmp_path: Path) -> None:
    ended = command(tmp_path, "experiment=whale_fig17_bert_large", "hydra.run.dir=out")
    assert ended.returncode == 0, ended.stderr
    assert "the paper measured 1.45 (figure 17)" in ended.stdout


SMALL = (
    "trainer.max_steps=2", "global_batch=8", "strategy.micro_batches=2", "data.validation_batch=8",
    "trainer.limit_val_batches=1", "trainer.val_check_interval=2", "model.num_layers=2", "model.width=32",
)  # fmt: skip


@pytest.mark.ranks
def test_the_readmes_command_runs_and_its_checkpoint_goes_on(tmp_path: Path) -> None:
    ended = command(tmp_path, "strategy=hybrid", "cluster=v100_p100", "hydra.run.dir=out", *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert "no GPU here: each of the 8 declared devices is a CPU process" in ended.stdout
    out = tmp_path / "out"
    assert len(list(tmp_path.rglob("config.yaml"))) - len(list(out.rglob("wandb/**/config.yaml"))) == 1
    rows = read_rows(out)
    assert [r["step"] for r in rows] == ["1", "2"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["exit"] == 0
    assert len(summary["ranks"]) == 8
    assert len(list((out / "wandb").glob("offline-run-*"))) == 1
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert not [p for p in checkpoint.iterdir() if p.suffix not in (".json", ".safetensors")]
    again = command(
        tmp_path, f"ckpt_path={checkpoint}", "hydra.run.dir=more", "logger=none", *SMALL, "trainer.max_steps=3"
    )
    assert again.returncode == 0, again.stderr
    assert [r["step"] for r in read_rows(tmp_path / "more")] == ["3"]
    sample = command(tmp_path, "mode=predict", "ckpt_path=last", "hydra.run.dir=out", "logger=none", *SMALL)
    assert sample.returncode == 0, sample.stderr
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["more", "out"]


def plan_for(*kinds: tuple[str, int]) -> Plan:
    tiles = tuple(Tile(Interval(0, 1), Interval(i, i + 1), (Shard(i),)) for i in range(len(kinds)))
    devices = tuple(PlannedDevice(i, kind, "n", gib << 30) for i, (kind, gib) in enumerate(kinds))
    return Plan(tiles, ("model",), 1, len(kinds), "1f1b", devices)


V100 = FoundGpu(1, "Tesla V100-SXM2-32GB", 32510 << 20)
P100 = FoundGpu(0, "Tesla P100-PCIE-16GB", 16280 << 20)
MIXED = plan_for(("V100-SXM2-32GB", 32), ("P100-PCIE-16GB", 16))


def test_g02_ranks_go_to_the_cards_of_their_kind() -> None:
    assert assign(MIXED, "auto", lambda: [P100, V100])[0] == ["cuda:1", "cuda:0"]


def test_without_a_gpu_every_declared_device_is_a_cpu_process() -> None:
    names, note = assign(MIXED, "auto", list)
    assert names == ["cpu", "cpu"]
    assert "no GPU here" in note


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_g05_other_gpus_than_declared_are_refused(accelerator: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        assign(MIXED, accelerator, lambda: [P100])
    for word in ("1 x V100-SXM2-32GB", "1 x Tesla P100-PCIE-16GB (16 GiB)", "trainer.accelerator=cpu", "cluster=auto"):
        assert word in str(refusal.value)
    assert assign(MIXED, "cpu", lambda: [P100])[0] == ["cpu", "cpu"]


def test_found_cluster() -> None:
    assert found_cluster(list)["nodes"] == [{"name": "here", "devices": {"CPU": 1}, "link": "pcie3"}]
    assert found_cluster(lambda: [P100, V100])["nodes"] == [
        {"name": "here", "devices": {"P100-PCIE-16GB": 1, "V100-SXM2-32GB": 1}, "link": "pcie3"}
    ]
    with pytest.raises(ConfigError, match="GeForce 256"):
        found_cluster(lambda: [FoundGpu(0, "GeForce 256", 1 << 25)])
