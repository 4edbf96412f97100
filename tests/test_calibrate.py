"""`mode=calibrate`: robust figures, failures that are data, and the whole command on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from calibrated import Chain, Points
from configs import edited, small_config
from torch.utils.data import default_collate

from whale_trainer.calibration import calibrate
from whale_trainer.calibration.journal import Journal
from whale_trainer.calibration.layers import parts_of, trial_name
from whale_trainer.calibration.present import Present, free_bytes, present_devices
from whale_trainer.calibration.results import Occasion, cluster_section, kind_times, link_times
from whale_trainer.calibration.run import sample_sizes
from whale_trainer.calibration.statistics import fit_line, latency_and_rate, repeated, robust, without_warm_up
from whale_trainer.calibration.trials import DeviceJob, attempt, measure_device, reason
from whale_trainer.cluster import load_cluster
from whale_trainer.config import Config, load_config
from whale_trainer.describe import describe
from whale_trainer.device_kinds import KINDS
from whale_trainer.devices import FoundGpu
from whale_trainer.errors import ConfigError
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.plan import Plan, PlannedDevice, Shard, Tile
from whale_trainer.planning.shares import Interval
from whale_trainer.planning.simulation.profile import KindTimes, LayerTimes, Profile, identity_of, load_profile
from whale_trainer.rank_info import RankInfo

TRAIN = Path(__file__).parent.parent / "train.py"
WHEN = Occasion("desk", "2026-01-31T09:30:00Z")
CPU = torch.device("cpu")


# ---- statistics ----


def calls(*times: float) -> Any:
    """A call that takes the given seconds, one after another, and the last one for ever."""
    left = list(times)
    return lambda: (left.pop(0) if len(left) > 1 else left[0],)


def test_n06_the_first_calls_do_not_count() -> None:
    (figure,) = repeated(calls(2.0, 0.3, 0.02, 0.02, 0.02))
    assert figure.median_s == 0.02
    assert figure.spread_s == 0
    assert figure.repeats == 7
    (figure,) = repeated(calls(2.0, 2.0, 0.02))
    assert figure.median_s == 0.02, "two slow calls agree, and a third one is asked for"


def test_short_and_scattered_times_are_repeated_more() -> None:
    (figure,) = repeated(calls(1e-4))
    assert figure.repeats == 30
    (figure,) = repeated(calls(*[0.02] * 4, *[0.02, 0.03] * 10, 0.03))
    assert figure.repeats > 7


def test_one_disturbed_time_moves_nothing() -> None:
    assert robust([1.0] * 6 + [50.0]).median_s == 1.0
    assert without_warm_up([9.0, 5.0, 1.0, 1.0] + [1.0] * 16) == [1.0] * 17
    assert len(without_warm_up([2.0**i for i in range(20)])) == 8


POINTS = [(float(1 << i), 1e-5 + (1 << i) / 1e9) for i in range(10, 27, 2)]


@pytest.mark.parametrize("position", [None, 0, 4, 8])
def test_a_line_that_one_disturbed_point_does_not_move(position: int | None) -> None:
    points = [(x, y * (20 if i == position else 1)) for i, (x, y) in enumerate(POINTS)]
    assert fit_line(points) == pytest.approx((1e-5, 1e-9))


def test_a_line_never_falls() -> None:
    assert fit_line([(1000.0, 2e-3)]) == (0.0, 2e-6)
    fixed, slope = fit_line([(1.0, 3.0), (2.0, 2.0)])
    assert fixed == 0
    assert slope > 0


@pytest.mark.parametrize("position", [None, 5, 7])
def test_latency_and_rate_of_a_link(position: int | None) -> None:
    points = [(x, y * (20 if i == position else 1)) for i, (x, y) in enumerate(POINTS)]
    assert latency_and_rate(points) == pytest.approx((1.25e-5, 1e-9), rel=0.15)


def test_a_rate_is_never_without_bound() -> None:
    """Where all messages take as long as an empty one, the largest gives a bound."""
    latency, rate = latency_and_rate([(x, 2e-3) for x, _ in POINTS])
    assert latency == 2e-3
    assert rate == 2e-3 / (1 << 26)


def test_sizes_of_micro_batches() -> None:
    assert [sample_sizes(h) for h in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


# ---- trials ----


def test_a_trial_that_ended_its_process_is_found_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    attempt(journal, "first", lambda: {"flops": 1.0}, CPU)
    journal.begin("second")
    with (tmp_path / "journal").open("a") as file:
        file.write('["third", {"flo')
    again = Journal(tmp_path / "journal")
    assert again.unfinished == "second"
    assert again.found == {"first": {"flops": 1.0}}
    attempt(again, "first", lambda: pytest.fail("it was made before"), CPU)
    attempt(again, "second", dict, CPU)
    assert Journal(tmp_path / "journal").found.keys() == {"first", "second"}


def test_reasons_in_a_line() -> None:
    assert reason(torch.OutOfMemoryError("CUDA out of memory.\nTried")) == "out of memory"
    assert reason(MemoryError()) == "out of memory"
    text = "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
    assert reason(RuntimeError(text)) == "out of memory"
    assert reason(ValueError("\n  odd width\nmore")) == "ValueError: odd width"


def config_of(**model: Any) -> Config:
    edits = {
        "mode": "calibrate",
        "model": {"_target_": "calibrated.Chain", **model},
        "data": {"train": {"_target_": "calibrated.Points"}},
        "global_batch": 8,
    }
    return load_config(edited(small_config(), edits))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a rank's process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(tmp_path: Path, samples: tuple[int, ...] = (1, 2, 4), **model: Any) -> tuple[KindTimes, ModelSpec]:
    """A CPU core measured in this process."""
    config = config_of(**model)
    points = Points(model.get("width", 64))
    batch = default_collate([points[0], points[1]])
    with torch.device("meta"):
        spec = describe(Chain(**model), batch)
    job = DeviceJob(config, batch, tmp_path / "journal", samples, num_ranks=1)
    plan = Plan(
        (Tile(Interval(0, 1), Interval(0, 1), (Shard(0),)),), ("all",), 1, 1, "1f1b", (PlannedDevice(0, "CPU", "n", 1),)
    )
    measure_device(job, plan, spec, tmp_path, RankInfo())
    times, _ = kind_times(Journal(job.journal).found, spec, samples, "AdamW", WHEN)
    return times, spec


def by_size(times: LayerTimes) -> dict[tuple[int, float], float]:
    return {(row.samples, row.part): row.forward_s for row in times.rows}


@pytest.mark.usefixtures("one_thread")
def test_n06_a_block_that_sleeps_at_first_gives_the_same_profile(tmp_path: Path) -> None:
    """Each copy of a block sleeps 0.1 s on its first call, a thousand times as long as a call takes."""
    (tmp_path / "slow").mkdir()
    steady, spec = measured(tmp_path)
    slow, _ = measured(tmp_path / "slow", sleep_s=0.1)
    assert [times.names for times in steady.layers] == [("blocks.0",), ("blocks.1",), ("blocks.2",)]
    for one, other in zip(steady.layers, slow.layers, strict=True):
        found, expected = by_size(other), by_size(one)
        assert found.keys() == expected.keys()
        assert {part for _, part in found} == {1.0, 0.75, 0.5, 0.25, 0.125}
        assert max(found.values()) < 0.02
        assert all(row.repeats >= 7 for row in other.rows)
    assert steady.optimizer is not None
    assert 0 < steady.optimizer.element_s < 1e-6
    assert steady.memory_bytes is not None
    assert steady.memory_bytes > 1 << 20
    profile = Profile(model=identity_of(spec), precision="32-true", kinds={"CPU": steady})
    assert load_profile(yaml.safe_load(yaml.safe_dump(profile.to_dict()))) == profile


@pytest.mark.usefixtures("one_thread")
def test_n06_a_candidate_that_fails_is_noted_and_the_rest_goes_on(tmp_path: Path) -> None:
    times, spec = measured(tmp_path, depth=4, fails_at=4)
    assert [t.names for t in times.layers] == [("blocks.0",), ("blocks.1", "blocks.2"), ("blocks.3",)]
    for layer in times.layers:
        assert {row.samples for row in layer.rows} == {1, 2}
        assert {(trial.samples, trial.reason) for trial in layer.failed} == {(4, "out of memory")}
        assert len(layer.failed) == 5, "one for each part"
    profile = Profile(model=identity_of(spec), precision="32-true", kinds={"CPU": times})
    assert (profile.pass_s("CPU", "blocks.2", 4, 1.0) or (0,))[0] > 0


@pytest.mark.usefixtures("one_thread")
def test_cut_layers_do_less(tmp_path: Path) -> None:
    times, _ = measured(tmp_path, samples=(64,), width=512, depth=1)
    (layer,) = times.layers
    forward = by_size(layer)
    assert forward[64, 0.125] < forward[64, 1.0]


@pytest.mark.usefixtures("one_thread")
def test_a_model_without_a_loss_is_refused(tmp_path: Path) -> None:
    config = load_config(edited(dict(config_of().resolved), {"model": {"_target_": "calibrated.NoLoss"}}))
    batch = default_collate([Points()[0], Points()[1]])
    spec = describe(config.model.build(), batch)
    job = DeviceJob(config, batch, tmp_path / "journal", (1,), num_ranks=1)
    with pytest.raises(ConfigError, match=r"NoLoss has no loss\(output, batch\)"):
        measure_device(job, Plan.__new__(Plan), spec, tmp_path, RankInfo())


def journal_of(spec: ModelSpec, *, spread: float) -> dict[str, dict[str, Any]]:
    """What a process would note whose every pass takes 1 ms, and whose quartiles are that far apart."""
    found: dict[str, dict[str, Any]] = {
        "device": {"name": "a core", "torch": "2.13.0", "free_bytes": 1 << 30},
        "layers": {"groups": [[0, 1, 2]]},
    }
    for weights in parts_of(spec, 0):
        found[trial_name("blocks.0", 1, weights)] = {
            "forward_s": 1e-3,
            "backward_s": 1e-3,
            "forward_spread_s": spread,
            "backward_spread_s": spread,
            "repeats": 7,
        }
    return found


def test_scattered_times_and_sizes_that_were_left_out_are_told() -> None:
    batch = default_collate([Points()[0], Points()[1]])
    with torch.device("meta"):
        spec = describe(Chain(), batch)
    found = journal_of(spec, spread=4e-4)
    found[trial_name("blocks.0", 2, (1,))] = {"left_out": "fewer samples take longer than 1 s"}
    times, notes = kind_times(found, spec, (1, 2), "AdamW", WHEN)
    assert times.layers[0].names == ("blocks.0", "blocks.1", "blocks.2")
    assert times.optimizer is None
    assert [note.partition(",")[0] for note in notes] == [
        "blocks.0: not measured from 2 samples on",
        "5 of 5 times scatter by more than 25%: something else uses the device; measure again when it is quiet.",
    ]
    assert kind_times(journal_of(spec, spread=1e-4), spec, (1,), "AdamW", WHEN)[1] == []


# ---- what is present, and what is written ----

V100 = FoundGpu(0, "Tesla V100-SXM2-32GB", 32510 << 20)
STRANGER = FoundGpu(1, "NVIDIA GeForce GTX 1650", 4096 << 20)


def test_present_devices() -> None:
    cluster = load_cluster({"nodes": "auto"})
    found = present_devices(cluster, "auto", lambda: [V100, STRANGER])
    assert [(p.kind, p.device) for p in found] == [("V100-SXM2-32GB", "cuda:0"), ("GTX-1650", "cuda:1")]
    assert found[0].catalogue is KINDS["V100-SXM2-32GB"]
    assert found[1].catalogue is None
    for accelerator, gpus in (("cpu", [V100]), ("auto", [])):
        cores = present_devices(cluster, accelerator, lambda gpus=gpus: gpus)
        assert set(cores) == {Present("CPU", "cpu", KINDS["CPU"])}
        assert len(cores) == len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=r"trainer\.accelerator"):
        present_devices(cluster, "gpu", list)


def test_torchrun_is_told_to_stay_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="run it without torchrun, once on each kind of machine"):
        calibrate(config_of(), describe(Chain(), None), None, tmp_path)


def test_free_memory_is_shared_by_the_ranks() -> None:
    alone, shared = free_bytes(CPU, 1), free_bytes(CPU, 4)
    assert alone is not None
    assert shared is not None
    assert shared == pytest.approx(alone / 4, rel=0.2)


def test_cluster_file_of_two_kinds_of_gpu() -> None:
    """What is measured stands in it, also for a card that no catalogue knows; the slowest link counts."""

    def found(name: str, capability: str) -> dict[str, Any]:
        speeds = {f"speed {t}": {"flops": 2e13} for t in ("fp32", "fp16")} | {"speed fp64": {"failed": "no"}}
        facts = {"name": name, "torch": "2.13.0", "total_bytes": 4 << 30, "compute_capability": capability}
        return {"device": facts, **speeds, "traffic": {"bytes_per_s": 8e11}}

    present = [
        Present("V100-SXM2-32GB", "cuda:0", KINDS["V100-SXM2-32GB"]),
        Present("GTX-1650", "cuda:1"),
        Present("GTX-1650", "cuda:2"),
    ]
    rows = [{"num_bytes": n, "seconds": 1e-5 + n / 1e10, "spread_s": 0.0} for n in (1 << 10, 1 << 20, 1 << 26)]
    slow = [{**row, "seconds": 2 * row["seconds"]} for row in rows]
    kinds = [p.kind for p in present]
    links = link_times({"link 0 1": {"rows": rows}, "link 0 2": {"rows": slow}, "sum": {"rows": rows}}, kinds, WHEN)
    assert [link.what for link in links] == ["point_to_point", "point_to_point", "all_reduce"]
    journals = {"V100-SXM2-32GB": found("Tesla V100", "7.0"), "GTX-1650": found("GTX 1650", "7.5")}
    section = cluster_section(present, journals, links, WHEN)
    cluster = load_cluster(yaml.safe_load(yaml.safe_dump(section, sort_keys=False)))
    assert str(cluster) == "desk: 1 x V100-SXM2-32GB, 2 x GTX-1650"
    volta, stranger = cluster.devices[0].kind, cluster.devices[1].kind
    assert volta.memory_bytes == 32 << 30
    assert volta.peak_flops["fp16"] == 125e12
    assert volta.speed("fp32") == 2e13 == volta.peak_flops["fp32"], "faster than its data sheet"
    assert stranger.memory_bytes == 4 << 30
    assert stranger.is_gpu
    assert cluster.nodes[0].link.bandwidth_bytes_per_s == pytest.approx(5e9, rel=0.02)
    assert cluster.nodes[0].link.latency_s == pytest.approx(2e-5, rel=0.02)


# ---- the command ----


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TRAIN), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


SMALL = (
    "model=custom", "model._target_=calibrated.Chain", "data.train._target_=calibrated.Points", "data.validation=null",
    "global_batch=4", "strategy=replicate", "logger=none", "trainer.accelerator=cpu",
)  # fmt: skip


@pytest.mark.ranks
def test_the_command_measures_and_plans_with_what_it_found(tmp_path: Path) -> None:
    """A micro-batch of 4 ends the measuring process, and the rest goes on."""
    ended = command(tmp_path, "mode=calibrate", "hydra.run.dir=out", *SMALL, "model.dies_at=4", "model.depth=1")
    assert ended.returncode == 0, ended.stderr
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == ["cluster.yaml", "config.yaml", "overrides.yaml", "profile.yaml"]
    for words in ("CPU", "blocks.0", "samples", "spread", "memory that is free", "cluster.profile=out/profile.yaml"):
        assert words in ended.stdout
    profile = load_profile(yaml.safe_load((out / "profile.yaml").read_text()))
    assert list(profile.kinds) == ["CPU"]
    for layer in profile.kinds["CPU"].layers:
        assert {row.samples for row in layer.rows} == {1, 2}
        assert {trial.samples for trial in layer.failed} == {4}
        assert "killed" in layer.failed[0].reason
    assert len(profile.links) == (2 if len(os.sched_getaffinity(0)) > 1 else 0)
    cluster = load_cluster(yaml.safe_load((out / "cluster.yaml").read_text()))
    assert {d.kind.name for d in cluster.devices} == {"CPU"}

    plan = command(
        tmp_path,
        "mode=plan",
        "hydra.run.dir=p",
        "cluster=out/cluster.yaml",
        "cluster.profile=out",
        *SMALL,
        "model.depth=1",
    )
    assert plan.returncode == 0, plan.stderr
    resolved = yaml.safe_load((tmp_path / "p" / "config.yaml").read_text())
    assert resolved["cluster"]["profile"] == str(out)
    assert resolved["cluster"]["nodes"] == yaml.safe_load((out / "cluster.yaml").read_text())["nodes"]
    devices = json.loads((tmp_path / "p" / "plan.json").read_text())["devices"]
    assert {device["kind"] for device in devices} == {"CPU"}

    other = command(tmp_path, "mode=plan", "cluster.profile=[out/profile.yaml]", *SMALL, "model.depth=2")
    assert other.returncode == 2
    for words in ("cluster.profile", "another model", "1 layer,", "2 layers", "mode=calibrate"):
        assert words in other.stderr
