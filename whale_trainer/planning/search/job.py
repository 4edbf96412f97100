"""The planner's question in one object, with what all its parts ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from whale_trainer.cluster import Cluster, Device
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.costs.cost_model import CostModel
from whale_trainer.planning.costs.memory import usable_bytes
from whale_trainer.planning.search.candidates import Weigher
from whale_trainer.planning.search.replicas import Setting
from whale_trainer.planning.search.whale import peak_speed
from whale_trainer.planning.simulation.times import Seconds, TimeModel
from whale_trainer.planning.strategy import StrategySpec

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
"""What a strategy with scopes may choose from where it leaves the number open."""


@dataclass(frozen=True)
class Job:
    """The whole question."""

    model: ModelSpec
    cluster: Cluster
    strategy: StrategySpec
    global_batch: int
    costs: CostModel
    times: TimeModel
    weigher: Weigher

    @property
    def micro_batches(self) -> int:
        assert isinstance(self.strategy.micro_batches, int)
        return self.strategy.micro_batches

    @property
    def may_leave(self) -> bool:
        return self.strategy.left_over == "allow"

    def speed(self, device: Device) -> float:
        """FLOP/s by which groups are ordered and shards are weighed; the base lines have their own."""
        if self.strategy.balance == "even":
            return 1.0
        return peak_speed(device) if self.strategy.balance == "whale" else device.kind.speed(self.costs.precision.dtype)

    def seconds(self, devices: tuple[Device, ...], weights: tuple[int, ...], samples: int) -> Seconds:
        """Prefix sums over the layers of a group's time; the even base line takes all devices as the first one."""
        if self.strategy.balance == "even":
            kind = self.cluster.devices[0].kind
            devices = tuple(device.model_copy(update={"kind": kind}) for device in devices)
        return self.times.group(devices, weights, samples).both

    def with_variant(self, micro_batches: int, schedule: str) -> Job:
        changed = self.strategy.model_copy(update={"micro_batches": micro_batches, "schedule": schedule})
        return replace(self, strategy=changed)

    def variants(self) -> Iterator[Job]:
        """The job with every number of micro-batches and every schedule that the strategy leaves open."""
        for micro_batches, schedule in self.strategy.variants:
            for count in (micro_batches,) if micro_batches else MICRO_BATCHES:
                yield self.with_variant(count, schedule)

    def setting(self, free: Mapping[int, float] | None) -> Setting:
        return Setting(
            self.costs,
            self.micro_batches,
            -(-self.global_batch // self.micro_batches),
            self.strategy.schedule,
            self.speed,
            self.seconds,
            (lambda device: free[device.index]) if free is not None else None,
        )

    def usable(self) -> dict[int, float]:
        return {d.index: float(usable_bytes(d.kind)) for d in self.cluster.devices}
