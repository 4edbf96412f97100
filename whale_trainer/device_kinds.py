"""The catalogue: what one device of each kind can do, and how fast the usual links are. Figures only.

Peak figures are dense (no sparsity), fp32 without TF32, and come from the makers' data sheets. Sustained figures are
estimates of what large matrix products reach, told with each kind; `mode=calibrate` replaces them by measured ones.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict

from whale_trainer.validation import did_you_mean, nearest

DType = Literal["fp64", "fp32", "fp16", "bf16"]
DTYPES: tuple[DType, ...] = ("fp64", "fp32", "fp16", "bf16")
GIB = 1 << 30
BF16_CAPABILITY = (8, 0)


class DeviceKind(BaseModel):
    """One kind of device. Speeds in FLOP/s by dtype; a dtype that is missing from `dtypes` may not be used on it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    peak_flops: dict[DType, float]
    sustained_flops: dict[DType, float]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    compute_capability: str | None
    """CUDA compute capability such as "7.0"; None for a CPU."""
    dtypes: tuple[DType, ...]
    source: str
    free_bytes: int | None = None
    """What was measured to be free for a rank; None where nothing was."""

    @property
    def is_gpu(self) -> bool:
        return self.compute_capability is not None

    def speed(self, dtype: DType) -> float:
        """Sustained FLOP/s; that of fp32 for a dtype the kind has no figure for."""
        return self.sustained_flops.get(dtype, self.sustained_flops["fp32"])

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.free_bytes))


