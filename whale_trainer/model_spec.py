"""What the planner knows of a model: sizes, costs and the dims that may be cut. Plain numbers, no torch.

`describe` makes a `ModelSpec` from an `nn.Module` on the meta device; the planner reads costs from it, the runtime
reads which parameters exist, which layers use them and how each may be cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from whale_trainer.errors import PlanError


class SplitKind(StrEnum):
    """How a module is cut over the ranks of a tensor group."""

    COLUMN = "column"
    """A linear layer by its outputs: each rank holds some rows of the weight and the same part of the bias."""
    ROW = "row"
    """A linear layer by its inputs: partial products are summed over the group, the bias is added once."""
    VOCAB = "vocab"
    """An embedding, or the linear layer that makes logits, by its vocabulary rows."""
    HEADS = "heads"
    """An attention module with children q_proj, k_proj, v_proj, o_proj, by whole heads (with their kv group)."""
    PARTIAL = "partial"
    """Parameters that every rank holds whole but that see only their rank's part: their gradients are summed."""


@dataclass(frozen=True)
class SplitDim:
    """A dim of the model that is dealt out in whole units, such as 12 heads, 3072 columns or 256 vocabulary rows."""

    name: str
    """`heads`, `columns` or `vocabulary`: what the units are, for messages and for `cuts` in plan.json."""
    units: int
    """Number of units; query heads where the dim is heads."""
    num_kv_heads: int | None = None
    """For heads: number of key/value heads (equal to `units` without grouped-query attention)."""


@dataclass(frozen=True)
class Cut:
    """How one parameter follows a `SplitDim`: along which of its dims, and how many elements a unit takes there."""

    split: SplitDim
    dim: int
    elements_per_unit: int
    is_kv: bool = False
    """True for key and value projections, whose units are kv heads and may be shared by several ranks."""


@dataclass(frozen=True)
class ModuleSplit:
    """A module that a tensor group cuts, by its dotted name in the user's model."""

    module: str
    kind: SplitKind
    layer: int
    split: SplitDim | None = None
    """None for `PARTIAL`."""
    head_dim: int | None = None
    """Elements of one head, for `HEADS`."""


@dataclass(frozen=True)
class ParameterSpec:
    """One logical parameter; a weight that is tied in several places is one parameter used by several layers."""

    name: str
    """The first name that `named_parameters()` of the user's model gives it."""
    shape: tuple[int, ...]
    element_bytes: int
    layers: tuple[int, ...]
    """Indices of the layers that use it, ascending; more than one for a tied weight."""
    cut: Cut | None = None
    is_partial: bool = False
    """Not cut, but inside the split part of a tensor group: each rank has a part of the gradient only."""
    trainable: bool = True

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.element_bytes


@dataclass(frozen=True)
class Bytes:
    """Bytes that grow with the samples of a micro-batch and, in a cut layer, with a rank's part of each dim."""

    fixed: float = 0.0
    each: float = 0.0
    """For each sample."""
    cut: tuple[tuple[SplitDim, float, float], ...] = ()
    """(dim, fixed, for each sample) of what follows a dim, if a rank held the whole of it."""

    def on(self, parts: Mapping[SplitDim, float]) -> tuple[float, float]:
        """(fixed, for each sample) on a rank that holds these parts of the dims."""
        fixed, each = self.fixed, self.each
        for dim, more_fixed, more_each in self.cut:
            fixed += more_fixed * parts.get(dim, 1.0)
            each += more_each * parts.get(dim, 1.0)
        return fixed, each


