"""Measured times and memory of device kinds for one model: what `mode=calibrate` writes and the time model asks. Pure.

A profile holds, for each kind, the seconds of every distinct layer by samples of a micro-batch and by part of its cut
work, the optimizer's time, and the memory that was free. Profiles made on different machines merge into one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from whale_trainer.cluster import Cluster
from whale_trainer.device_kinds import DeviceKind
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import LayerSpec, ModelSpec
from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.planning.simulation.curves import Curve, Surface
from whale_trainer.validation import counted, did_you_mean, problems_of, refusal

SCHEMA_VERSION = 1
PATH = "cluster.profile"
"""Where a profile is named in the config."""
_AGAIN = "measure it with mode=calibrate"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _precision(word: str) -> str:
    if word not in PRECISIONS:
        raise refusal(f"{word!r} is no precision; {did_you_mean(word, tuple(PRECISIONS))}")
    return word


_Text = Annotated[str, Field(min_length=1, description="text")]
_Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$", description="UTC, as 2026-01-31T09:30:00Z")]
_Seconds = Annotated[float, Field(gt=0, le=86_400, description="seconds above 0, up to a day")]
_Spread = Annotated[float, Field(ge=0, le=86_400, description="seconds from 0 up to a day")]
_Samples = Annotated[int, Field(ge=1, le=2**31, description="samples of a micro-batch, an integer from 1")]
_Part = Annotated[float, Field(gt=0, le=1, description="part of the layer's cut work, above 0 and up to 1 (uncut)")]
_Count = Annotated[int, Field(ge=0, le=2**62, description="an integer from 0")]
_Names = Annotated[tuple[_Text, ...], Field(strict=False, description="a list of layer names")]


class PassTime(_Section):
    """Time of one layer on one device, without collectives; the last layer counts with the model's loss."""

    samples: _Samples
    part: _Part = 1.0
    forward_s: _Seconds
    backward_s: _Seconds
    forward_spread_s: _Spread = 0.0
    """Distance of the quartiles over the repeats."""
    backward_spread_s: _Spread = 0.0
    repeats: _Count = 1


class FailedTrial(_Section):
    """A measurement that could not be made, and why."""

    samples: _Samples
    part: _Part = 1.0
    reason: _Text


