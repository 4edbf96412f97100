"""What any interval of layers holds while it trains, on one shard of a tensor group, in constant time per question.

Over a step a rank's memory rises and falls. For one micro-batch, through the layers `start` to `stop`:

    bytes        /\\        each layer's backward pass adds gradients and temporaries on top of what is still kept,
           /\\__/  \\/\\      and frees what its forward pass kept
      /\\__/           \\/\\
    _/  forward   backward \\_

So the most is, over all layers, what is kept up to there plus the layer's own peak. The other micro-batches in flight
lie below with all that they keep.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from whale_trainer.model_spec import Bytes, Footprint, SplitDim

UNCUT_ACTIVATIONS = 1 / 3
"""Where it was not measured: part of a cut layer's saved activations that each shard holds whole (residual, norms and
gathered outputs). In a decoder block these are 10 of 34 bytes per element (Korthikanti et al. 2022)."""

PEAKS = ("forward", "first", "later", "first_held", "later_held", "split", "split_held")
"""The fields of a footprint that tell peaks."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Pair = tuple[float, float]
"""Bytes: fixed, and for each sample."""


def rough_footprint(kept: float, boundary: float, casts: float = 0.0) -> Footprint:
    """For a layer whose passes were not measured, from the bytes of a sample that it keeps and that it gives on."""
    edge = Bytes(each=boundary)
    both = (Bytes(each=2 * boundary),)
    return Footprint(
        kept=Bytes(casts, kept),
        casts=Bytes(casts),
        output=edge,
        output_gradient=edge,
        forward=(Bytes(casts, kept + boundary),),
        first=both,
        later=both,
        first_held=(edge,),
        later_held=(edge,),
        split=both,
        split_held=(edge,),
        waiting=Bytes(0.0, kept + boundary),
    )


def part_of(footprint: Footprint, part: float) -> Footprint:
    """A guess at a shard's part of a layer whose cut form was not measured; what goes to other layers is whole."""
    factor = UNCUT_ACTIVATIONS + (1 - UNCUT_ACTIVATIONS) * part

    def some(*found: Bytes) -> tuple[Bytes, ...]:
        return tuple(Bytes(b.fixed * factor, b.each * factor) for b in found)

    return replace(
        footprint,
        kept=some(footprint.kept)[0],
        casts=some(footprint.casts)[0],
        forward=some(*footprint.forward),
        first=some(*footprint.first),
        later=some(*footprint.later),
        first_held=some(*footprint.first_held),
        later_held=some(*footprint.later_held),
        split=some(*footprint.split),
        split_held=some(*footprint.split_held),
        waiting=some(footprint.waiting)[0],
    )


class Flow(NamedTuple):
    """How micro-batches pass through a rank's layers."""

    samples: int
    """Of a micro-batch."""
    in_flight: int
    """Micro-batches whose activations are held at once."""
    micro_batches: int
    """Of a step."""
    is_fresh: bool = False
    """Whether gradients are there only once a backward pass has made them: no rank shares them, so that no bucket
    holds them all the time."""


class State(NamedTuple):
    """Bytes that a shard of some layers holds whatever the batch."""

    parameters: float
    gradients: float
    optimizer: float
    shared: float = 0.0
    """The part of the gradients that is there from the start of a fresh step as well, for other ranks have them too."""
    tied: float = 0.0
    """The part that several of the layers add to: the first one's waits in a backward pass until the last has come."""
    last_use: int = 0
    """The last layer that adds to it."""


class RangeMax:
    """The largest of any run of neighbouring numbers, in constant time (a table of runs of 1, 2, 4, ... numbers)."""

    def __init__(self, values: Numbers) -> None:
        self._rows: list[array[float]] = [array("d", values.tobytes())]
        width = 1
        while 2 * width <= len(values):
            row = np.frombuffer(self._rows[-1])
            self._rows.append(array("d", np.maximum(row[:-width], row[width:]).tobytes()))
            width *= 2

    def most(self, start: int, stop: int) -> float:
        """Minus infinity for an empty run."""
        if stop <= start:
            return -inf
        level = (stop - start).bit_length() - 1
        row = self._rows[level]
        first, last = row[start], row[stop - (1 << level)]
        return first if first > last else last


