"""One measuring process on one device: its speeds, its free memory, the optimizer, every distinct layer.

Each figure is a trial: noted before it starts, warmed up, repeated; one that fails is noted with its reason, and the
next one goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whale_trainer.calibration.core import Core
from whale_trainer.calibration.journal import Journal
from whale_trainer.calibration.layers import LayerBench
from whale_trainer.calibration.present import device_name, free_bytes
from whale_trainer.calibration.statistics import Statistic, repeated
from whale_trainer.config import Config
from whale_trainer.device_kinds import BF16_CAPABILITY, DTYPES, DType
from whale_trainer.errors import ConfigError
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.plan import Plan
from whale_trainer.rank_info import RankInfo
from whale_trainer.runtime.precision import Precision

_TORCH_DTYPES: dict[DType, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_PRODUCT_S = 0.02
"""Matrix products grow until one takes this long."""
_LARGEST_SIDE = 16_384
_TRAFFIC_BYTES = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Of each of the three tensors by which memory bandwidth is measured: well beyond the caches."""
_MOST_ELEMENTS = 1 << 24
"""Weights that the optimizer is timed with, at most."""


@dataclass(frozen=True)
class DeviceJob:
    """What the measuring process of one device gets."""

    config: Config
    batch: Any
    """An example, as the loader makes it; on the CPU."""
    journal: Path
    samples: tuple[int, ...]
    """Sizes of micro-batches to measure, ascending."""
    num_ranks: int
    """Ranks that share the host's memory."""
    is_cut: bool = True
    """Measure parts of layers, too, as tensor groups have them."""
    is_emulated: bool = False
    """Measure one core for declared devices: processor time, at the core's usual speed."""

    @property
    def timeout_s(self) -> float:
        return self.config.timeout_s


def measure_device(job: DeviceJob, plan: Plan, spec: ModelSpec, run_dir: Path, info: RankInfo) -> None:
    """A rank's entry: measure all that the journal does not have yet."""
    journal, device = Journal(job.journal), info.device
    tf32 = job.config.trainer.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    attempt(journal, "device", lambda: _facts(device, job.num_ranks), device)
    for dtype in () if job.is_emulated else DTYPES:
        if dtype != "bf16" or device.type == "cpu" or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY:
            attempt(journal, f"speed {dtype}", partial(_speed, device, _TORCH_DTYPES[dtype]), device)
    if not job.is_emulated:
        attempt(journal, "traffic", lambda: _traffic(device), device)
    core = Core() if job.is_emulated else None
    if core is not None:
        journal.end("core", {"flops": core.flops})
    bench = LayerBench(job.config, spec, job.batch, device, core)
    for count in _counts(spec):
        attempt(journal, f"optimizer {count}", partial(_optimizer, bench, job.config, spec, count, device), device)
    journal.end("layers", {"groups": bench.groups})
    for name, trial in bench.trials(job.samples, journal.found, is_cut=job.is_cut):
        attempt(journal, name, trial, device)


def attempt(journal: Journal, name: str, trial: Callable[[], dict[str, Any]], device: torch.device) -> None:
    """Make a trial that was not made before. Its failure, whatever it is, is a result too."""
    if name in journal.found:
        return
    journal.begin(name)
    try:
        result = trial()
    except Exception as error:
        result = {"failed": reason(error)}
    journal.end(name, result)
    if "failed" in result and device.type == "cuda":
        torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    """Why a trial failed, in a line."""
    if isinstance(error, ConfigError):
        return error.problems[0].message
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return "out of memory"
    return f"{type(error).__name__}: {text}".rstrip(": ")[:200]


def _facts(device: torch.device, num_ranks: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": device_name(device), "torch": torch.__version__}
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the context takes its part first
        facts["compute_capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
        facts["total_bytes"] = torch.cuda.mem_get_info(device)[1]
    return facts | {"free_bytes": free_bytes(device, num_ranks)}


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(call: Callable[[], object], device: torch.device) -> Callable[[], tuple[float]]:
    def time_it() -> tuple[float]:
        wait_for(device)
        begin = time.perf_counter()
        call()
        wait_for(device)
        return (time.perf_counter() - begin,)

    return time_it


def _speed(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Sustained FLOP/s of square matrix products."""
    side = 128
    while True:
        a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
        call = _timed(partial(torch.matmul, a, b), device)
        call()
        if call()[0] >= _PRODUCT_S or side >= _LARGEST_SIDE:
            break
        side *= 2
    (time_s,) = repeated(call)
    return {"flops": 2.0 * side**3 / time_s.median_s}


def _traffic(device: torch.device) -> dict[str, float]:
    """Bytes per second of an addition: two tensors are read, one is written."""
    count = _TRAFFIC_BYTES[device.type] // 4
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    (time_s,) = repeated(_timed(lambda: torch.add(a, b, out=c), device))
    return {"bytes_per_s": 12.0 * count / time_s.median_s}


def _counts(spec: ModelSpec) -> Iterator[int]:
    """Numbers of tensors of the model's mean size that the optimizer is timed with."""
    mean = _mean_elements(spec)
    yield from (count for count in (1, 2, 4, 8, 16, 32) if count <= 2 or count * mean <= _MOST_ELEMENTS)


def _mean_elements(spec: ModelSpec) -> int:
    return max(1, spec.num_parameters // max(1, len(spec.parameters)))


def _optimizer(
    bench: LayerBench, config: Config, spec: ModelSpec, count: int, device: torch.device
) -> dict[str, float]:
    sizes = [_mean_elements(spec)] * count
    time_s = optimizer_time(bench, config, sizes, device)
    return {"elements": sum(sizes), "seconds": time_s.median_s, "spread_s": time_s.spread_s}


def optimizer_time(bench: LayerBench, config: Config, sizes: Sequence[int], device: torch.device) -> Statistic:
    """Of one optimizer step over tensors with these numbers of elements."""
    dtype = Precision(config.trainer.precision, device.type).parameter_dtype
    weights = [nn.Parameter(torch.ones(size, device=device, dtype=dtype)) for size in sizes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = config.make_optimizer([(f"weight{i}", weight) for i, weight in enumerate(weights)])
    (time_s,) = bench.steady(lambda: (bench.seconds(optimizer.step),))
    return time_s
