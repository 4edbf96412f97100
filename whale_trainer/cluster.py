"""The declared hardware: nodes with any number and mix of devices, and the links within and between nodes. Pure.

`load_cluster` takes the `cluster` section as plain data and returns a `Cluster`, or raises one `ConfigError` that holds
every problem. Nothing here looks at the machine: `nodes: auto` is recognised, and filled in by the launcher.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from whale_trainer.device_kinds import (
    BF16_CAPABILITY,
    DTYPES,
    GIB,
    KINDS,
    LINKS,
    DeviceKind,
    DType,
    Link,
    capability,
    kind_name,
)
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.validation import did_you_mean, problems_of, refusal

__all__ = ["DTYPES", "KINDS", "LINKS", "Cluster", "Device", "DeviceKind", "Link", "Node", "load_cluster"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Device(_Section):
    """One device of the cluster; `index` counts over all nodes in their order."""

    index: int
    kind: DeviceKind
    node: str

    def __str__(self) -> str:
        return f"{self.kind.name} on {self.node}"


class Node(_Section):
    """One machine: a kind for each of its devices, in order, and the link between them."""

    name: str
    devices: tuple[DeviceKind, ...]
    link: Link


class Cluster(_Section):
    """All nodes and the network between them. `is_auto`: to be filled in with what is found on the machine."""

    nodes: tuple[Node, ...]
    network: Link
    is_auto: bool = False

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        kinds = [(kind, node.name) for node in self.nodes for kind in node.devices]
        return tuple(Device(index=i, kind=kind, node=name) for i, (kind, name) in enumerate(kinds))

    @property
    def uses_gpus(self) -> bool:
        """True when any declared device is a GPU."""
        return any(device.kind.is_gpu for device in self.devices)

    def link_between(self, first: Device, second: Device) -> Link:
        """The node's own link for two devices of one node, else the network."""
        if first.node != second.node:
            return self.network
        return next(node.link for node in self.nodes if node.name == first.node)

    def __str__(self) -> str:
        return "; ".join(f"{node.name}: {count_kinds(node.devices)}" for node in self.nodes)


def count_kinds(kinds: tuple[DeviceKind, ...]) -> str:
    """`4 x V100-SXM2-32GB, 2 x T4`, in order of appearance."""
    names = [kind.name for kind in kinds]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


# ---- the section as it stands in YAML ----


def _text_key(key: object) -> object:
    return str(key) if isinstance(key, int) and not isinstance(key, bool) else key


def _known_kind(word: str, info: ValidationInfo) -> str:
    try:
        return kind_name(word, tuple((info.context or {}).get("kinds", ())))
    except ValueError as error:
        raise refusal(str(error)) from None


def _named_link(value: object) -> object:
    if isinstance(value, str):
        if value not in LINKS:
            raise refusal(f"{value!r} is no link; {did_you_mean(value, tuple(LINKS))}")
        link = LINKS[value]
        return {
            "name": link.name,
            "bandwidth_gbit_per_s": link.bandwidth_bytes_per_s * 8 / 1e9,
            "latency_us": link.latency_s * 1e6,
        }
    if not isinstance(value, dict | BaseModel):
        raise refusal(
            f"{value!r} is neither a link's name ({', '.join(LINKS)}) nor {{bandwidth_gbit_per_s, latency_us}}"
        )
    return value


_Count = Annotated[int, Field(ge=1, le=4096, description="a whole number of devices from 1 to 4096")]
_Name = Annotated[str, Field(min_length=1, description="a name")]
_KindName = Annotated[str, BeforeValidator(_text_key), AfterValidator(_known_kind)]
_Tflops = Annotated[float, Field(gt=0, le=1e5, description="TFLOP/s above 0, up to 100000")]
_Capability = Annotated[str, Field(pattern=r"^\d{1,2}\.\d$", description='text such as "8.0", or null for a CPU')]
_Speeds = Annotated[dict[DType, _Tflops], Field(min_length=1, description="TFLOP/s by dtype: {fp32: 15.7, fp16: 125}")]


class _LinkSection(_Section):
    name: _Name = "declared"
    bandwidth_gbit_per_s: float = Field(
        gt=0, le=1e5, description="gigabits per second above 0, up to 100000, without a unit"
    )
    latency_us: float = Field(default=20.0, ge=0, le=1e6, description="microseconds from 0 to 1000000")

    def link(self) -> Link:
        bandwidth = self.bandwidth_gbit_per_s * 1e9 / 8
        return Link(name=self.name, bandwidth_bytes_per_s=bandwidth, latency_s=self.latency_us * 1e-6)


_LinkValue = Annotated[_LinkSection, BeforeValidator(_named_link)]