class Link(BaseModel):
    """How two devices of a node, or two nodes, talk to each other: bandwidth per direction and device."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float


def capability(text: str) -> tuple[int, int]:
    """`"7.5"` as (7, 5), for comparing."""
    major, minor = text.split(".")
    return int(major), int(minor)


def _gpu(
    name: str,
    memory_gib: float,
    memory_gb_per_s: float,
    compute_capability: str,
    peak_tflops: dict[DType, float],
    sustained: dict[DType, float],
    source: str,
) -> DeviceKind:
    """`sustained` is the reached part of the peak by dtype, from 0 to 1."""
    return DeviceKind(
        name=name,
        peak_flops={t: v * 1e12 for t, v in peak_tflops.items()},
        sustained_flops={t: v * 1e12 * sustained[t] for t, v in peak_tflops.items()},
        memory_bytes=int(memory_gib * GIB),
        memory_bandwidth_bytes_per_s=memory_gb_per_s * 1e9,
        compute_capability=compute_capability,
        dtypes=tuple(t for t in DTYPES if t in peak_tflops),
        source=f"peaks, memory, bandwidth: {source}; sustained: estimate, {_parts(sustained)} of the peak",
    )


def _parts(sustained: dict[DType, float]) -> str:
    return ", ".join(f"{t} {v:.0%}" for t, v in sustained.items())


_VOLTA: dict[DType, float] = {"fp64": 7.8, "fp32": 15.7, "fp16": 125}
_VOLTA_PART: dict[DType, float] = {"fp64": 0.9, "fp32": 0.9, "fp16": 0.7}
_PASCAL: dict[DType, float] = {"fp64": 4.7, "fp32": 9.3, "fp16": 18.7}
_PASCAL_PART: dict[DType, float] = {"fp64": 0.9, "fp32": 0.9, "fp16": 0.85}
_AMPERE: dict[DType, float] = {"fp64": 9.7, "fp32": 19.5, "fp16": 312, "bf16": 312}
_AMPERE_PART: dict[DType, float] = {"fp64": 0.9, "fp32": 0.9, "fp16": 0.75, "bf16": 0.75}
_HOPPER: dict[DType, float] = {"fp64": 34, "fp32": 67, "fp16": 989, "bf16": 989}
_HOPPER_PART: dict[DType, float] = {"fp64": 0.8, "fp32": 0.75, "fp16": 0.65, "bf16": 0.65}
_CARD_PART: dict[DType, float] = {"fp64": 0.9, "fp32": 0.75, "fp16": 0.8, "bf16": 0.8}
_LOW_POWER_PART: dict[DType, float] = {"fp64": 0.9, "fp32": 0.6, "fp16": 0.5, "bf16": 0.5}
"""Cards whose power limit holds their clock well below boost under load."""

_CATALOGUE = (
    _gpu("V100-SXM2-16GB", 16, 900, "7.0", _VOLTA, _VOLTA_PART, "NVIDIA V100 data sheet, SXM2"),
    _gpu("V100-SXM2-32GB", 32, 900, "7.0", _VOLTA, _VOLTA_PART, "NVIDIA V100 data sheet, SXM2"),
    _gpu("P100-PCIE-12GB", 12, 549, "6.0", _PASCAL, _PASCAL_PART, "NVIDIA P100 PCIe data sheet"),
    _gpu("P100-PCIE-16GB", 16, 732, "6.0", _PASCAL, _PASCAL_PART, "NVIDIA P100 PCIe data sheet"),
    _gpu("T4", 16, 320, "7.5", {"fp64": 0.25, "fp32": 8.1, "fp16": 65}, _LOW_POWER_PART, "NVIDIA T4 data sheet"),
    _gpu(
        "A10",
        24,
        600,
        "8.6",
        {"fp64": 0.49, "fp32": 31.2, "fp16": 125, "bf16": 125},
        _LOW_POWER_PART,
        "NVIDIA A10 data sheet, fp64 = fp32 / 64 (GA102 white paper)",
    ),
    _gpu("A100-SXM4-40GB", 40, 1555, "8.0", _AMPERE, _AMPERE_PART, "NVIDIA A100 data sheet, SXM"),
    _gpu("A100-SXM4-80GB", 80, 2039, "8.0", _AMPERE, _AMPERE_PART, "NVIDIA A100 data sheet, SXM"),
    _gpu(
        "L4",
        24,
        300,
        "8.9",
        {"fp64": 0.47, "fp32": 30.3, "fp16": 121, "bf16": 121},
        _LOW_POWER_PART,
        "NVIDIA L4 data sheet, halves of the figures with sparsity, fp64 = fp32 / 64",
    ),
    _gpu(
        "L40S",
        48,
        864,
        "8.9",
        {"fp64": 1.43, "fp32": 91.6, "fp16": 362, "bf16": 362},
        _CARD_PART,
        "NVIDIA L40S data sheet, fp64 = fp32 / 64",
    ),
    _gpu("H100-SXM5-80GB", 80, 3350, "9.0", _HOPPER, _HOPPER_PART, "NVIDIA H100 data sheet, SXM, without sparsity"),
    _gpu("H200-SXM5-141GB", 141, 4800, "9.0", _HOPPER, _HOPPER_PART, "NVIDIA H200 data sheet, SXM, without sparsity"),
    _gpu(
        "RTX-2080Ti",
        11,
        616,
        "7.5",
        {"fp64": 0.42, "fp32": 13.4, "fp16": 53.8},
        _CARD_PART,
        "NVIDIA Turing white paper, reference clocks, fp16 products summed in fp32",
    ),
    _gpu(
        "RTX-3090",
        24,
        936,
        "8.6",
        {"fp64": 0.56, "fp32": 35.6, "fp16": 71, "bf16": 71},
        _CARD_PART,
        "NVIDIA GA102 white paper, products summed in fp32",
    ),
    _gpu(
        "RTX-4090",
        24,
        1008,
        "8.9",
        {"fp64": 1.29, "fp32": 82.6, "fp16": 165, "bf16": 165},
        _CARD_PART,
        "NVIDIA Ada white paper, products summed in fp32",
    ),
    DeviceKind(
        name="CPU",
        peak_flops={"fp64": 40e9, "fp32": 80e9, "fp16": 80e9, "bf16": 80e9},
        sustained_flops={"fp64": 20e9, "fp32": 40e9, "fp16": 10e9, "bf16": 20e9},
        memory_bytes=4 * GIB,
        memory_bandwidth_bytes_per_s=10e9,
        compute_capability=None,
        dtypes=DTYPES,
        source="a core at 2.5 GHz with two 8-wide multiply-adds a cycle, half of it sustained; memory of a small rank",
    ),
)
KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in _CATALOGUE}


def _link(name: str, gb_per_s: float, latency_us: float) -> Link:
    return Link(name=name, bandwidth_bytes_per_s=gb_per_s * 1e9, latency_s=latency_us * 1e-6)


# GB/s per direction and device, about 80 % of the data sheet for PCIe, where protocol overhead is large
_LINKS = (
    _link("nvlink2", 150, 3),
    _link("nvlink3", 300, 3),
    _link("nvlink4", 450, 3),
    _link("pcie3", 12.5, 8),
    _link("pcie4", 25, 8),
    _link("pcie5", 50, 8),
    _link("shared_memory", 5, 20),
    _link("ethernet_10g", 1.25, 50),
    _link("ethernet_25g", 3.125, 30),
    _link("ethernet_100g", 12.5, 20),
    _link("infiniband_edr", 12.5, 2),
    _link("infiniband_hdr", 25, 2),
    _link("infiniband_ndr", 50, 2),
)
LINKS: dict[str, Link] = {link.name: link for link in _LINKS}

_NOISE = re.compile(r"NVIDIA|GEFORCE|TESLA|RTX|SXM\d?|PCIE?|GB|[^0-9A-Z]")


def _short(name: str) -> str:
    return _NOISE.sub("", name.upper())


_SHORT_NAMES = {_short(name): name for name in KINDS}


def kind_name(word: str, own: tuple[str, ...] = ()) -> str:
    """The catalogue name that `word` stands for (`V100-32`, `3090`, `h100`), or `word` if it is in `own`.

    Raises `ValueError` with the nearest right word, or with the choices where the word fits several kinds.
    """
    if word in own or word in KINDS:
        return word
    short = _short(word)
    if short in _SHORT_NAMES:
        return _SHORT_NAMES[short]
    candidates = [name for known, name in _SHORT_NAMES.items() if len(short) > 3 and known.startswith(short)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ValueError(f"{word!r} may be any of {', '.join(candidates)}: name one")
    guess = nearest(short, _SHORT_NAMES)
    hint = did_you_mean(_SHORT_NAMES[guess] if guess else word, (*own, *KINDS))
    raise ValueError(f"{word!r} is no device kind; {hint}; or write it out under cluster.kinds")