class _Lines:
    """For each layer the largest of several straight lines over the number of samples."""

    def __init__(self, layers: Sequence[Sequence[Pair]]) -> None:
        width = max(1, *map(len, layers))
        padded = [[*lines, *[(-inf, 0.0)] * (width - len(lines))] for lines in layers]
        both = np.array(padded, dtype=float).reshape(len(layers), width, 2)
        self._fixed, self._each = both[..., 0], both[..., 1]

    def at(self, samples: int) -> Numbers:
        found: Numbers = np.zeros(len(self._fixed))
        for fixed, each in zip(self._fixed.T, self._each.T, strict=True):
            np.maximum(found, fixed + each * samples, out=found)
        return found


@dataclass(frozen=True)
class _Shard:
    """A layer's footprint on one shard, in pairs of bytes."""

    kept: Pair
    casts: Pair
    kept_input: Pair
    kept_output: Pair
    output: Pair
    output_gradient: Pair
    forward: tuple[Pair, ...]
    first: tuple[Pair, ...]
    later: tuple[Pair, ...]
    first_held: tuple[Pair, ...]
    later_held: tuple[Pair, ...]
    split: tuple[Pair, ...]
    split_held: tuple[Pair, ...]
    waiting: Pair

    @classmethod
    def of(cls, footprint: Footprint, parts: Mapping[SplitDim, float]) -> _Shard:
        def on(found: Bytes | tuple[Bytes, ...]) -> Any:
            return found.on(parts) if isinstance(found, Bytes) else tuple(peak.on(parts) for peak in found)

        return cls(**{f.name: on(getattr(footprint, f.name)) for f in fields(cls)})


@dataclass(frozen=True)
class _Figures:
    """For one number of samples, by layer; peaks are counted from what is kept of the first layer on."""

    kept: list[float]
    """Of the layers before each, and of all."""
    forward: RangeMax
    first: RangeMax
    later: RangeMax
    first_held: list[float]
    later_held: list[float]
    split: RangeMax
    """Less what the layers up to there keep for the gradients of weights, as `waiting` counts it."""
    split_held: list[float]
    waiting: list[float]
    """Of the layers before each, and of all."""
    output: list[float]
    """What the layer before gives; nothing for the first, whose input is the batch."""
    before: list[float]
    """The part of that which is held where a tile begins, beyond what layers keep of it."""
    after: list[float]
    """The part of that which is held where a tile ends, beyond what layers keep of it."""
    returning: list[float]
    """The gradient of that."""


