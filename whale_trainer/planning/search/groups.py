"""Tensor groups: which devices stand together. Inside one node as long as there is room, equal kinds together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from whale_trainer.cluster import Device


@dataclass(frozen=True)
class Group:
    """Devices that share a tile, in the order of the cluster."""

    devices: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d.node for d in self.devices))

    @property
    def first(self) -> int:
        return self.devices[0].index


def count_groups(devices: Sequence[Device], size: int) -> int:
    """How many groups of `size` devices fit inside nodes."""
    return sum(len(list(group)) // size for _, group in groupby(devices, key=lambda d: d.node))


def form_groups(devices: Sequence[Device], size: int, needed: int, speed: Callable[[Device], float]) -> list[Group]:
    """The fastest `needed` groups of `size`; devices of several nodes are put together only when nodes have too few.

    `devices` come in the order of the cluster. Gives fewer than `needed` when there are not enough devices.
    """
    groups: list[Group] = []
    rest: list[Device] = []
    for _, members in groupby(devices, key=lambda d: d.node):
        ordered = _by_speed(members, speed)
        whole = len(ordered) // size * size
        groups += [_group(ordered[i : i + size]) for i in range(0, whole, size)]
        rest += ordered[whole:]
    if len(groups) < needed:
        ordered = _by_speed(rest, speed)
        groups += [_group(ordered[i : i + size]) for i in range(0, len(ordered) // size * size, size)]
    groups.sort(key=lambda g: (-sum(speed(d) for d in g.devices), g.first))
    return sorted(groups[:needed], key=lambda g: g.first)


def _by_speed(devices: object, speed: Callable[[Device], float]) -> list[Device]:
    return sorted(devices, key=lambda d: (-speed(d), d.index))  # type: ignore[call-overload, no-any-return]


def _group(devices: list[Device]) -> Group:
    return Group(tuple(sorted(devices, key=lambda d: d.index)))