@dataclass(frozen=True)
class Footprint:
    """What a layer holds in a micro-batch's forward and backward pass, beside parameters and its input.

    A pass is told by its peaks: the most that is held is the largest of them, whichever that is for the samples at
    hand. Gradients of parameters are in `first` as they come, in `later` only until they are added to those there are.
    """

    kept: Bytes = Bytes()
    """From the forward pass to the backward pass, without input and output."""
    casts: Bytes = Bytes()
    """The part of `kept` that is low-precision copies of weights."""
    kept_input: Bytes = Bytes()
    """The part of the input that is kept as well."""
    kept_output: Bytes = Bytes()
    output: Bytes = Bytes()
    """What goes to the next layer."""
    output_gradient: Bytes = Bytes()
    """What comes back from it."""
    forward: tuple[Bytes, ...] = ()
    """Peaks of the forward pass, with what it keeps and its output."""
    first: tuple[Bytes, ...] = ()
    """Peaks of a backward pass that finds no gradients, beyond all that is kept, with the output's gradient until it is
    used."""
    later: tuple[Bytes, ...] = ()
    """Peaks of a backward pass that adds to gradients."""
    first_held: tuple[Bytes, ...] = ()
    """As `first`, but without the output's gradient, for where it is held all the time."""
    later_held: tuple[Bytes, ...] = ()
    split: tuple[Bytes, ...] = ()
    """As `later`, for a backward pass that leaves the gradients of weights, and keeps what they are made of."""
    split_held: tuple[Bytes, ...] = ()
    waiting: Bytes = Bytes()
    """Kept from the gradients of the inputs to those of the weights, where a schedule splits backward passes."""


@dataclass(frozen=True)
class LayerMemory:
    """Footprints of a layer in one precision: whole, and as a tensor group's rank holds it (None: never cut)."""

    precision: str
    whole: Footprint
    cut: Footprint | None = None


@dataclass(frozen=True)
class LayerSpec:
    """Costs of one layer for one sample. The backward pass costs twice the forward pass."""

    name: str
    forward_flops: float
    """FLOPs of the forward pass of one sample, cut and uncut parts together."""
    split_flops: float
    """The part of `forward_flops` that a tensor group shares out; the rest is repeated on each of its ranks."""
    activation_bytes: int
    """Bytes kept for the backward pass, one sample."""
    boundary_bytes: int
    """Bytes of the layer's output that go to the next layer, one sample."""
    split_dims: tuple[SplitDim, ...] = ()
    num_collectives: int = 0
    """Sums over the tensor group in one forward pass when the layer is cut."""
    moved_bytes: int = 0
    """Bytes that the kernels without matrix products read and write in the forward pass of one sample."""
    num_kernels: int = 0
    """Kernels of a forward pass, whatever the number of samples."""
    memory: LayerMemory | None = None
    """What it holds while it runs, where that was measured."""
    linear_flops: float | None = None
    """The part of `forward_flops` in linear layers, whose weights' gradients can wait; None where it is not known."""


@dataclass(frozen=True)
class ModelSpec:
    """The whole model as the planner sees it."""

    name: str
    layers: tuple[LayerSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    splits: tuple[ModuleSplit, ...] = ()
    dropouts: tuple[tuple[str, int], ...] = ()
    """Each `nn.Dropout` by module name, with the last dim of what it receives in the uncut model."""
    batch_bytes: float = 0.0
    """Bytes of a sample of the batch."""
    can_be_cut: bool = True
    """False for a module without `layers()`: it is one layer that can only be replicated."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Elements over all parameters, tied ones counted once."""
        return sum(p.num_elements for p in self.parameters)

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    def split_dims(self, start: int, stop: int) -> tuple[SplitDim, ...]:
        """The distinct dims that a tensor group on layers `[start, stop)` cuts, in order of appearance."""
        seen: dict[SplitDim, None] = {}
        for layer in self.layers[start:stop]:
            seen.update(dict.fromkeys(layer.split_dims))
        return tuple(seen)

    def layer_index(self, name: str) -> int:
        """Position of the layer called `name`; raises `PlanError` when there is none."""
        try:
            return self.layer_names.index(name)
        except ValueError:
            raise PlanError(f"there is no layer {name!r} (the model has {', '.join(self.layer_names)})") from None
