"""What each layer costs for one sample, measured by running it once on the meta device: no memory, no arithmetic.

FLOPs come from `torch.utils.flop_counter`, kept bytes from saved-tensor hooks. Layers of one structure are run once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from whale_trainer.describe.checks import NoDraws, check_output, check_samples_first
from whale_trainer.describe.kernels import FUSED_ATTENTION, attention_flops, fused_form
from whale_trainer.describe.layers import first_inputs, layers_of, model_loss
from whale_trainer.describe.meta import without_compiler
from whale_trainer.describe.recurrent import kernels_of_further_steps
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import ModuleSplit, SplitKind

_NO_KERNELS = frozenset(
    (
        torch.ops.aten.detach,
        torch.ops.aten.detach_,
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten._unsafe_view,
    )
)
"""What only allocates, or looks at the same memory in another way without saying so in its schema."""


@dataclass(frozen=True)
class LayerCost:
    """Per sample: FLOPs of the forward pass, those in cut modules, bytes kept for backward, bytes of the output."""

    forward_flops: float = 0.0
    split_flops: float = 0.0
    activation_bytes: int = 0
    boundary_bytes: int = 0
    moved_bytes: int = 0
    """Read and written by the kernels that do no matrix product."""
    num_kernels: int = 0
    linear_flops: float = 0.0
    """Those in plain linear layers that are trained."""
    dropouts: tuple[tuple[str, int], ...] = ()
    """Dropout modules by name inside the layer, with the last dim of what they get."""


@without_compiler()
def measure(model: nn.Module, batch: Any, splits: Sequence[ModuleSplit]) -> list[LayerCost]:
    """Costs of every layer for batches like `batch`, in training mode.

    Raises `ConfigError` for a layer that fails, whose output cannot cross a bridge, that draws numbers no plan can
    repeat, or that uses a parameter of another layer.
    """
    meta = on_meta(model).train()
    batch = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, batch)
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    samples = sizes[0] if sizes else 1
    layers = layers_of(meta)
    names = {id(m): name for name, m in meta.named_modules()}
    known: dict[tuple[str, str], tuple[LayerCost, Any]] = {}
    costs: list[LayerCost] = []
    x = first_inputs(meta, batch)
    for index, (name, layer) in enumerate(layers):
        if index:
            check_samples_first(layers[index - 1][0], x, samples)
        prefix = names.get(id(layer), name)
        inside = [s for s in splits if s.layer == index]
        key = (structure_of(layer, prefix, inside), str(tree_map(_shape, x)))
        if key not in known:
            known[key] = _run(name, layer, x, samples, {id(meta.get_submodule(s.module)): s for s in inside})
        cost, x = known[key]
        costs.append(replace(cost, dropouts=tuple((f"{prefix}.{n}" if n else prefix, d) for n, d in cost.dropouts)))
    return [*costs[:-1], _with_loss(costs[-1], meta, x, batch, samples)]


def _with_loss(last: LayerCost, model: nn.Module, out: Any, batch: Any, samples: int) -> LayerCost:
    """The last layer together with the model's loss; without it for a loss that needs real numbers, or none."""
    kept, traffic = _Kept([]), _Traffic()
    try:
        with traffic, kept.hooks():
            model_loss(model, _with_gradient(out), batch)
    except Exception:  # a loss may look at values, which the meta device has not
        return last
    return replace(
        last,
        activation_bytes=last.activation_bytes + kept.total // samples,
        moved_bytes=last.moved_bytes + traffic.moved_bytes // samples,
        num_kernels=last.num_kernels + traffic.num_kernels,
    )


def on_meta(model: nn.Module) -> nn.Module:
    """`model` itself where it is on the meta device, else a copy there; the user's model is never changed."""
    tensors = [*model.parameters(), *model.buffers()]
    memo = {id(t): _like_on_meta(t) for t in tensors}
    try:
        return copy.deepcopy(model, dict(memo))
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            [
                Problem(
                    "model",
                    f"{type(model).__name__} cannot be copied ({error}); keep open files, locks and non-leaf tensors "
                    "out of modules",
                )
            ]
        ) from error


