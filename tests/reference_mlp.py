"""The reference for a stack of perceptrons: bare PyTorch over a dict of weights. Imports nothing of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from reference_gpt import Training, gelu, linear
from torch import Tensor

Batch = tuple[Tensor, Tensor] | Mapping[str, Tensor]


def output(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    block = 0
    while f"blocks.{block}.up.weight" in weights:
        x = linear(weights, f"blocks.{block}.down", gelu(linear(weights, f"blocks.{block}.up", x)))
        block += 1
    return x


def loss(weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """Sum of squared errors, and the number of samples."""
    return (output(weights, x) - y).square().sum(), len(x)


def train(
    weights: Mapping[str, Tensor],
    batches: Sequence[Batch],
    *,
    lr: float = 1e-3,
    clip: float = 0.0,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Training:
    """One step for each batch (x, y), from `weights`, by the mean loss of a sample."""
    parameters = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    steps = optimizer(list(parameters.values()), lr=lr)  # type: ignore[call-arg]
    losses, norms, gradients = [], [], {}
    for batch in batches:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch
        total, count = loss(parameters, x, y)
        mean = total / count
        steps.zero_grad()
        mean.backward()
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), clip or math.inf).item())
        steps.step()
        losses.append(mean.item())
    return Training(losses, norms, gradients, {name: p.detach() for name, p in parameters.items()})
