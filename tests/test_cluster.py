"""The cluster section: what ships loads, worked examples, and every refusal with path, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from whale_trainer.cluster import KINDS, LINKS, Cluster, load_cluster
from whale_trainer.device_kinds import capability, kind_name
from whale_trainer.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "conf" / "cluster"
SHIPPED = {
    "single": 1,
    "v100_p100": 8,
    "v100_p100_16": 16,
    "v100_512": 512,
    "a100_h100": 16,
    "mixed_rtx": 7,
    "cpu_uneven": 3,
    "auto": 0,
}


def shipped(name: str) -> Cluster:
    return load_cluster(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))


def one_node(**changes: Any) -> dict[str, Any]:
    return {"nodes": [{"name": "box", "devices": {"T4": 1}, **changes}]}


def problems(data: object) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        load_cluster(data)
    return {problem.path: problem.message for problem in error.value.problems}


# ---- what is right ----


def test_every_shipped_cluster_loads() -> None:
    found = {path.stem: len(shipped(path.stem).devices) for path in FOLDER.rglob("*.yaml")}
    assert found == SHIPPED


def test_the_papers_test_bed() -> None:
    cluster = shipped("v100_p100")
    assert str(cluster) == "volta: 4 x V100-SXM2-32GB; pascal: 4 x P100-PCIE-16GB"
    assert [d.node for d in cluster.devices] == ["volta"] * 4 + ["pascal"] * 4
    assert [d.index for d in cluster.devices] == list(range(8))
    assert cluster.network.bandwidth_bytes_per_s == 6.25e9
    assert cluster.network.latency_s == pytest.approx(20e-6)
    first, second, last = cluster.devices[0], cluster.devices[1], cluster.devices[7]
    assert cluster.link_between(first, second) == LINKS["nvlink2"]
    assert cluster.link_between(first, last) == cluster.network
    assert str(last) == "P100-PCIE-16GB on pascal"
    assert cluster.uses_gpus


def test_several_kinds_in_one_node_and_another_count_in_the_next() -> None:
    cluster = shipped("mixed_rtx")
    assert [len(node.devices) for node in cluster.nodes] == [4, 3]
    assert [d.kind.name for d in cluster.devices[:4]] == ["RTX-4090", "RTX-4090", "RTX-3090", "RTX-3090"]


def test_equal_nodes_are_counted() -> None:
    cluster = shipped("v100_512")
    assert len(cluster.nodes) == 64
    assert {node.name for node in cluster.nodes} == {f"m6-{i}" for i in range(64)}


def test_kinds_written_out_in_the_file() -> None:
    fast, _, slow = (device.kind for device in shipped("cpu_uneven").devices)
    assert fast.speed("fp32") == 2 * slow.speed("fp32")
    assert (fast.memory_bytes, slow.memory_bytes) == (2 << 30, 1 << 30)
    assert not fast.is_gpu
    assert not shipped("cpu_uneven").uses_gpus


def test_auto_is_recognised_and_left_to_the_launcher() -> None:
    cluster = shipped("auto")
    assert cluster.is_auto
    assert cluster.devices == ()
    assert problems({"nodes": "auto", "netwrok": {}}) == {
        "cluster.netwrok": "unknown key; did you mean network? (allowed: nodes, network, kinds)"
    }


def test_the_catalogue() -> None:
    assert len(KINDS) == 16
    for name, kind in KINDS.items():
        assert kind.name == name
        assert kind.source
        assert set(kind.dtypes) == set(kind.peak_flops) == set(kind.sustained_flops)
        assert all(0 < kind.sustained_flops[t] <= kind.peak_flops[t] for t in kind.dtypes)
        assert kind.memory_bytes >= 4 << 30
        is_old = kind.compute_capability is not None and capability(kind.compute_capability) < (8, 0)
        assert ("bf16" in kind.dtypes) is not is_old
    assert KINDS["P100-PCIE-16GB"].dtypes == ("fp64", "fp32", "fp16")
    assert KINDS["V100-SXM2-32GB"].peak_flops["fp32"] == 15.7e12
    assert KINDS["V100-SXM2-32GB"].speed("bf16") == KINDS["V100-SXM2-32GB"].speed("fp32")
    assert len({*KINDS.values()}) == 16


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("V100-16", "V100-SXM2-16GB"),
        ("V100-32", "V100-SXM2-32GB"),
        ("v100-32gb", "V100-SXM2-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("P100-16", "P100-PCIE-16GB"),
        ("P100-12", "P100-PCIE-12GB"),
        ("A100-80", "A100-SXM4-80GB"),
        ("A100_40", "A100-SXM4-40GB"),
        ("H100", "H100-SXM5-80GB"),
        ("h200", "H200-SXM5-141GB"),
        ("3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("2080 Ti", "RTX-2080Ti"),
        ("2080", "RTX-2080Ti"),
        ("cpu", "CPU"),
        ("L40S", "L40S"),
        ("A10", "A10"),
    ],
)
def test_short_names(word: str, name: str) -> None:
    assert kind_name(word) == name
    assert load_cluster(one_node(devices={word: 1})).devices[0].kind == KINDS[name]


def test_a_bare_number_as_a_kind() -> None:
    assert load_cluster(one_node(devices={3090: 2})).devices[1].kind.name == "RTX-3090"


def test_an_own_kind_goes_before_the_catalogue() -> None:
    own = {"T4": {"peak_tflops": {"fp32": 1, "fp16": 4}, "memory_gib": 3.5, "memory_bandwidth_gb_per_s": 100}}
    kind = load_cluster({**one_node(), "kinds": own}).devices[0].kind
    assert kind.memory_bytes == 3.5 * (1 << 30)
    assert kind.speed("fp16") == 4e12
    assert kind.source == "written in the cluster file"


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4))
def test_devices_are_counted_over_the_nodes_in_order(counts: list[list[int]]) -> None:
    names = list(KINDS)
    nodes = [
        {"name": f"n{i}", "devices": {names[j]: c for j, c in enumerate(part)}, "link": "pcie4"}
        for i, part in enumerate(counts)
    ]
    devices = load_cluster({"nodes": nodes}).devices
    assert len(devices) == sum(map(sum, counts))
    assert [d.index for d in devices] == list(range(len(devices)))
    assert [d.node for d in devices] == [f"n{i}" for i, part in enumerate(counts) for _ in range(sum(part))]


# ---- what is refused ----


@pytest.mark.parametrize("count", [0, -1, 3.7, "4", True, None, 1e9])
def test_a_count_that_is_none(count: object) -> None:
    ((path, message),) = problems(one_node(devices={"T4": count})).items()
    assert path == "cluster.nodes[0].devices.T4"
    assert message.startswith(repr(count))
    assert message.endswith("allowed: a whole number of devices from 1 to 4096")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("16 GB/s", "is not a number"),
        (0, "is not above 0"),
        (-3, "is not above 0"),
        (1e18, "is above 100000"),
        (float("nan"), "is not a finite number"),
        (float("inf"), "is not a finite number"),
        (True, "is not a number"),
        (None, "is not a number"),
    ],
)
def test_a_bandwidth_that_is_none(value: object, words: str) -> None:
    ((path, message),) = problems({**one_node(), "network": {"bandwidth_gbit_per_s": value}}).items()
    assert path == "cluster.network.bandwidth_gbit_per_s"
    assert message == f"{value!r} {words}; allowed: gigabits per second above 0, up to 100000, without a unit"


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        (3, "cluster", "3 is not a mapping; allowed: {nodes, network, kinds}"),
        ({}, "cluster.nodes", "is missing; allowed: `auto`, or a list of {name, devices, link}"),
        ({"nodes": []}, "cluster.nodes", "is empty; allowed: `auto`, or a list of {name, devices, link}"),
        ({"nodes": 3}, "cluster.nodes", "3 is not a list; allowed: `auto`, or a list of {name, devices, link}"),
        (
            {"nodes": "atuo"},
            "cluster.nodes",
            "'atuo' is neither a list of nodes nor a word that is known; did you mean auto?",
        ),
        ({"nodes": [7]}, "cluster.nodes[0]", "7 is not a mapping"),
        (
            one_node(devices={}),
            "cluster.nodes[0].devices",
            "is empty; allowed: counts by kind, such as {V100-SXM2-32GB: 4}",
        ),
        (one_node(devices=3.7), "cluster.nodes[0].devices", "3.7 is not a mapping; allowed: counts by kind"),
        (
            one_node(devices={"V10-32": 1}),
            "cluster.nodes[0].devices.V10-32",
            "'V10-32' is no device kind; did you mean V100-SXM2-32GB?",
        ),
        (
            one_node(devices={"V100": 1}),
            "cluster.nodes[0].devices.V100",
            "'V100' may be any of V100-SXM2-16GB, V100-SXM2-32GB: name one",
        ),
        (
            one_node(devices={"abacus": 1}),
            "cluster.nodes[0].devices.abacus",
            "'abacus' is no device kind; allowed: V100-SXM2-16GB",
        ),
        (one_node(link="nvlnk2"), "cluster.nodes[0].link", "'nvlnk2' is no link; did you mean nvlink2?"),
        (one_node(link=12), "cluster.nodes[0].link", "12 is neither a link's name (nvlink2, nvlink3"),
        (
            one_node(link={"latency_us": 3}),
            "cluster.nodes[0].link.bandwidth_gbit_per_s",
            "is missing; allowed: gigabits",
        ),
        (one_node(nmae="x"), "cluster.nodes[0].nmae", "unknown key; did you mean name?"),
        (one_node(count=0), "cluster.nodes[0].count", "0 is below 1; allowed: a whole number of equal nodes"),
        (one_node(name=""), "cluster.nodes[0].name", "is empty; allowed: a name"),
        ({"nodes": [*one_node()["nodes"]] * 2}, "cluster", "two nodes have the name box: every node needs its own"),
        (
            {**one_node(), "network": "etherent_10g"},
            "cluster.network",
            "'etherent_10g' is no link; did you mean ethernet_10g?",
        ),
        (
            {**one_node(), "network": {"bandwidth_gbit_per_s": 1, "latency_us": -1}},
            "cluster.network.latency_us",
            "-1 is below 0",
        ),
    ],
)
def test_refusals(data: object, path: str, message: str) -> None:
    found = problems(data)
    assert list(found) == [path]
    assert found[path].startswith(message)


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"memory_gib": 0}, "memory_gib", "0 is not above 0; allowed: GiB above 0, up to 4096, without a unit"),
        ({"memory_gib": "16GB"}, "memory_gib", "'16GB' is not a number"),
        (
            {"peak_tflops": {"fp8": 1, "fp32": 1}},
            "peak_tflops.fp8",
            "'fp8' is not allowed; allowed: fp64, fp32, fp16, bf16",
        ),
        ({"peak_tflops": {"fp32": -1}}, "peak_tflops.fp32", "-1 is not above 0"),
        ({"peak_tflops": {"fp16": 1}}, "", "peak_tflops has no fp32, which every kind needs"),
        ({"sustained_tflops": {"fp32": 3}}, "", "sustained_tflops 3.0 of fp32 is above its peak of 2.0"),
        ({"sustained_tflops": {"fp16": 1}}, "", "sustained_tflops has fp16, peak_tflops has only fp32"),
        ({"compute_capability": 7.0}, "compute_capability", '7.0 is not text; allowed: text such as "8.0"'),
        ({"compute_capability": "seven"}, "compute_capability", "'seven' has another form; allowed: text such as"),
        (
            {"compute_capability": "7.0", "peak_tflops": {"fp32": 1, "bf16": 9}},
            "",
            "bf16 needs compute capability 8.0, this kind has 7.0",
        ),
        ({"momory_gib": 3}, "momory_gib", "unknown key; did you mean memory_gib?"),
    ],
)
def test_refused_kinds(changes: dict[str, Any], path: str, message: str) -> None:
    kind = {"peak_tflops": {"fp32": 2.0}, "memory_gib": 1, "memory_bandwidth_gb_per_s": 1, **changes}
    found = problems({**one_node(), "kinds": {"mine": kind}})
    (where,) = found
    assert where == "cluster.kinds.mine" + (f".{path}" if path else "")
    assert found[where].startswith(message)


def test_all_problems_are_told_at_once() -> None:
    found = problems(
        {
            "nodes": [{"name": "a", "devices": {"T4": 3.7}, "link": "nvlnk2"}, {"nam": "b", "devices": {"T5": 1}}],
            "network": {"bandwidth_gbit_per_s": "fast"},
            "kindz": {},
        }
    )
    assert sorted(found) == [
        "cluster.kindz",
        "cluster.network.bandwidth_gbit_per_s",
        "cluster.nodes[0].devices.T4",
        "cluster.nodes[0].link",
        "cluster.nodes[1].devices.T5",
        "cluster.nodes[1].nam",
        "cluster.nodes[1].name",
    ]


def keys(data: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every entry, at any depth."""
    if isinstance(data, dict):
        return [p for k, v in data.items() for p in ((*path, k), *keys(v, (*path, k)))]
    if isinstance(data, list):
        return [p for i, v in enumerate(data) for p in keys(v, (*path, i))]
    return []


@pytest.mark.parametrize("name", [n for n in SHIPPED if n != "auto"])
def test_one_misspelt_key_in_a_shipped_file_is_told_by_its_path(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    for path in keys(yaml.safe_load(text)):
        data = yaml.safe_load(text)
        parent = data
        for step in path[:-1]:
            parent = parent[step]
        parent[f"{path[-1]}_x"] = parent.pop(path[-1])
        found = problems(data)
        assert any(f"{path[-1]}" in where or path[-1] in message for where, message in found.items()), (path, found)
