"""What is on this machine to measure: its devices by kind, its cores, and the memory that is free."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from whale_trainer.cluster import Cluster, DeviceKind
from whale_trainer.device_kinds import KINDS
from whale_trainer.devices import FoundGpu, found_gpus
from whale_trainer.errors import ConfigError, Problem

CPU = "CPU"
_MAKERS = ("NVIDIA", "Tesla", "GeForce")


@dataclass(frozen=True)
class Present:
    """A device of this machine: its kind, and torch's name of it."""

    kind: str
    device: str
    catalogue: DeviceKind | None = None
    """The kind as declared in the cluster or as the catalogue has it; None for one that neither knows."""


def present_devices(
    cluster: Cluster, accelerator: str, find: Callable[[], Sequence[FoundGpu]] = found_gpus
) -> list[Present]:
    """The GPUs of this machine, or one CPU device for each core that this process may use.

    Raises `ConfigError` where GPUs are asked for and there are none.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    gpus = [] if accelerator == "cpu" else list(find())
    if not gpus and accelerator == "gpu":
        message = "'gpu': there is no GPU here to measure; use trainer.accelerator=auto or cpu"
        raise ConfigError([Problem("trainer.accelerator", message)])
    if not gpus:
        return [Present(CPU, "cpu", KINDS[CPU])] * usable_cores()
    known = {device.kind.name: device.kind for device in cluster.devices if device.kind.is_gpu}
    return [_present(gpu, [*known.values(), *KINDS.values()]) for gpu in gpus]


def _present(gpu: FoundGpu, known: Sequence[DeviceKind]) -> Present:
    kind = next((k for k in known if k.is_gpu and gpu.is_of(k.name, k.memory_bytes)), None)
    own_name = "-".join(word for word in gpu.name.split() if word not in _MAKERS)
    return Present(kind.name if kind else own_name, f"cuda:{gpu.index}", kind)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or CPU


def free_bytes(device: torch.device, num_ranks: int) -> int | None:
    """Bytes that a rank may have: of a GPU what is free, of the host's memory its part; None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [found for found in (_host_free(), _container_free()) if found is not None]
    return max(1, min(free) // num_ranks) if free else None


def _host_free() -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _container_free() -> int | None:
    """What the limit of this process's container leaves, where there is one; files in the page cache can go."""
    folder = Path("/sys/fs/cgroup")
    limit, used = (_lines(folder / name) for name in ("memory.max", "memory.current"))
    if not limit or not used or not limit[0].isdecimal():
        return None
    cached = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith("inactive_file ")]
    return max(0, int(limit[0]) - int(used[0]) + sum(cached))


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
