"""Which devices each scope gets, and the degrees that it may take on them. Compares the three numbers before all else:
devices declared, devices that the degrees ask for, devices that would be left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from whale_trainer.cluster import Cluster, Device
from whale_trainer.device_kinds import kind_name
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.scopes import Section, fixed, most_shards
from whale_trainer.planning.search.groups import count_groups
from whale_trainer.planning.strategy import Degrees
from whale_trainer.validation import did_you_mean


@dataclass(frozen=True)
class Claim:
    """What one scope asks for. `flops` is its part of the work, by which scopes with `auto` share devices."""

    section: Section
    flops: float

    @property
    def block(self) -> int:
        """Product of the degrees that the user fixed."""
        degrees = self.section.degrees
        return fixed(degrees.replicate) * fixed(degrees.stages) * fixed(degrees.split)

    @property
    def product(self) -> str:
        return degrees_text(self.section.degrees)


def degrees_text(degrees: Degrees) -> str:
    """`replicate 2 x split 2`: the degrees that are given."""
    given = [(key, getattr(degrees, key)) for key in ("replicate", "stages", "split")]
    return " x ".join(f"{key} {value}" for key, value in given if value is not None) or "replicate 1"


def hand_out(
    claims: Sequence[Claim], cluster: Cluster, *, may_leave: bool, speed: Callable[[Device], float]
) -> dict[int, tuple[Device, ...]]:
    """Devices for each claim's scope, in the order of the cluster. Raises `ConfigError` with the numbers."""
    pools = {claim.section.scope: _pool(claim.section, cluster) for claim in claims}
    named = {d.index for pool in pools.values() if pool is not None for d in pool}
    common = tuple(d for d in cluster.devices if d.index not in named)
    groups: dict[tuple[int, ...], list[Claim]] = {}
    for claim in claims:
        pool = pools[claim.section.scope]
        groups.setdefault(tuple(d.index for d in (common if pool is None else pool)), []).append(claim)
    taken: set[int] = set()
    given: dict[int, tuple[Device, ...]] = {}
    for indices, members in sorted(groups.items(), key=lambda item: len(item[0])):
        left = tuple(cluster.devices[i] for i in indices if i not in taken)
        part = _share(members, left, cluster, may_leave=may_leave, speed=speed)
        taken |= {d.index for devices in part.values() for d in devices}
        given |= part
    return given


def _pool(section: Section, cluster: Cluster) -> tuple[Device, ...] | None:
    """The devices that the scope names, by kind or node; None when it names none."""
    if section.degrees.devices is None:
        return None
    nodes = {device.node for device in cluster.devices}
    kinds = tuple(dict.fromkeys(device.kind.name for device in cluster.devices))
    problems, chosen = [], set()
    for word in section.degrees.devices:
        try:
            name = word if word in nodes else kind_name(word, kinds)
        except ValueError:
            name = word
        hits = {d.index for d in cluster.devices if name in (d.node, d.kind.name)}
        if not hits:
            hint = did_you_mean(word, (*sorted(nodes), *kinds))
            problems.append(
                Problem(f"{section.path}.devices", f"{word!r} is no node or device kind of the cluster; {hint}")
            )
        chosen |= hits
    if problems:
        raise ConfigError(problems)
    return tuple(d for d in cluster.devices if d.index in chosen)


def _share(
    claims: Sequence[Claim],
    pool: tuple[Device, ...],
    cluster: Cluster,
    *,
    may_leave: bool,
    speed: Callable[[Device], float],
) -> dict[int, tuple[Device, ...]]:
    """Deal the devices of one pool to the claims on it."""
    needed = sum(claim.block for claim in claims)
    flexible = [claim for claim in claims if not claim.section.degrees.is_fixed]
    if needed > len(pool):
        raise ConfigError([_too_few(claims, needed, pool, cluster)])
    if len(claims) == 1 and (may_leave or flexible):
        over = len(pool) % claims[0].block
        if over and not may_leave:
            raise ConfigError([_left_over(claims, len(pool) - over, pool)])
        return {claims[0].section.scope: pool}
    counts = [claim.block for claim in claims]
    if flexible:
        _deal_rest(claims, counts, len(pool))
    used = sum(counts)
    if used < len(pool) and not may_leave:
        raise ConfigError([_left_over(claims, used, pool)])
    fastest = sorted(sorted(pool, key=lambda d: (-speed(d), d.index))[:used], key=lambda d: d.index)
    walks = [_walk(claims, counts, order) for order in (fastest, fastest[::-1])]
    return min(walks, key=lambda walk: max(_load(c, walk[c.section.scope], speed) for c in claims))


