"""Declared devices against those found: which device each rank of a plan drives on this machine.

Nothing here starts CUDA, so ranks may be forked afterwards: the driver's own tool is asked.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whale_trainer.device_kinds import KINDS
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.planning.plan import Plan, PlannedDevice

MEMORY_TOLERANCE = 0.15
"""A card counts as of a kind if its memory is within this fraction: drivers keep some for themselves."""


@dataclass(frozen=True)
class FoundGpu:
    """A GPU of this machine; `index` as CUDA counts it, in PCI order."""

    index: int
    name: str
    memory_bytes: int

    def is_of(self, kind: str, memory_bytes: int) -> bool:
        """Whether it can be the declared device: its model is named, and the memory fits."""
        model = re.split(r"[-\s]", kind.removeprefix("RTX-"))[0].lower()
        words = re.split(r"[^0-9a-z]+", self.name.lower())
        is_model = model in words or (model == "2080ti" and {"2080", "ti"} <= set(words))
        return is_model and abs(self.memory_bytes - memory_bytes) <= MEMORY_TOLERANCE * memory_bytes

    def __str__(self) -> str:
        return f"{self.name} ({self.memory_bytes / 2**30:.0f} GiB)"


def found_gpus() -> list[FoundGpu]:
    """The GPUs that the driver shows, in PCI order, as far as CUDA_VISIBLE_DEVICES lets this process use them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in text.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        rows = [rows[int(i)] for i in visible.split(",") if i.strip().isdecimal() and int(i) < len(rows)]
    return [FoundGpu(i, name.strip(), int(memory) << 20) for i, (name, _, memory) in enumerate(rows)]


def assign(plan: Plan, accelerator: str, find: Callable[[], Sequence[FoundGpu]] = found_gpus) -> tuple[list[str], str]:
    """Torch's name of each rank's device, and a line for the user. Raises `ConfigError` with both lists.

    `auto` takes CPU ranks where there is no GPU at all. Where there are some, they must be those that are declared.
    """
    declared = [d for d in plan.devices if d.kind not in KINDS or KINDS[d.kind].is_gpu]
    if accelerator == "cpu" or not declared:
        return ["cpu"] * plan.num_ranks, f"{plan.num_ranks} ranks on the CPU of this machine"
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    gpus = list(find())
    if not gpus and accelerator == "auto":
        return ["cpu"] * plan.num_ranks, f"no GPU here: each of the {plan.num_ranks} declared devices is a CPU process"
    names = _match(plan.devices, gpus)
    if names is None:
        message = (
            f"declared are {_count([d.kind for d in plan.devices])}, found are "
            f"{_count([str(g) for g in gpus]) or 'no GPUs'}; use trainer.accelerator=cpu for CPU processes, "
            "or cluster=auto for what is here"
        )
        raise ConfigError([Problem("cluster.nodes", message)])
    return names, f"{plan.num_ranks} ranks on the GPUs of this machine"


def _match(devices: Sequence[PlannedDevice], gpus: Sequence[FoundGpu]) -> list[str] | None:
    free = list(gpus)
    names = []
    for device in devices:
        gpu = next((g for g in free if g.is_of(device.kind, device.memory_bytes)), None)
        if gpu is None:
            return None
        free.remove(gpu)
        names.append(f"cuda:{gpu.index}")
    return names


def _count(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def found_cluster(find: Callable[[], Sequence[FoundGpu]] = found_gpus) -> dict[str, object]:
    """The `cluster` section for what is on this machine: its GPUs, or one CPU device. Raises `ConfigError`."""
    gpus = list(find())
    if not gpus:
        return {"nodes": [{"name": "here", "devices": {"CPU": 1}, "link": "pcie3"}]}
    counts: dict[str, int] = {}
    for gpu in gpus:
        kind = next((k.name for k in KINDS.values() if k.is_gpu and gpu.is_of(k.name, k.memory_bytes)), None)
        if kind is None:
            message = f"{gpu} is not in the catalogue: write a cluster file with a kind of your own (kinds:)"
            raise ConfigError([Problem("cluster.nodes", message)])
        counts[kind] = counts.get(kind, 0) + 1
    return {"nodes": [{"name": "here", "devices": counts, "link": "pcie3"}]}
