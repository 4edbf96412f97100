"""From the journals of the measuring processes to a profile, and to a cluster file with measured figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale_trainer.calibration.layers import parts_of, trial_name
from whale_trainer.calibration.present import Present
from whale_trainer.calibration.statistics import fit_line, latency_and_rate, rounded
from whale_trainer.device_kinds import DTYPES, GIB, DType
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.simulation.profile import (
    FailedTrial,
    KindTimes,
    LayerTimes,
    LinkTimes,
    OptimizerTime,
    PassTime,
    TransferTime,
)

WIDE = 0.25
"""Quartiles that are farther apart, as a part of the median, tell of a disturbance."""

Found = Mapping[str, dict[str, Any]]
"""Results by trial, as a journal has them."""


@dataclass(frozen=True)
class Occasion:
    """Where and when it was measured."""

    machine: str
    measured_at: str


def kind_times(
    found: Found, spec: ModelSpec, samples: Sequence[int], optimizer: str, occasion: Occasion
) -> tuple[KindTimes, list[str]]:
    """The measurements of one kind, and what the user should know of them. Raises `KeyError` without the facts."""
    facts = found["device"]
    layers, notes = [], []
    for group in found["layers"]["groups"]:
        times = _layer_times(found, spec, group, samples)
        layers.append(times)
        left_out = [trial for trial in _trials(spec, group[0], samples) if "left_out" in found.get(trial[0], {})]
        if left_out:
            fewest = min(count for _, count, _ in left_out)
            why = found[left_out[0][0]]["left_out"]
            notes.append(f"{times.layer}: not measured from {fewest} samples on, as {why}; the last slope goes on.")
    notes += _scatter(layers)
    return (
        KindTimes(
            device=facts["name"],
            machine=occasion.machine,
            torch=facts["torch"],
            measured_at=occasion.measured_at,
            memory_bytes=facts.get("free_bytes"),
            optimizer=_optimizer_time(found, optimizer),
            layers=tuple(layers),
        ),
        notes,
    )


def _scatter(layers: Sequence[LayerTimes]) -> list[str]:
    """A warning where many times were disturbed."""
    rows = [row for times in layers for row in times.rows]
    wide = [r for r in rows if r.forward_spread_s + r.backward_spread_s > WIDE * (r.forward_s + r.backward_s)]
    if len(wide) * 4 <= len(rows):
        return []
    return [
        f"{len(wide)} of {len(rows)} times scatter by more than {WIDE:.0%}: something else uses the device; "
        "measure again when it is quiet."
    ]


def _trials(spec: ModelSpec, index: int, samples: Sequence[int]) -> Iterator[tuple[str, int, float]]:
    """(name, samples, part) of every trial of a layer."""
    for weights, part in parts_of(spec, index).items():
        for count in samples:
            yield trial_name(spec.layers[index].name, count, weights), count, part


def _layer_times(found: Found, spec: ModelSpec, group: Sequence[int], samples: Sequence[int]) -> LayerTimes:
    layer = spec.layers[group[0]]
    rows, failed = [], []
    for name, count, part in _trials(spec, group[0], samples):
        result = found.get(name, {"left_out": "not tried"})
        if "failed" in result:
            failed.append(
                FailedTrial(samples=count, part=rounded(part, 6), reason=result["failed"] or "no reason told")
            )
        elif "left_out" not in result:
            figures = {key: rounded(value) for key, value in result.items() if key.endswith("_s")}
            for which in ("forward_s", "backward_s"):
                figures[which] = max(figures[which], 1e-9)  # the finest that a clock tells
            rows.append(PassTime(samples=count, part=rounded(part, 6), repeats=result["repeats"], **figures))
    return LayerTimes(
        layer=layer.name,
        same=tuple(spec.layers[index].name for index in group[1:]),
        cut_share=rounded(min(1.0, layer.split_flops / layer.forward_flops)) if layer.forward_flops else 0.0,
        rows=tuple(rows),
        failed=tuple(failed),
    )


def _optimizer_time(found: Found, name: str) -> OptimizerTime | None:
    results = [r for trial, r in found.items() if trial.startswith("optimizer ") and "seconds" in r]
    if not results:
        return None
    fixed_s, element_s = fit_line([(r["elements"], r["seconds"]) for r in results])
    return OptimizerTime(optimizer=name, fixed_s=rounded(fixed_s), element_s=rounded(element_s))


def link_times(found: Found, kinds: Sequence[str], occasion: Occasion) -> list[LinkTimes]:
    """The links between the ranks, whose kinds are given: pairs, and the sum over all."""
    links = []
    for name, result in found.items():
        if not result.get("rows"):
            continue
        what, *ranks = name.split()
        joined = tuple(kinds[int(rank)] for rank in ranks) if what == "link" else tuple(kinds)
        latency_s, byte_s = latency_and_rate([(row["num_bytes"], row["seconds"]) for row in result["rows"]])
        links.append(
            LinkTimes(
                what="point_to_point" if what == "link" else "all_reduce",
                kinds=joined,
                machine=occasion.machine,
                measured_at=occasion.measured_at,
                latency_s=rounded(latency_s),
                bandwidth_bytes_per_s=rounded(1 / byte_s),
                rows=tuple(
                    TransferTime(
                        num_bytes=row["num_bytes"],
                        seconds=rounded(row["seconds"]),
                        spread_s=rounded(row["spread_s"]),
                    )
                    for row in result["rows"]
                ),
            )
        )
    return links


def cluster_section(
    present: Sequence[Present], found: Mapping[str, Found], links: Sequence[LinkTimes], occasion: Occasion
) -> dict[str, Any]:
    """The `cluster` section for this machine: its devices with what they reach, and the slowest of its links."""
    kinds: dict[str, int] = {}
    for device in present:
        kinds[device.kind] = kinds.get(device.kind, 0) + 1
    node: dict[str, Any] = {"name": occasion.machine, "devices": kinds}
    pairs = [link for link in links if link.what == "point_to_point"]
    if pairs:
        node["link"] = {
            "name": "measured",
            "bandwidth_gbit_per_s": rounded(min(link.bandwidth_bytes_per_s for link in pairs) * 8e-9),
            "latency_us": rounded(max(link.latency_s for link in pairs) * 1e6),
        }
    elif not any(device.device.startswith("cuda") for device in present):
        node["link"] = "shared_memory"
    described = {device.kind: _kind_section(device, found[device.kind], occasion) for device in present}
    return {"nodes": [node], "kinds": described}


def _kind_section(present: Present, found: Found, occasion: Occasion) -> dict[str, Any]:
    facts, known = found["device"], present.catalogue
    speeds = {dtype: found.get(f"speed {dtype}", {}) for dtype in DTYPES}
    measured: dict[DType, float] = {dtype: speed["flops"] for dtype, speed in speeds.items() if "flops" in speed}
    sustained = {**(known.sustained_flops if known else {}), **measured}
    peak = {dtype: max(known.peak_flops.get(dtype, 0) if known else 0, speed) for dtype, speed in sustained.items()}
    memory = facts.get("total_bytes") or facts.get("free_bytes")
    if known and (known.is_gpu or not memory):
        memory = known.memory_bytes
    traffic = found["traffic"].get("bytes_per_s") or (known.memory_bandwidth_bytes_per_s if known else 1e9)
    peaks = f", peaks and memory as in {known.name}'s data sheet" if known and known.is_gpu else ""
    return {
        "peak_tflops": {t: rounded(peak[t] / 1e12) for t in DTYPES if t in peak},
        "sustained_tflops": {t: rounded(sustained[t] / 1e12) for t in DTYPES if t in sustained},
        "memory_gib": rounded((memory or GIB) / GIB),
        "memory_bandwidth_gb_per_s": rounded(traffic / 1e9),
        "compute_capability": facts.get("compute_capability"),
        "source": f"measured by mode=calibrate on {occasion.machine}, {occasion.measured_at} ({facts['name']}){peaks}",
    }