class _KindSection(_Section):
    peak_tflops: _Speeds
    sustained_tflops: _Speeds | None = Field(
        default=None, description="as peak_tflops, which is taken where this is not given"
    )
    memory_gib: float = Field(gt=0, le=4096, description="GiB above 0, up to 4096, without a unit")
    memory_bandwidth_gb_per_s: float = Field(gt=0, le=1e5, description="GB/s above 0, up to 100000, without a unit")
    compute_capability: _Capability | None = Field(default=None, description='text such as "8.0", or null for a CPU')
    source: str = Field(default="written in the cluster file", description="text: where the figures come from")

    @model_validator(mode="after")
    def _figures_agree(self) -> Self:
        if "fp32" not in self.peak_tflops:
            raise refusal("peak_tflops has no fp32, which every kind needs")
        for dtype, sustained in (self.sustained_tflops or {}).items():
            if dtype not in self.peak_tflops:
                raise refusal(f"sustained_tflops has {dtype}, peak_tflops has only {', '.join(self.peak_tflops)}")
            if sustained > self.peak_tflops[dtype]:
                raise refusal(f"sustained_tflops {sustained} of {dtype} is above its peak of {self.peak_tflops[dtype]}")
        if self.compute_capability is not None and "bf16" in self.peak_tflops:
            least = ".".join(map(str, BF16_CAPABILITY))
            if capability(self.compute_capability) < BF16_CAPABILITY:
                raise refusal(f"bf16 needs compute capability {least}, this kind has {self.compute_capability}")
        return self

    def kind(self, name: str) -> DeviceKind:
        sustained = {**self.peak_tflops, **(self.sustained_tflops or {})}
        return DeviceKind(
            name=name,
            peak_flops={t: v * 1e12 for t, v in self.peak_tflops.items()},
            sustained_flops={t: v * 1e12 for t, v in sustained.items()},
            memory_bytes=int(self.memory_gib * GIB),
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_gb_per_s * 1e9,
            compute_capability=self.compute_capability,
            dtypes=tuple(t for t in DTYPES if t in self.peak_tflops),
            source=self.source,
        )


class _NodeSection(_Section):
    name: _Name
    devices: dict[_KindName, _Count] = Field(min_length=1, description="counts by kind, such as {V100-SXM2-32GB: 4}")
    link: _LinkValue = Field(default="pcie3", validate_default=True, description="a link's name")
    count: int = Field(default=1, ge=1, le=4096, description="a whole number of equal nodes from 1 to 4096")

    def nodes(self, kinds: dict[str, DeviceKind]) -> list[Node]:
        devices = tuple(kinds[name] for name, count in self.devices.items() for _ in range(count))
        names = [self.name] if self.count == 1 else [f"{self.name}-{i}" for i in range(self.count)]
        return [Node(name=name, devices=devices, link=self.link.link()) for name in names]


class _ClusterSection(_Section):
    nodes: tuple[_NodeSection, ...] = Field(
        strict=False, min_length=1, description="`auto`, or a list of {name, devices, link}"
    )
    network: _LinkValue = Field(
        default="ethernet_10g", validate_default=True, description="{bandwidth_gbit_per_s, latency_us}"
    )
    kinds: dict[Annotated[str, BeforeValidator(_text_key)], _KindSection] = Field(
        default_factory=dict, description="device kinds that the catalogue lacks, by name"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [node.name for node in self.nodes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise refusal(f"two nodes have the name {twice[0]}: every node needs its own")
        return self


def load_cluster(data: object) -> Cluster:
    """The cluster that the `cluster` section of the config declares. Raises `ConfigError` with all its problems."""
    if not isinstance(data, dict):
        raise ConfigError([Problem("cluster", f"{data!r} is not a mapping; allowed: {{nodes, network, kinds}}")])
    data = dict(data)
    is_auto = data.get("nodes") == "auto"
    if is_auto:
        data["nodes"] = [{"name": "auto", "devices": {"CPU": 1}}]
    elif isinstance(data.get("nodes"), str):
        word = data["nodes"]
        message = f"{word!r} is neither a list of nodes nor a word that is known; {did_you_mean(word, ('auto',))}"
        raise ConfigError([Problem("cluster.nodes", message)])
    own = data.get("kinds")
    names = tuple(str(name) for name in own) if isinstance(own, dict) else ()
    try:
        section = _ClusterSection.model_validate(data, context={"kinds": names})
    except ValidationError as error:
        raise ConfigError(problems_of(error, "cluster", _ClusterSection)) from None
    kinds = {**KINDS, **{name: kind.kind(name) for name, kind in section.kinds.items()}}
    nodes = () if is_auto else tuple(node for part in section.nodes for node in part.nodes(kinds))
    return Cluster(nodes=nodes, network=section.network.link(), is_auto=is_auto)
