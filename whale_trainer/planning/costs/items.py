"""Memory of a rank, item by item."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class MemoryItems:
    """What a rank's memory holds where it holds the most, in bytes."""

    parameters: float = 0
    gradients: float = 0
    optimizer_state: float = 0
    cast_copy: float = 0
    """Low-precision copies of the weights under autocast, one for each micro-batch in flight."""
    activations: float = 0
    """Kept for the backward pass, over all micro-batches in flight."""
    temporary_peak: float = 0
    """What is there for a moment: inside a layer's pass, or while the optimizer steps, whichever needs more."""
    bridge_buffers: float = 0
    """What has come over bridges before its turn, and what is on its way out."""
    bucket_buffers: float = 0
    """Copies of gradients that are summed in parts."""
    batch: float = 0
    """The rank's samples of the global batch."""
    framework: float = 0
    """What the device's runtime and its libraries take before the first tensor."""

    @property
    def total(self) -> int:
        return round(sum(float(getattr(self, f.name)) for f in fields(self)))

    def __add__(self, other: MemoryItems) -> MemoryItems:
        return MemoryItems(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def biggest(self, count: int = 3) -> list[tuple[str, float]]:
        """The largest items, by name in words."""
        named = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self)]
        return sorted([n for n in named if n[1] > 0], key=lambda n: -n[1])[:count]
