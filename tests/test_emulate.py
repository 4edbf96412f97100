"""Emulated devices: the pace is what the declared hardware would take, and the numbers are those of any other run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import run_ranks
from runs import gpt, rank_batch, token_batch
from tilings import plan_of, tile

from whale_trainer.cluster import load_cluster
from whale_trainer.describe import describe
from whale_trainer.errors import PlanError, RankError
from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.pieces import gradient_buckets, parameter_layouts
from whale_trainer.planning.plan import Plan, Tile
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.simulation.paces import (
    ActionPace,
    Paces,
    gradient_sum_paces,
    link_paces,
    tensor_group_paces,
)
from whale_trainer.planning.simulation.plan_times import PlanTimes
from whale_trainer.planning.simulation.simulate import simulate
from whale_trainer.planning.simulation.times import TimeModel
from whale_trainer.runtime.emulated import EmulatedPace
from whale_trainer.runtime.engine import Engine
from whale_trainer.runtime.measured import gather_steps
from whale_trainer.runtime.meter import MemoryMeter

SIZES: dict[str, int] = {"width": 48, "vocab_size": 64, "context": 16}
PASS_S = 0.03
"""Of a pass of one sample on a declared device: far longer than the arithmetic, so that a busy machine keeps up."""
CLUSTER = {
    "nodes": [
        {"name": "a", "devices": {"slow": 2}, "link": {"bandwidth_gbit_per_s": 0.02, "latency_us": 2000}},
        {"name": "b", "devices": {"slow": 2}, "link": {"bandwidth_gbit_per_s": 0.02, "latency_us": 2000}},
    ],
    "network": {"bandwidth_gbit_per_s": 0.01, "latency_us": 4000},
    "kinds": {
        "slow": {
            "peak_tflops": {"fp32": 0.001},
            "sustained_tflops": {"fp32": 0.001},
            "memory_gib": 1,
            "memory_bandwidth_gb_per_s": 1,
            "source": "made up",
        }
    },
}


def paces_of(plan: Plan, spec: Any) -> Paces:
    """Each pass takes as long as the tile has layers and samples; links as declared."""
    times = TimeModel(CostModel(spec, PRECISIONS["32-true"]), load_cluster(CLUSTER))
    layouts = parameter_layouts(plan, spec)
    actions = []
    for index, part in enumerate(plan.tiles):
        seconds = PASS_S * len(part.samples) * len(part.layers) / plan.num_layers
        for rank in part.ranks:
            passes = {"F": (seconds,), "B": (2 * seconds,)}
            actions.append(ActionPace(index, rank, len(part.samples), passes))
    return Paces(
        plan_fingerprint=plan.fingerprint,
        stretch=1.0,
        least_stretch=1.0,
        core_s=(1e-4,) * plan.num_ranks,
        actions=tuple(actions),
        optimizer_s=(PASS_S / 3,) * plan.num_ranks,
        links=link_paces(plan, times),
        tensor_groups=tensor_group_paces(plan, times),
        sums=gradient_sum_paces(plan, times, layouts, gradient_buckets(layouts)),
        sums_wait=(False,) * plan.num_ranks,
    )


class _Paced(PlanTimes):
    """The declared times, with passes and optimizer as in `paces_of`."""

    def pass_s(self, tile: int, samples: int) -> tuple[float, float]:
        part = self.plan.tiles[tile]
        seconds = PASS_S * samples * len(part.layers) / self.plan.num_layers
        return seconds, 2 * seconds

    def optimizer_s(self, tile: int) -> float:
        return PASS_S / 3


def spec_of() -> Any:
    return describe(gpt(**SIZES), token_batch(2, 0, **_tokens()))


def _tokens() -> dict[str, int]:
    return {"vocab_size": SIZES["vocab_size"], "context": SIZES["context"]}


def emulated_run(rank: int, _world_size: int, plan: Plan, is_emulated: bool) -> dict[str, Any]:
    """Losses of some steps, and the measured step times and late actions."""
    spec = spec_of()
    pace = EmulatedPace(plan, spec, paces_of(plan, spec), rank) if is_emulated else None
    torch.manual_seed(0)
    engine = Engine(plan, spec, gpt(**SIZES), rank=rank, pace=pace)
    optimizer = torch.optim.AdamW(engine.module.parameters(), lr=1e-3)
    losses = []
    for step in range(5):
        batch = token_batch(plan.global_batch, step, **_tokens())
        losses.append(engine.train_step(rank_batch(batch, plan, rank, plan.global_batch), step).loss)
        optimizer.step()
        engine.pace.optimizer_done()
    engine.pace.begin_step()
    steps = gather_steps(engine.pace.trace, plan, rank, 4)
    late = 0 if pace is None else pace.num_late
    return {"losses": losses, "steps": [s.step_s for s in steps], "late": late}


def placed(tiles: list[Tile], micro_batches: int, global_batch: int) -> Plan:
    """The plan with one rank on each node of the cluster."""
    plan = plan_of(tiles, micro_batches=micro_batches, global_batch=global_batch)
    return replace(plan, devices=tuple(replace(d, kind="slow", node="ab"[d.rank]) for d in plan.devices))


PLANS = {
    "data parallel": placed([tile((0, 6), (0, 3), 0), tile((0, 6), (3, 4), 1)], 2, 8),
    "pipeline": placed([tile((0, 4), (0, 2), 0), tile((4, 6), (0, 2), 1)], 4, 8),
    "tensor": placed([tile((0, 6), (0, 4), (0, 3), (1, 1))], 1, 4),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", PLANS)
def test_the_numbers_are_the_same_and_the_step_takes_what_the_simulator_says(name: str) -> None:
    plan = PLANS[name]
    spec = spec_of()
    emulated = run_ranks(emulated_run, plan.num_ranks, plan, True)
    free = run_ranks(emulated_run, plan.num_ranks, plan, False)
    assert [r["losses"] for r in emulated] == [r["losses"] for r in free]
    cluster = load_cluster(CLUSTER)
    predicted = simulate(plan, _Paced(plan, TimeModel(CostModel(spec, PRECISIONS["32-true"]), cluster))).step_s
    if name == "tensor":
        # its sums inside the layers are no part of the made up passes
        predicted = 4 * 3 * PASS_S
    steps = emulated[0]["steps"]
    assert min(steps) >= predicted * 0.99
    if not any(r["late"] for r in emulated) and name != "tensor":
        assert min(steps) <= predicted * 1.1


def test_paces_are_read_back(tmp_path: Path) -> None:
    plan = PLANS["pipeline"]
    paces = paces_of(plan, spec_of())
    paces.write(tmp_path)
    assert Paces.read(tmp_path, plan) == paces


def test_paces_of_another_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"emulation\.json cannot be read .* emulate=true"):
        Paces.read(tmp_path, PLANS["pipeline"])
    paces_of(PLANS["pipeline"], spec_of()).write(tmp_path)
    with pytest.raises(PlanError, match="made for another plan"):
        Paces.read(tmp_path, PLANS["tensor"])


def test_a_device_that_is_too_small_fails_in_words() -> None:
    with MemoryMeter(10_000, "a P100"):
        kept = [torch.zeros(1000) for _ in range(2)]
        with pytest.raises(RankError, match="out of memory, as a P100 would be") as caught:
            kept.append(torch.zeros(1000))
    text = str(caught.value)
    assert "12,000 bytes are needed at once, it has 10,000" in text
    assert "12,000    3 x zeros (1000,) torch.float32" in text
    assert "global_batch" in text


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_command_compares_prediction_and_measurement(tmp_path: Path) -> None:
    """A whole emulated run: calibrated, planned, paced, metered, compared. No figure of time is asserted."""
    train = Path(__file__).parent.parent / "train.py"
    arguments = (
        "strategy=replicate cluster=cpu_uneven emulate=true trainer.max_steps=9 logger=none model.num_layers=1 "
        "model.width=32 global_batch=8 trainer.limit_val_batches=0 hydra.run.dir=run"
    )
    ended = subprocess.run(
        [sys.executable, str(train), *arguments.split()], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    assert "one second of the declared devices takes" in ended.stdout
    assert "step: predicted" in ended.stdout
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    emulation = summary["emulation"]
    assert emulation["stretch"] == pytest.approx(1.5 * emulation["least_stretch"])
    assert emulation["actions"] == 3 * 4 * 4  # ranks, steps after the warm-up, two passes and two meetings in each
    assert summary["predicted_step_s"] > 0
    assert summary["step_s"] > summary["predicted_step_s"] * 0.5
    for rank in summary["ranks"]:
        assert 0 < rank["busy_fraction"] <= 1
        assert 0 < rank["predicted_busy_fraction"] <= 1
        assert 0.9 < rank["peak_memory_bytes"] / rank["planned_memory_bytes"] <= 1
    profile = yaml.safe_load((run / "profile.yaml").read_text())
    fast, slow = (profile["kinds"][kind]["layers"][1]["rows"][0]["forward_s"] for kind in ("cpu-fast", "cpu-slow"))
    assert slow / fast == pytest.approx(2, rel=1e-3)
    page = (run / "report.html").read_text()
    assert 'data-figure="measured"' in page
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted here", "measured here"}
