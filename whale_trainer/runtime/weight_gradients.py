"""Gradients of weights that can wait: what a schedule with split backward passes puts off from `I` to `W`.

Linear layers, in which most of the arithmetic is, compute the gradient of their input only, and note the two tensors
that the gradient of their weight is made of. All other parameters get their gradients in `I`: norms, tables, and what
a model multiplies by itself. So nothing is computed twice, and no graph is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Product:
    """What the gradients of a linear layer's weight and bias are made of."""

    weight: Tensor
    bias: Tensor | None
    """None as well for one that is not trained."""
    x: Tensor
    grad: Tensor
    """Of the output."""

    def add(self) -> None:
        """Add the gradients to those that the weight and the bias have, or to what they are views of."""
        grad, x = self.grad.flatten(0, -2), self.x.flatten(0, -2)
        weight = self.weight
        if weight.is_leaf and weight.grad is not None and weight.grad.dtype == x.dtype:
            weight.grad.addmm_(grad.t(), x)
        else:
            torch.autograd.backward([weight], [(grad.t() @ x).to(weight.dtype)])
        if self.bias is not None:
            torch.autograd.backward([self.bias], [grad.sum(0).to(self.bias.dtype)])

    @property
    def parameters(self) -> list[Tensor]:
        """The leaves that it adds to."""
        return [t if t._base is None else t._base for t in (self.weight, self.bias) if t is not None]


@dataclass
class WeightGradients:
    """The products of one rank: while `waiting` is a list, backward passes add to it and leave weights alone."""

    waiting: list[Product] | None = None
    meta_dtype: torch.dtype | None = None
    """What the meta device, for which torch has no autocast, is to take as its dtype."""

    def put_off(self, module: nn.Module) -> None:
        """Let the plain linear layers inside `module` put off their weights' gradients."""
        for child in module.modules():
            if type(child) is nn.Linear and "forward" not in vars(child):
                child.forward = _forward_of(child, self)  # type: ignore[assignment]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`, whose weight's gradient can wait."""
        if not (torch.is_grad_enabled() and weight.requires_grad and x.dim() > 1):
            return F.linear(x, weight, bias)
        found: Tensor = _Linear.apply(x, weight, bias, self)
        return found

    def low_dtype(self, x: Tensor) -> torch.dtype | None:
        """What autocast has a linear layer compute in; None without autocast."""
        device_type = x.device.type
        if device_type == "meta":
            return self.meta_dtype
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def add_waiting(products: list[Product]) -> Iterator[Tensor]:
    """Compute what has waited, the last layers first, and empty the list; gives each parameter once it is through."""
    left = Counter(id(parameter) for product in products for parameter in product.parameters)
    products.reverse()  # the first to come is of the last layer, and what is done lets go of its tensors
    while products:
        product = products.pop()
        product.add()
        for parameter in product.parameters:
            left[id(parameter)] -= 1
            if not left[id(parameter)]:
                yield parameter


def _forward_of(linear: nn.Linear, owner: WeightGradients) -> Callable[[Tensor], Tensor]:
    module: Any = linear

    def forward(x: Tensor) -> Tensor:
        return owner.linear(x, module.weight, module.bias)

    return forward


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: WeightGradients) -> Tensor:
        ctx.owner, ctx.weight, ctx.bias, ctx.x_dtype = owner, weight, bias, x.dtype
        low = owner.low_dtype(x)
        if low is not None:
            x, weight = x.to(low), weight.to(low)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias if bias is None or low is None else bias.to(low))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = (grad @ weight).to(ctx.x_dtype) if needs_x else None
        bias = ctx.bias if needs_bias else None
        if ctx.owner.waiting is None:
            rows = grad.flatten(0, -2)
            grad_weight = (rows.t() @ x.flatten(0, -2)).to(ctx.weight.dtype) if needs_weight else None
            return grad_x, grad_weight, None if bias is None else rows.sum(0).to(bias.dtype), None
        ctx.owner.waiting.append(Product(ctx.weight, bias, x.detach(), grad.detach()))
        return grad_x, None, None, None