class LayerTimes(_Section):
    """Times of a layer, which hold for all layers of `same`, too."""

    layer: _Text
    same: _Names = ()
    cut_share: float = Field(default=0.0, ge=0, le=1, description="part of the FLOPs in cut modules, from 0 to 1")
    rows: tuple[PassTime, ...] = Field(default=(), strict=False, description="a list of {samples, part, forward_s, …}")
    failed: tuple[FailedTrial, ...] = Field(default=(), strict=False, description="a list of {samples, part, reason}")

    @model_validator(mode="after")
    def _rows_differ(self) -> Self:
        keys = [(row.samples, row.part) for row in self.rows]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise refusal(f"{self.layer} has two rows for {counted(twice[0][0], 'sample')} and part {twice[0][1]:g}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """All layers that these times hold for."""
        return (self.layer, *self.same)

    def surface(self) -> Surface:
        """(forward, backward) as a function of samples and part."""
        rows = sorted(self.rows, key=lambda row: (row.part, row.samples))
        found = [(part, list(same)) for part, same in groupby(rows, key=lambda row: row.part)]
        return Surface(
            tuple(
                (
                    part,
                    Curve.through([(row.samples, row.forward_s) for row in same]),
                    Curve.through([(row.samples, row.backward_s) for row in same]),
                )
                for part, same in found
            ),
            self.cut_share,
        )


class OptimizerTime(_Section):
    """Seconds of an optimizer step over n elements: `fixed_s + element_s * n`."""

    optimizer: _Text
    fixed_s: _Spread
    element_s: float = Field(ge=0, le=1, description="seconds of an element, from 0 to 1")


class KindTimes(_Section):
    """What was measured on a device of one kind."""

    device: _Text
    """The device as its driver calls it."""
    machine: _Text
    torch: _Text
    measured_at: _Time
    memory_bytes: Annotated[int, Field(ge=1, le=2**62, description="free bytes, an integer from 1")] | None = None
    """Bytes that were really free for a rank; None where that cannot be found out."""
    optimizer: OptimizerTime | None = None
    layers: tuple[LayerTimes, ...] = Field(strict=False, min_length=1, description="a list of {layer, same, rows, …}")

    @model_validator(mode="after")
    def _layers_differ(self) -> Self:
        names = [name for times in self.layers for name in times.names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise refusal(f"the layer {twice[0]} is there twice: each belongs to one list of equal layers")
        return self

    def at_pace(self, factor: float, device: str) -> KindTimes:
        """The same measurements on a device that takes `factor` times as long; its memory is the declared one."""

        def slower(row: PassTime) -> PassTime:
            seconds = {name: getattr(row, name) * factor for name in PassTime.model_fields if name.endswith("_s")}
            return row.model_copy(update=seconds)

        layers = tuple(t.model_copy(update={"rows": tuple(map(slower, t.rows))}) for t in self.layers)
        optimizer = self.optimizer
        if optimizer is not None:
            seconds = {"fixed_s": optimizer.fixed_s * factor, "element_s": optimizer.element_s * factor}
            optimizer = optimizer.model_copy(update=seconds)
        return self.model_copy(
            update={"device": device, "memory_bytes": None, "layers": layers, "optimizer": optimizer}
        )


class TransferTime(_Section):
    """Seconds to send, or to sum, that many bytes."""

    num_bytes: Annotated[int, Field(ge=1, le=2**62, description="an integer from 1")]
    seconds: _Seconds
    spread_s: _Spread = 0.0


class LinkTimes(_Section):
    """A link as measured: `latency_s + bytes / bandwidth_bytes_per_s`."""

    what: Literal["point_to_point", "all_reduce"]
    kinds: Annotated[tuple[_Text, ...], Field(strict=False, min_length=2, description="the kind of each rank")]
    machine: _Text
    measured_at: _Time
    latency_s: _Spread
    bandwidth_bytes_per_s: float = Field(gt=0, le=1e14, description="bytes per second above 0, up to 1e14")
    """For a sum over all ranks: bytes of the tensor by the time of the whole sum."""
    rows: tuple[TransferTime, ...] = Field(default=(), strict=False, description="a list of {num_bytes, seconds}")


class ModelIdentity(_Section):
    """Which model was measured; `digest` covers the sizes of its layers and parameters."""

    name: _Text
    num_layers: _Count
    num_parameters: _Count
    forward_flops: float = Field(ge=0, description="FLOPs of one sample, from 0")
    digest: _Text

    def __str__(self) -> str:
        sizes = f"{counted(self.num_layers, 'layer')}, {self.num_parameters:,} parameters"
        return f"{self.name} ({sizes}, {self.forward_flops:.4g} FLOPs a sample, {self.digest})"


class Profile(_Section):
    """Measurements of one model in one precision, by device kind."""

    schema_version: Literal[1] = 1
    model: ModelIdentity
    precision: Annotated[str, AfterValidator(_precision)]
    kinds: dict[_Text, KindTimes] = Field(min_length=1, description="measurements by device kind")
    links: tuple[LinkTimes, ...] = Field(default=(), strict=False, description="a list of measured links")
    notes: tuple[_Text, ...] = Field(default=(), strict=False, description="a list of sentences")

    def pass_s(self, kind: str, layer: str, samples: float, part: float) -> tuple[float, float] | None:
        """(forward, backward) seconds of `layer` on one device of `kind`; None where nothing was measured.

        `samples` of a micro-batch, which need not be whole; `part` of the layer's cut work, from above 0 to 1 (uncut).
        Linear between measurements and, beyond them, along the last slope.
        """
        known = self._surfaces.get((kind, layer))
        if known is None:
            return None
        number, surface = known
        key = (number, samples, part)
        if key not in self._answers:
            self._answers[key] = surface.at(samples, part)
        return self._answers[key]

    def optimizer_s(self, kind: str, num_elements: float) -> float | None:
        """Seconds of an optimizer step over `num_elements` weights; None where nothing was measured."""
        times = self.kinds[kind].optimizer if kind in self.kinds else None
        return None if times is None else times.fixed_s + times.element_s * num_elements

    def memory_bytes(self, kind: str) -> int | None:
        """Bytes that were free for a rank on a device of `kind`; None where nothing was measured."""
        return self.kinds[kind].memory_bytes if kind in self.kinds else None

    def lacks(self, kind: str, layers: Iterable[str]) -> bool:
        """Whether there is a layer without times on that kind."""
        return any((kind, layer) not in self._surfaces for layer in layers)

    def notes_for(self, cluster: Cluster, spec: ModelSpec) -> tuple[str, ...]:
        """What the user of a plan should know, in sentences: how profiles were merged, which kinds are estimated."""
        kinds = dict.fromkeys(device.kind.name for device in cluster.devices)
        estimated = [kind for kind in kinds if self.lacks(kind, spec.layer_names)]
        if not estimated:
            return self.notes
        names = ", ".join(estimated)
        return (*self.notes, f"{names}: not every layer was measured, so times are estimated from the kind's figures.")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML or JSON; `load_profile` reads it back."""
        plain = self.model_dump(mode="json", exclude_defaults=True)
        return {"schema_version": self.schema_version, **plain}

    @cached_property
    def _answers(self) -> dict[tuple[int, float, float], tuple[float, float]]:
        return {}

    @cached_property
    def _surfaces(self) -> Mapping[tuple[str, str], tuple[int, Surface]]:
        """By kind and layer, numbered; equal layers share theirs."""
        measured = [(kind, each) for kind, times in self.kinds.items() for each in times.layers if each.rows]
        found: dict[tuple[str, str], tuple[int, Surface]] = {}
        for number, (kind, each) in enumerate(measured):
            found.update(dict.fromkeys([(kind, name) for name in each.names], (number, each.surface())))
        return found


def load_profile(data: object, path: str = PATH) -> Profile:
    """The profile that plain data (of a YAML file) stands for. Raises `ConfigError` with all problems under `path`."""
    if not isinstance(data, Mapping):
        found = "an empty file" if data is None else repr(data)[:60]
        raise ConfigError([Problem(path, f"{found} is no profile; {_AGAIN}")])
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        found = "it has no schema_version" if version is None else f"its schema_version is {version!r}"
        message = f"is no profile that this release can read: {found}, known is {SCHEMA_VERSION}; {_AGAIN}"
        raise ConfigError([Problem(path, message)])
    try:
        return Profile.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(problems_of(error, path, Profile)) from None


def identity_of(spec: ModelSpec) -> ModelIdentity:
    """What tells one model from another as far as times are concerned: sizes of layers, parameters and cuts."""
    layers = [[x.name, f"{x.forward_flops:.6g}", f"{x.split_flops:.6g}", x.boundary_bytes] for x in spec.layers]
    dims = [[[d.name, d.units, d.num_kv_heads] for d in x.split_dims] for x in spec.layers]
    parameters = [[p.name, p.shape, p.layers, p.trainable] for p in spec.parameters]
    text = json.dumps([spec.name, layers, dims, parameters])
    return ModelIdentity(
        name=spec.name,
        num_layers=spec.num_layers,
        num_parameters=spec.num_parameters,
        forward_flops=float(f"{sum(x.forward_flops for x in spec.layers):.6g}"),
        digest=hashlib.sha256(text.encode()).hexdigest()[:16],
    )


def check_profile(profile: Profile, spec: ModelSpec, precision: str) -> None:
    """Raises `ConfigError` when the profile is of another model, or was measured in another precision."""
    own = identity_of(spec)
    problems = []
    if profile.model.digest != own.digest:
        message = (
            f"is a profile of another model: {profile.model} was measured, this is {own}; "
            f"{_AGAIN} and the same model and data, or leave {PATH} out"
        )
        problems.append(Problem(PATH, message))
    if profile.precision != precision:
        message = (
            f"was measured in {profile.precision}, trainer.precision is {precision}; "
            f"{_AGAIN} trainer.precision={precision}, or set trainer.precision={profile.precision}"
        )
        problems.append(Problem(PATH, message))
    if problems:
        raise ConfigError(problems)


def with_measured_memory(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster in which every kind that was measured says what is really free on it."""

    def measured(kind: DeviceKind) -> DeviceKind:
        free_bytes = profile.memory_bytes(kind.name)
        return kind if free_bytes is None else kind.model_copy(update={"free_bytes": free_bytes})

    nodes = (
        node.model_copy(update={"devices": tuple(measured(kind) for kind in node.devices)}) for node in cluster.nodes
    )
    return Cluster(nodes=tuple(nodes), network=cluster.network, is_auto=cluster.is_auto)


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """One profile with the kinds and links of all.

    A kind that was measured several times: the newest measurement holds, with the least free memory of all, since a
    plan has to fit everywhere; a note tells. Raises `ConfigError` for profiles of different models or precisions.
    """
    if not profiles:
        raise ConfigError([Problem(PATH, "is an empty list; give one path or more, or leave it out")])
    first = profiles[0]
    problems = []
    for index, other in enumerate(profiles[1:], start=1):
        if other.model.digest != first.model.digest:
            message = f"{other.model} cannot be merged with {first.model}: one model for all; {_AGAIN} on each machine"
            problems.append(Problem(f"{PATH}[{index}]", message))
        if other.precision != first.precision:
            message = f"{other.precision} cannot be merged with {first.precision}: one precision for all; {_AGAIN}"
            problems.append(Problem(f"{PATH}[{index}]", message))
    if problems:
        raise ConfigError(problems)
    kinds: dict[str, KindTimes] = {}
    notes = [note for profile in profiles for note in profile.notes]
    for profile in profiles:
        for name, times in profile.kinds.items():
            if name in kinds and kinds[name] != times:
                times, note = _newest(name, kinds[name], times)
                notes.append(note)
            kinds[name] = times
    return Profile(
        model=first.model,
        precision=first.precision,
        kinds=kinds,
        links=_newest_links([link for profile in profiles for link in profile.links]),
        notes=tuple(dict.fromkeys(notes)),
    )


def _newest(name: str, first: KindTimes, second: KindTimes) -> tuple[KindTimes, str]:
    old, new = sorted((first, second), key=lambda times: times.measured_at)
    sizes = [times.memory_bytes for times in (old, new) if times.memory_bytes is not None]
    note = (
        f"{name} was measured on {old.machine} ({old.measured_at}) and {new.machine} ({new.measured_at}): "
        "the newer times and the smaller free memory hold."
    )
    return new.model_copy(update={"memory_bytes": min(sizes, default=None)}), note


def _newest_links(links: Sequence[LinkTimes]) -> tuple[LinkTimes, ...]:
    found: dict[tuple[object, ...], LinkTimes] = {}
    for link in sorted(links, key=lambda link: link.measured_at):
        found[link.what, link.kinds, link.machine] = link
    return tuple(found.values())


def equal_layers(spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Indices of the layers that cost the same, group by group, in order; one of each has to be measured.

    Equal are the costs of the layers, the size of what they get, and the shapes of their parameters.
    """
    shapes: list[list[object]] = [[] for _ in spec.layers]
    for parameter in spec.parameters:
        for index in parameter.layers:
            shapes[index].append((parameter.shape, parameter.cut, parameter.trainable))
    groups: dict[object, list[int]] = {}
    for index, (before, layer) in enumerate(pairwise([None, *spec.layers])):
        assert layer is not None
        is_last = index == spec.num_layers - 1  # it counts with the loss
        key = (_costs_of(layer), before.boundary_bytes if before else None, tuple(shapes[index]), is_last)
        groups.setdefault(key, []).append(index)
    return tuple(tuple(group) for group in groups.values())


def _costs_of(layer: LayerSpec) -> tuple[object, ...]:
    return (
        layer.forward_flops,
        layer.split_flops,
        layer.activation_bytes,
        layer.boundary_bytes,
        layer.split_dims,
        layer.moved_bytes,
        layer.num_kernels,
    )