def _deal_rest(claims: Sequence[Claim], counts: list[int], available: int) -> None:
    """Give each further block of devices to the flexible claim with the most work per device."""
    while True:
        rest = available - sum(counts)
        open_claims = [i for i, c in enumerate(claims) if not c.section.degrees.is_fixed and c.block <= rest]
        if not open_claims:
            return
        winner = max(open_claims, key=lambda i: claims[i].flops / counts[i])
        counts[winner] += claims[winner].block


def _walk(claims: Sequence[Claim], counts: Sequence[int], order: Sequence[Device]) -> dict[int, tuple[Device, ...]]:
    given, at = {}, 0
    for claim, count in zip(claims, counts, strict=True):
        given[claim.section.scope] = tuple(sorted(order[at : at + count], key=lambda d: d.index))
        at += count
    return given


def _load(claim: Claim, devices: Sequence[Device], speed: Callable[[Device], float]) -> float:
    return claim.flops / sum(speed(d) for d in devices)


def _path(claims: Sequence[Claim]) -> str:
    return claims[0].section.path if len(claims) == 1 else "strategy.scopes"


def _too_few(claims: Sequence[Claim], needed: int, pool: Sequence[Device], cluster: Cluster) -> Problem:
    product = " + ".join(claim.product for claim in claims)
    least = "" if all(c.section.degrees.is_fixed for c in claims) else " at least"
    where = "" if len(pool) == len(cluster.devices) else f", {len(pool)} of them for this scope"
    message = (
        f"{product} needs{least} {needed} devices, the cluster declares {len(cluster.devices)} ({cluster}){where}: "
        "lower a degree, or declare more devices"
    )
    return Problem(_path(claims), message)


def _left_over(claims: Sequence[Claim], used: int, pool: Sequence[Device]) -> Problem:
    product = " + ".join(claim.product for claim in claims)
    message = (
        f"{product} uses {used} of {len(pool)} devices, {len(pool) - used} would be left over: "
        "change a degree to auto or to one that divides, or set strategy.left_over=allow"
    )
    return Problem(_path(claims), message)


def degree_choices(
    section: Section, devices: Sequence[Device], model: ModelSpec, most_replicas: int, *, must_fill: bool
) -> Iterator[tuple[int, int, int]]:
    """(replicate, stages, split) that the scope may take on its devices, those with fewer devices first.

    `must_fill` puts devices of several nodes into one tensor group rather than leave them over.
    """
    degrees, total = section.degrees, len(devices)
    replicas = fixed(degrees.replicate)
    most_split = min(most_shards(section, model), total // (replicas * fixed(degrees.stages)))
    for split in _split_choices(degrees, most_split):
        most_stages = min(len(section.layers), total // (replicas * split)) if model.can_be_cut else 1
        for stages in range(1, most_stages + 1) if degrees.stages == "auto" else [fixed(degrees.stages)]:
            if degrees.replicate != "auto":
                yield replicas, stages, split
                continue
            inside = 0 if must_fill else count_groups(devices, split) // stages
            most = min(most_replicas, inside or total // (split * stages))
            if most:
                yield most, stages, split


def _split_choices(degrees: Degrees, most: int) -> list[int]:
    if degrees.split != "auto":
        return [fixed(degrees.split)]
    if degrees.replicate != "auto" and degrees.stages != "auto":
        return list(range(1, most + 1))
    return [s for s in (1, 2, 4, 8, 16, 32, 64) if s < most] + [most]
