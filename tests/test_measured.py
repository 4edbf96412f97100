"""The simulator against step times that others measured, and the reader of their files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.measured import EngineCosts, Hardware, errors, load, main, predict

DATA = Path(__file__).parents[1] / "benchmarks" / "data"
NOTHING = EngineCosts(
    sum_bandwidth_share=1.0, layer_sum_s=0.0, launch_share=1.0, transfer_host_s=0.0, boundary_start_s=0.0
)
"""An engine that takes no time of its own."""


@pytest.mark.parametrize(("name", "most_mean"), [("gh200_opt350m", 0.07), ("gh200_gptneo", 0.08)])
def test_step_times_of_real_clusters(name: str, most_mean: float) -> None:
    found = [abs(error) for _, _, error in errors(load(DATA / f"{name}.yaml"))]
    assert sum(found) / len(found) <= most_mean
    assert max(found) <= 0.20


def small() -> dict[str, Any]:
    """Two kinds; a layer takes 1 ms forward and 2 ms backward a sample on the fast one, twice that on the slow one."""
    return {
        "format": "measured-plans/1",
        "model": {
            "name": "small",
            "layers": ["block"] * 4,
            "layer_kinds": {
                "block": {
                    "parameter_bytes": {1: 4_000_000, 2: 2_000_000},
                    "activation_bytes_per_sample": {1: 1000},
                    "boundary_output_bytes_per_sample": 10_000_000,
                }
            },
        },
        "links": {
            # 10e9 bytes/s at any size
            "curves": [{"name": "flat", "coefficients": [0.0, 0.0, 10.0], "usable_from_bytes": 1}],
            "intra_node": [{"gpu": "fast", "gpus": 2, "curve": "flat"}],
            "inter_node": [
                {"sender": "fast", "receiver": "slow", "pairs": 1, "curve": "flat"},
                {"sender": "fast", "receiver": "fast", "pairs": 1, "curve": "flat"},
            ],
        },
        "profiles": [
            {
                "gpu": gpu,
                "tensor_parallel": degree,
                "micro_batch": size,
                "forward_s": {"block": 1e-3 * size * pace / degree},
                "backward_s": {"block": 2e-3 * size * pace / degree},
                "optimizer_step_s": 1e-3,
                "optimizer_step_parameter_bytes": 4_000_000,
            }
            for gpu, pace in (("fast", 1), ("slow", 2))
            for degree in (1, 2)
            for size in (1, 4)
        ],
        "plans": [plan([[0, 4]], [["fast"]])],
    }


def plan(layers: list[list[int]], kinds: list[list[str]], *, count: int = 3, gpus: int = 1) -> dict[str, Any]:
    """A plan with one list of kinds for each stage; every group on a node of its own."""
    nodes = iter(range(100))
    return {
        "name": "p",
        "micro_batch": 2,
        "global_batch": 2 * count * len(kinds[0]),
        "num_micro_batches": count,
        "data_parallel": len(kinds[0]),
        "tensor_parallel": gpus,
        "stages": [
            {"layers": part, "replicas": [{"node": next(nodes), "gpu": gpu, "gpus": gpus} for gpu in row]}
            for part, row in zip(layers, kinds, strict=True)
        ],
        "measured": {"iteration_s": 1.0},
    }


def seconds(entry: dict[str, Any]) -> float:
    return predict(entry, Hardware(small(), NOTHING))


def test_one_group() -> None:
    # 3 micro-batches x 4 layers x 2 samples x 3 ms, and 16 MB of parameters at 4 MB/ms
    assert seconds(plan([[0, 4]], [["fast"]])) == pytest.approx(3 * 4 * 2 * 3e-3 + 4e-3)
    assert seconds(plan([[0, 4]], [["slow"]])) == pytest.approx(3 * 4 * 2 * 6e-3 + 4e-3)
    assert seconds(plan([[0, 4]], [["fast"]], gpus=2)) == pytest.approx(3 * 4 * 2 * 1.5e-3 + 2e-3)


def test_replicas_of_two_kinds_wait_for_the_slower_one_and_for_the_sum() -> None:
    slow = 3 * 4 * 2 * 6e-3
    assert seconds(plan([[0, 4]], [["fast", "slow"]])) == pytest.approx(slow + 16e6 / 10e9 + 4e-3)


def test_blocking_transfers_take_the_time_of_both_stages() -> None:
    # one micro-batch: forward, transfer of 20 MB, forward, backward, transfer, backward
    found = seconds(plan([[0, 2], [2, 4]], [["fast"], ["slow"]], count=1))
    assert found == pytest.approx(2 * 2 * 3e-3 + 2e-3 + 2 * 2 * 6e-3 + 2e-3 + 2e-3)
    # with more, the slow stage is never idle but for its transfers
    many = seconds(plan([[0, 2], [2, 4]], [["fast"], ["slow"]], count=8))
    assert many >= 8 * (2 * 2 * 6e-3 + 4e-3)


def test_micro_batches_between_profiles_are_interpolated() -> None:
    hardware = Hardware(small(), NOTHING)
    assert hardware.layer_s("fast", 1, "block", 2, "forward_s") == pytest.approx(2e-3)
    assert hardware.layer_s("fast", 1, "block", 8, "forward_s") == pytest.approx(8e-3)


def test_a_degree_without_a_profile_is_taken_from_the_nearest() -> None:
    hardware = Hardware(small(), NOTHING)
    assert hardware.layer_s("fast", 4, "block", 4, "forward_s") == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other/1"), "format is 'other/1', this reads measured-plans/1"),
        (lambda d: d.pop("profiles"), "the file has no profiles"),
        (lambda d: d.update(plans=[]), "plans is not a list with entries"),
        (
            lambda d: d["plans"][0]["stages"][0]["replicas"][0].update(gpu="none"),
            "profiles: none of none; there are fast, slow",
        ),
        (lambda d: d["plans"][0].update(data_parallel=2), "data_parallel is 2, a stage has 1 replicas"),
        (lambda d: d["plans"][0].pop("measured"), "'measured'"),
    ],
)
def test_bad_files_end_with_2(change: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = copy.deepcopy(small())
    change(data)
    path = tmp_path / "plans.yaml"
    path.write_text(yaml.safe_dump(data))
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_the_last_line_tells_the_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plans.yaml"
    data = small()
    data["plans"][0]["measured"]["iteration_s"] = 2 * seconds(data["plans"][0])
    path.write_text(yaml.safe_dump(data))
    assert main([str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last[0], last[3] == ("mean", "max")
    assert last[2] == last[5] == "%"
    assert 30 < float(last[1]) == float(last[4]) < 60
