"""What shares in proportion to the hardware gain, measured at the pace of declared devices beside the simulator's word.

    python -m benchmarks.heterogeneous [--pairs 20] [--short]

Each case runs the plans of `balance: even`, `whale` and `hardware` in turns, in one go, on the same emulated cluster.
Told are the gain of `hardware` over `even` as it was measured, the same by the simulator, their ratio, and the most
that the devices' speeds allow; the gain over Whale's algorithm; and how well the run kept its pace.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulated import EmulatedJob, config_of, plan_job, profiled, with_strategy
from benchmarks.pairs import Ratio, measure_jobs, write_json

BALANCES = ("hardware", "even", "whale")
MODEL = ("model=gpt_mini", "model.width=96", "model.num_layers=8", "model.num_heads=6", "model.num_kv_heads=6")
SHORT_MODEL = ("model=gpt_mini", "model.width=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=4")
NVLINK = {"name": "nvlink2", "bandwidth_gbit_per_s": 1200, "latency_us": 5}
NETWORK = {"bandwidth_gbit_per_s": 100, "latency_us": 5}


def two_kinds(number: int) -> dict[str, Any]:
    """As many V100 as P100, each kind on a node of its own."""
    return {
        "nodes": [
            {"name": "volta", "devices": {"V100-SXM2-32GB": number}, "link": NVLINK},
            {"name": "pascal", "devices": {"P100-PCIE-16GB": number}, "link": NVLINK},
        ],
        "network": NETWORK,
    }


ONE_NODE = {"nodes": [{"name": "both", "devices": {"V100-SXM2-32GB": 1, "P100-PCIE-16GB": 1}, "link": NVLINK}]}
THREE_KINDS = {
    "nodes": [
        {"name": "ampere", "devices": {"A100-SXM4-40GB": 1}, "link": NVLINK},
        {"name": "volta", "devices": {"V100-SXM2-32GB": 1}, "link": NVLINK},
        {"name": "pascal", "devices": {"P100-PCIE-16GB": 1}, "link": NVLINK},
    ],
    "network": NETWORK,
}
SMALL_MEMORY = {
    "nodes": [
        {"name": "fast", "devices": {"fast-small": 1}, "link": NVLINK},
        {"name": "slow", "devices": {"slow-large": 1}, "link": NVLINK},
    ],
    "network": NETWORK,
    "kinds": {
        "fast-small": {
            "peak_tflops": {"fp32": 16},
            "memory_gib": 0.64,
            "memory_bandwidth_gb_per_s": 900,
            "compute_capability": "7.0",
            "source": "made up: twice as fast, with little memory",
        },
        "slow-large": {
            "peak_tflops": {"fp32": 8},
            "memory_gib": 4,
            "memory_bandwidth_gb_per_s": 700,
            "compute_capability": "7.0",
            "source": "made up: half as fast, with much memory",
        },
    },
}


@dataclass(frozen=True)
class Case:
    """A kind of parallelism on a cluster."""

    name: str
    cluster: Mapping[str, Any]
    strategy: tuple[str, ...]
    global_batch: int
    least: float
    """What the measured gain shall be of the simulated one, at least."""
    model: tuple[str, ...] = MODEL


CASES = (
    Case("data parallel 1 + 1", two_kinds(1), ("strategy=replicate", "strategy.micro_batches=1"), 32, 0.97),
    Case("data parallel 2 + 2", two_kinds(2), ("strategy=replicate", "strategy.micro_batches=1"), 48, 0.97),
    Case("pipeline 2 + 2", two_kinds(2), ("strategy=pipeline", "strategy.micro_batches=8"), 48, 0.95),
    Case("tensor 1 + 1", ONE_NODE, ("strategy=split", "strategy.micro_batches=1"), 32, 0.95),
    Case("hybrid 4 + 4", two_kinds(4), ("strategy=hybrid", "strategy.micro_batches=4"), 64, 0.95),
    Case("three kinds", THREE_KINDS, ("strategy=replicate", "strategy.micro_batches=1"), 40, 0.97),
    Case("memory binds", SMALL_MEMORY, ("strategy=replicate", "strategy.micro_batches=1"), 48, 0.97),
)


def jobs_of(case: Case, folder: Path) -> dict[str, EmulatedJob]:
    """The plans of a case by balance, on one calibration."""
    overrides = (*case.model, *case.strategy, f"global_batch={case.global_batch}")
    config = profiled(config_of(overrides, case.cluster), folder / "profile")
    return {
        balance: plan_job(with_strategy(config, (*overrides, f"strategy.balance={balance}")), folder / balance)
        for balance in BALANCES
    }


def run_case(case: Case, *, pairs: int) -> dict[str, Any]:
    """Measure a case; seconds are those of the declared devices."""
    with tempfile.TemporaryDirectory(prefix="whale-benchmark-") as scratch:
        jobs = jobs_of(case, Path(scratch))
        distinct = {job.plan.fingerprint: job for job in jobs.values()}
        found = measure_jobs(
            [(job.body, job.plan.num_ranks) for job in distinct.values()], pairs=pairs, block=1, start_method="fork"
        )
        step_s = {
            fingerprint: [wall / job.paces.stretch for wall in found.wall[i]]
            for i, (fingerprint, job) in enumerate(distinct.items())
        }
        by_balance = {balance: step_s[job.plan.fingerprint] for balance, job in jobs.items()}
        predicted = {balance: job.plan.predicted.step_s or 0.0 for balance, job in jobs.items()}
        ours, told = jobs["hardware"], jobs["hardware"].plan.predicted
        gain = Ratio.of(by_balance["even"], by_balance["hardware"])
        simulated = predicted["even"] / predicted["hardware"]
        return {
            "what": case.name,
            "step_s": {balance: Ratio.of(times, [1.0] * len(times)).median for balance, times in by_balance.items()},
            "predicted_step_s": predicted,
            "gain": vars(gain),
            "simulated_gain": simulated,
            "kept": gain.median / simulated,
            "kept_low": gain.low / simulated,
            "least": case.least,
            "ideal_gain": predicted["even"] / told.ideal_step_s if told.ideal_step_s else None,
            "over_whale": vars(Ratio.of(by_balance["whale"], by_balance["hardware"])),
            "same_as_whale": jobs["whale"].plan.fingerprint == ours.plan.fingerprint,
            "bubble": told.bubble_fraction,
            "stretch": ours.paces.stretch,
            "late_fraction": max(job.late_fraction() for job in jobs.values()),
            "overhead_us": ours.overhead_us(),
            "cpu_s_per_step": {
                balance: sum(found.cpu[list(distinct).index(job.plan.fingerprint)]) / pairs
                for balance, job in jobs.items()
            },
        }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The table that is printed."""
    table = Table(
        "hardware / even",
        "even",
        "hardware",
        "gain [95 %]",
        "simulated",
        "kept",
        "ideal",
        "over whale",
        "late",
        "us/action",
    )
    for row in rows:
        gain, whale = row["gain"], row["over_whale"]
        table.add_row(
            row["what"],
            f"{row['step_s']['even'] * 1e3:.3f} ms",
            f"{row['step_s']['hardware'] * 1e3:.3f} ms",
            f"{gain['median']:.3f} [{gain['low']:.3f}, {gain['high']:.3f}]",
            f"{row['simulated_gain']:.3f}",
            f"{row['kept']:.3f}",
            f"{row['ideal_gain']:.3f}" if row["ideal_gain"] else "",
            "1.000 (same plan)" if row["same_as_whale"] else f"{whale['median']:.3f}",
            f"{row['late_fraction']:.1%}",
            f"{row['overhead_us']:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--case", help="only the cases whose name holds this")
    parser.add_argument("--short", action="store_true", help="two pairs of a small model in one case")
    arguments = parser.parse_args()
    cases = [case for case in CASES if (arguments.case or "") in case.name]
    if arguments.short:
        cases = [replace(cases[0], model=SHORT_MODEL, global_batch=8)]
    console = Console(width=160)
    rows = []
    for case in cases:
        rows.append(run_case(case, pairs=2 if arguments.short else arguments.pairs))
        console.print(table_of(rows[-1:]))
    console.print(table_of(rows))
    console.print(f"written to {write_json('heterogeneous', rows)}")


if __name__ == "__main__":
    main()