def _like_on_meta(tensor: Tensor) -> Tensor:
    meta = tensor.detach().to("meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


_MODULE_STATE = frozenset(vars(nn.Module()))


def structure_of(layer: nn.Module, prefix: str, splits: Sequence[ModuleSplit]) -> str:
    """A text that two layers share only when they compute the same: modules, sizes, cuts and settings."""
    shapes = [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in layer.named_parameters()]
    shapes += [f"{n} {tuple(b.shape)} {b.dtype}" for n, b in layer.named_buffers()]
    cuts = [f"{s.module.removeprefix(prefix)} {s.kind} {s.split}" for s in splits]
    modules = [
        f"{name} {type(m)} {[(k, _setting(v)) for k, v in vars(m).items() if k not in _MODULE_STATE]}"
        for name, m in layer.named_modules()
    ]
    return f"{modules} {shapes} {cuts}"


def _setting(value: Any) -> str:
    """An attribute as text; of a function or another object only that it is this very one."""
    leaves = tree_leaves(value)
    if all(leaf is None or isinstance(leaf, int | float | str | torch.dtype) for leaf in leaves):
        return repr(value)
    return f"{type(value)} {id(value)}"


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else leaf


def _run(name: str, layer: nn.Module, x: Any, samples: int, cut: dict[int, ModuleSplit]) -> tuple[LayerCost, Any]:
    dropouts: dict[str, int] = {}
    own = [*layer.parameters(), *layer.buffers()]
    kept = _Kept(own)
    hooks = [
        m.register_forward_pre_hook(lambda _m, args, n=n: dropouts.setdefault(n, args[0].shape[-1]) and None)
        for n, m in layer.named_modules()
        if type(m) is nn.Dropout
    ]
    traffic = _Traffic()
    split_flops = _FlopsInside(traffic, [m for m in layer.modules() if _is_cut(cut.get(id(m)))])
    linear = [m for m in layer.modules() if type(m) is nn.Linear and m.weight.requires_grad]
    linear_flops = _FlopsInside(traffic, linear)
    try:
        with traffic, NoDraws(name), _Watch(name, own, traffic), kept.hooks():
            out = layer(_with_gradient(x))
    except (ConfigError, NotImplementedError):
        raise
    except Exception as error:
        raise ConfigError([Problem(f"model.{name}", f"fails on {tree_map(_shape, x)}: {error}")]) from error
    finally:
        for handle in (*hooks, *split_flops.hooks, *linear_flops.hooks):
            handle.remove()
    check_output(name, out)
    out_bytes = sum(t.numel() * t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor))
    cost = LayerCost(
        traffic.flops / samples,
        split_flops.total / samples,
        -(-kept.total // samples),
        -(-out_bytes // samples),
        -(-traffic.moved_bytes // samples),
        traffic.num_kernels,
        linear_flops.total / samples,
        tuple(dropouts.items()),
    )
    return cost, tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out)


def _with_gradient(x: Any) -> Any:
    """`x` as a layer gets it over a bridge: leaves that want a gradient where they can have one."""
    return tree_map(lambda t: t.detach().requires_grad_(t.is_floating_point()) if isinstance(t, Tensor) else t, x)


class _Kept:
    """Bytes that autograd keeps for the backward pass, each storage once, without those of `own`."""

    def __init__(self, own: Sequence[Tensor]) -> None:
        self._own = {id(t) for t in own}
        self._bytes: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no storage's address is used twice

    @property
    def total(self) -> int:
        return sum(self._bytes.values())

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._own and (tensor._base is None or id(tensor._base) not in self._own):
            storage = tensor.untyped_storage()
            self._bytes[storage._cdata] = storage.nbytes()
            self._alive.append(tensor)
        return tensor


class _Traffic(TorchDispatchMode):
    """Counts kernels, their FLOPs by torch's own formulas, and the bytes that those without FLOPs read and write.

    Views are no kernels. (`FlopCounterMode` would do for the FLOPs, but imports the compiler, which takes seconds.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.moved_bytes = 0
        self.num_kernels = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or func._overloadpacket in _NO_KERNELS:
            return out
        self.num_kernels += 1
        formula = _FLOP_FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        else:
            # weights are read once, whatever the number of samples, and of a table only some rows
            leaves = tree_leaves((args, kwargs, out))
            tensors = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
            self.moved_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


def _is_cut(split: ModuleSplit | None) -> bool:
    """Whether a tensor group cuts the module."""
    return split is not None and split.kind is not SplitKind.PARTIAL


class _FlopsInside:
    """Counts the FLOPs that pass inside some modules."""

    def __init__(self, counter: _Traffic, modules: Sequence[nn.Module]) -> None:
        self.total = 0.0
        self._counter = counter
        self._begun: dict[int, float] = {}
        self.hooks: list[Any] = []
        for module in modules:
            self.hooks.append(module.register_forward_pre_hook(self._begin))
            self.hooks.append(module.register_forward_hook(self._end))

    def _begin(self, module: nn.Module, _args: Any) -> None:
        self._begun[id(module)] = self._counter.flops

    def _end(self, module: nn.Module, _args: Any, _out: Any) -> None:
        self.total += self._counter.flops - self._begun.pop(id(module))


class _Watch(TorchFunctionMode):
    """Refuses parameters of other layers, and takes attention and LSTMs as the fused kernels compute them."""

    def __init__(self, layer: str, own: Sequence[Tensor], traffic: _Traffic) -> None:
        super().__init__()
        self._layer = layer
        self._traffic = traffic
        self._own = {id(t) for t in own}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self._own:
                message = (
                    f"uses a parameter of shape {tuple(leaf.shape)} that it does not hold, so no plan could place it: "
                    "register it in this layer too (self.weight = other.weight), where it stays one tied parameter"
                )
                raise ConfigError([Problem(f"model.{self._layer}", message)])
        fused = fused_form(func, args, kwargs)
        if fused is None:
            return func(*args, **kwargs)
        if func is torch.lstm:
            self._traffic.num_kernels += kernels_of_further_steps(args)
        return fused()


_FLOP_FORMULAS = {**flop_registry, FUSED_ATTENTION: attention_flops}
