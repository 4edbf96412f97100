"""Fits the constants of `benchmarks.measured` on one file, by least squares of relative errors.

    python -m benchmarks.measured_fit benchmarks/data/gh200_opt350m.yaml

The two of gradient sums on the sums that were measured by themselves, the other three on the step times.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks.measured import ENGINE, EngineCosts, Hardware, MeasuredTimes, errors, load, plan_of

SCALES = np.array([1.0, 1e-3, 1e-2])
"""Of launch share, transfer and boundary: so that all three are near 1 for the search."""
STARTS = ([0.75, 1.0, 2.5], [0.9, 0.5, 4.0], [0.7, 1.5, 1.0])


def fit_sums(data: Mapping[str, Any]) -> EngineCosts:
    """Host time of a layer's sum and share of the bandwidth, from the measured sums of the first stage."""
    whole = replace(ENGINE, sum_bandwidth_share=1.0)
    hardware = Hardware(data, whole)
    parts, measured = [], []
    for entry in data["plans"]:
        seconds = (entry.get("measured_first_run") or entry["measured"]).get("reduce_grads_s")
        if seconds is None:
            continue
        plan, groups = plan_of(entry, data["model"]["layers"])
        first = plan.tiles[0].layers
        tiles = [i for i, tile in enumerate(plan.tiles) if tile.layers == first]
        ring_s = MeasuredTimes(plan, groups, entry, hardware).ring_s(tiles, tiles[0]) if len(tiles) > 1 else 0.0
        parts.append((len(first) / seconds, ring_s / seconds))
        measured.append(1.0)
    per_layer, per_ring = np.linalg.lstsq(np.array(parts), np.array(measured), rcond=None)[0]
    return replace(ENGINE, layer_sum_s=float(per_layer), sum_bandwidth_share=float(1 / per_ring))


def fit_steps(data: Mapping[str, Any], costs: EngineCosts) -> EngineCosts:
    """The other constants, from the step times."""

    def with_values(values: Sequence[float]) -> EngineCosts:
        launch, transfer, boundary = np.asarray(values) * SCALES
        return replace(
            costs, launch_share=float(launch), transfer_host_s=float(transfer), boundary_start_s=float(boundary)
        )

    def loss(values: Sequence[float]) -> float:
        return float(np.mean([error**2 for _, _, error in errors(data, with_values(values))]))

    found = [minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-7}) for start in STARTS]
    return with_values(min(found, key=lambda result: float(result.fun)).x)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a file of the form measured-plans/1")
    data = load(parser.parse_args(argv).file)
    for name, value in asdict(fit_steps(data, fit_sums(data))).items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
