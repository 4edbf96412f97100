"""Predicted against measured: step time and memory of emulated plans of every kind.

    python -m benchmarks.prediction [--short]

Each cluster is calibrated once, as a user would; each plan then runs some steps at the pace of its devices. The planner
knows the pace through that profile only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulated import config_of, plan_job, profiled, with_strategy
from benchmarks.heterogeneous import MODEL, NETWORK, NVLINK, ONE_NODE, SHORT_MODEL, THREE_KINDS, two_kinds
from benchmarks.pairs import measure_jobs, write_json

PCIE = {"name": "pcie3", "bandwidth_gbit_per_s": 96, "latency_us": 10}
SLOW_NETWORK = {
    "nodes": [
        {"name": "volta", "devices": {"V100-SXM2-32GB": 2}, "link": NVLINK},
        {"name": "pascal", "devices": {"P100-PCIE-16GB": 1}, "link": PCIE},
    ],
    "network": {"bandwidth_gbit_per_s": 10, "latency_us": 30},
}
FOUR_ON_A_NODE = {
    "nodes": [{"name": "all", "devices": {"V100-SXM2-32GB": 2, "P100-PCIE-16GB": 2}, "link": NVLINK}],
    "network": NETWORK,
}


@dataclass(frozen=True)
class Case:
    """A plan: a cluster, how it is used, and the samples of a step."""

    name: str
    cluster: Mapping[str, Any]
    strategy: str
    global_batch: int = 32
    model: tuple[str, ...] = MODEL

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*self.model, *self.strategy.split(), f"global_batch={self.global_batch}")


CASES = (
    Case("one device", ONE_NODE, "strategy=single strategy.micro_batches=2"),
    Case("DP 1 + 1", two_kinds(1), "strategy=replicate strategy.micro_batches=1"),
    Case("DP 1 + 1, even", two_kinds(1), "strategy=replicate strategy.micro_batches=1 strategy.balance=even"),
    Case("DP 1 + 1, 4 micro-batches", two_kinds(1), "strategy=replicate strategy.micro_batches=4"),
    Case("DP 2 + 2", two_kinds(2), "strategy=replicate strategy.micro_batches=1", 48),
    Case("DP three kinds", THREE_KINDS, "strategy=replicate strategy.micro_batches=1", 40),
    Case("DP slow network", SLOW_NETWORK, "strategy=replicate strategy.micro_batches=1", 40),
    Case("TP 1 + 1", ONE_NODE, "strategy=split strategy.micro_batches=1"),
    Case("TP 1 + 1, even", ONE_NODE, "strategy=split strategy.micro_batches=1 strategy.balance=even"),
    Case("TP 2 + 2", FOUR_ON_A_NODE, "strategy=split strategy.micro_batches=2"),
    Case("PP 1 + 1", two_kinds(1), "strategy=pipeline strategy.micro_batches=4"),
    Case("PP 2 + 2", two_kinds(2), "strategy=pipeline strategy.micro_batches=8", 48),
    Case("PP 2 + 2, gpipe", two_kinds(2), "strategy=pipeline strategy.micro_batches=8 strategy.schedule=gpipe", 48),
    Case("PP slow network", SLOW_NETWORK, "strategy=pipeline strategy.micro_batches=4"),
    Case("DP x TP", FOUR_ON_A_NODE, "strategy=hybrid strategy.scopes=[{layers:'*',replicate:auto,split:2}]"),
    Case("DP x PP", two_kinds(2), "strategy=hybrid strategy.scopes=[{layers:'*',replicate:auto,stages:2}]", 48),
    Case("PP x TP", two_kinds(2), "strategy=hybrid strategy.scopes=[{layers:'*',stages:2,split:2}]"),
    Case("DP x PP x TP", two_kinds(4), "strategy=hybrid", 64),
    Case("auto", two_kinds(1), "strategy=auto"),
)


def run_case(case: Case, config: Any, folder: Path, *, steps: int) -> dict[str, Any]:
    """Plan, run and compare one plan; `config` holds the cluster's profile."""
    job = plan_job(with_strategy(config, case.overrides), folder)
    found = measure_jobs([(job.body, job.plan.num_ranks)], pairs=steps, block=1, start_method="fork")
    step_s = statistics.median(found.wall[0]) / job.paces.stretch
    predicted_s = job.plan.predicted.step_s or 0.0
    peaks = job.peak_memory_bytes()
    planned = [(d.planned_memory_bytes or 0) - d.framework_bytes for d in job.plan.devices]
    return {
        "what": case.name,
        "plan": job.plan.fingerprint,
        "ranks": job.plan.num_ranks,
        "predicted_step_s": predicted_s,
        "step_s": step_s,
        "error": predicted_s / step_s - 1,
        "memory": [peak / plan for peak, plan in zip(peaks, planned, strict=True)],
        "late_fraction": job.late_fraction(),
        "overhead_us": job.overhead_us(),
        "stretch": job.paces.stretch,
        "cpu_s_per_step": statistics.median(found.cpu[0]),
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The table that is printed."""
    table = Table("plan", "ranks", "predicted", "measured", "error", "memory measured / planned", "late", "us/action")
    for row in rows:
        table.add_row(
            row["what"],
            str(row["ranks"]),
            f"{row['predicted_step_s'] * 1e3:.3f} ms",
            f"{row['step_s'] * 1e3:.3f} ms",
            f"{row['error']:+.1%}",
            f"{min(row['memory']):.3f} to {max(row['memory']):.3f}",
            f"{row['late_fraction']:.1%}",
            f"{row['overhead_us']:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="steps after the warm-up, of which the median counts")
    parser.add_argument("--case", help="only the cases whose name holds this")
    parser.add_argument("--short", action="store_true", help="two steps of a small model in one case")
    arguments = parser.parse_args()
    cases = [case for case in CASES if (arguments.case or "") in case.name]
    if arguments.short:
        cases = [replace(cases[1], model=SHORT_MODEL, global_batch=8)]
    console = Console(width=130)
    rows = []
    profiles: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="whale-benchmark-") as scratch:
        for number, case in enumerate(cases):
            folder = Path(scratch, str(number))
            key = repr(sorted(case.cluster.items()))
            config = config_of(case.overrides, case.cluster)
            if key not in profiles:
                whole = config_of((*case.overrides, "mode=calibrate"), case.cluster)
                profiles[key] = profiled(whole, folder / "profile").profile
            config = config.model_copy(update={"profile": profiles[key]})
            rows.append(run_case(case, config, folder, steps=2 if arguments.short else arguments.steps))
            console.print(table_of(rows[-1:]))
    console.print(table_of(rows))
    errors = [abs(row["error"]) for row in rows]
    console.print(f"step time: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    console.print(f"written to {write_json('prediction', rows)}")


if __name__ == "__main__":
    main()