class ShardFootprints:
    """What intervals of layers hold on one shard."""

    def __init__(
        self, footprints: Sequence[Footprint], parts: Mapping[SplitDim, float], gradients: Sequence[float]
    ) -> None:
        """`gradients` are bytes by the last layer that uses a parameter."""
        known: dict[int, _Shard] = {id(f): _Shard.of(f, parts) for f in {id(f): f for f in footprints}.values()}
        layers = [known[id(f)] for f in footprints]
        nothing = (0.0, 0.0)
        # what a tile from, or up to, each place between layers has at its edge; at both ends of the model nothing
        pairs = list(pairwise(layers))
        outputs = [nothing, *(b.output for b, _ in pairs), nothing]
        given = [nothing, *(b.kept_output for b, _ in pairs), nothing]
        # a boundary tensor is there once, whether the layer before it or the one after it keeps it
        taken = [nothing, *(_less(a.kept_input, b.kept_output) for b, a in pairs)]
        inside = np.array([_more(t, _more(x.kept, x.kept_output)) for t, x in zip(taken, layers, strict=True)])
        self._kept = np.vstack([np.zeros(2), inside.cumsum(axis=0)])
        self._waiting = np.vstack([np.zeros(2), np.array([x.waiting for x in layers]).reshape(-1, 2).cumsum(axis=0)])
        self._casts = list(accumulate((x.casts[0] for x in layers), initial=0.0))
        self._outputs = np.array(outputs)
        self._entering = np.array([_less(o, g) for o, g in zip(outputs[:-1], given[:-1], strict=True)])
        self._before = np.array([_less(o, t) for o, t in zip(outputs[:-1], taken, strict=True)])
        self._after = np.array([_less(o, g) for o, g in zip(outputs, given, strict=True)])
        self._returning = np.array([nothing, *(b.output_gradient for b, _ in pairs), nothing])
        self._lines = {name: _Lines([getattr(x, name) for x in layers]) for name in PEAKS}
        self._gradients = list(accumulate(gradients, initial=0.0))
        self._num_layers = len(layers)
        self._known: dict[int, _Figures] = {}

    def _figures(self, samples: int) -> _Figures:
        if samples not in self._known:
            unit = np.array([1.0, samples])
            kept, waiting = self._kept @ unit, self._waiting @ unit
            lines = {name: found.at(samples) for name, found in self._lines.items()}
            # gradients of later layers are there when a layer's first backward pass begins
            earlier = np.array(self._gradients[1:])
            self._known[samples] = _Figures(
                kept.tolist(),
                RangeMax(kept[:-1] + self._entering @ unit + lines["forward"]),
                RangeMax(kept[1:] + lines["first"] - earlier),
                RangeMax(kept[1:] + lines["later"]),
                (kept[1:] + lines["first_held"] - earlier).tolist(),
                (kept[1:] + lines["later_held"]).tolist(),
                RangeMax(kept[1:] + lines["split"] - waiting[1:]),
                (kept[1:] + lines["split_held"] - waiting[1:]).tolist(),
                waiting.tolist(),
                (self._outputs @ unit).tolist(),
                (self._before @ unit).tolist(),
                (self._after @ unit).tolist(),
                (self._returning @ unit).tolist(),
            )
        return self._known[samples]

    def held(self, start: int, stop: int, samples: int) -> float:
        """Bytes of a micro-batch in flight, with the input and the output of the layers."""
        at = self._figures(samples)
        return at.kept[stop] - at.kept[start] + at.before[start] + at.after[stop]

    def casts(self, start: int, stop: int) -> float:
        """Bytes of low-precision weights, which are part of `held`."""
        return self._casts[stop] - self._casts[start]

    def waiting(self, start: int, stop: int, samples: int) -> float:
        """Bytes of a micro-batch whose weights' gradients wait."""
        at = self._figures(samples)
        return at.waiting[stop] - at.waiting[start]

    def split_peak(self, start: int, stop: int, flow: Flow) -> float:
        """The most bytes at once, without gradients, while a backward pass leaves the gradients of weights."""
        at = self._figures(flow.samples)
        base = at.before[start] + at.after[stop] - at.kept[start]
        is_last = stop == self._num_layers
        found = at.split.most(start, stop if is_last else stop - 1) + at.waiting[stop]
        if not is_last:
            found = max(found, at.split_held[stop - 1] + at.waiting[stop])
        return (
            (flow.in_flight - 1) * self.held(start, stop, flow.samples) + base + self.buffers(start, stop, flow) + found
        )

    def buffers(self, start: int, stop: int, flow: Flow) -> float:
        """What bridges hold in a backward pass: the gradient that came, the next input or gradient, and what is sent.

        A rank posts its receives one action early.
        """
        at = self._figures(flow.samples)
        if flow.micro_batches == 1:
            return at.returning[stop]
        early = at.output[start] if flow.in_flight < flow.micro_batches and start else at.returning[stop]
        return at.returning[stop] + early + at.returning[start]

    def peak(self, start: int, stop: int, flow: Flow, state: State) -> float:
        """The most bytes of activations, temporaries, bridge buffers and gradients at once in a step."""
        flying, gradients = flow.in_flight, state.gradients
        if flying < 1:
            return gradients
        at = self._figures(flow.samples)
        is_last = stop == self._num_layers
        base = at.before[start] + at.after[stop] - at.kept[start]
        held = at.kept[stop] + base
        below = (flying - 1) * held
        buffers = self.buffers(start, stop, flow)
        forward = base + at.forward.most(start, stop) + (0.0 if is_last else buffers)
        inner = stop if is_last else stop - 1
        later = at.later.most(start, inner)
        if state.tied and state.last_use < inner:
            later = max(later, at.later.most(start, state.last_use) + state.tied)
        later = base + buffers + (later if is_last else max(later, at.later_held[stop - 1]))
        if not flow.is_fresh or flying < flow.micro_batches:
            return gradients + below + max(forward, later)
        first = at.first.most(start, inner)
        first = base + buffers + (first if is_last else max(first, at.first_held[stop - 1])) + self._gradients[stop]
        found = below + max(state.shared + forward, state.shared + first, gradients)
        return max(found, below - held + gradients + later) if flying > 1 else found


def _less(one: Pair, other: Pair) -> Pair:
    return max(0.0, one[0] - other[0]), max(0.0, one[1] - other[1])


def _more(one: Pair, other: Pair) -> Pair:
    return one[0] + other[0], one[1] + other[1]
