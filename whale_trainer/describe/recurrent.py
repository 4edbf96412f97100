"""Recurrent layers on the meta device, all steps at once: a loop over time costs a second a layer there.

An LSTM's step needs the state of the one before it, which the meta device does not compute; so one call over all steps
with made-up earlier states has the FLOPs, the kept bytes and the traffic of the loop that GPUs run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CELL = torch.ops.aten._thnn_fused_lstm_cell


def is_plain_lstm(args: Sequence[Any]) -> bool:
    """True for the arguments of a `torch.lstm` over padded sequences, with neither dropout nor projections."""
    if len(args) != 9 or isinstance(args[1], Tensor):
        return False
    _, _, weights, has_biases, num_layers, dropout, train, bidirectional, _ = args
    per_layer = (4 if has_biases else 2) * (2 if bidirectional else 1)
    return len(weights) == num_layers * per_layer and not (dropout and train)


def lstm_at_once(
    x: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    _dropout: float,
    _train: bool,
    bidirectional: bool,
    _batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `torch.lstm` gives for these arguments, on the meta device; see `is_plain_lstm`.

    As the fused kernels do it: one product for the inputs of all steps, and for each step one for its state and one
    kernel for the gates.
    """
    directions = 2 if bidirectional else 1
    size = 4 if has_biases else 2
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            first = (layer * directions + direction) * size
            outputs.append(_one_layer(x, weights[first : first + size]))
        x = torch.cat(outputs, dim=-1) if bidirectional else outputs[0]
    return x, torch.empty_like(state[0]), torch.empty_like(state[1])


def kernels_of_further_steps(args: Sequence[Any]) -> int:
    """Kernels that the loop of `torch.lstm` runs beyond those of `lstm_at_once`: two for each step after the first."""
    x, _, _, _, num_layers, _, _, bidirectional, batch_first = args
    return 2 * num_layers * (2 if bidirectional else 1) * (x.shape[1 if batch_first else 0] - 1)


def _one_layer(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Shapes: x [samples, steps, inputs] or the first two the other way round; weights [4 x width, ...]."""
    of_inputs, of_state, *biases = weights
    rows = (*x.shape[:2], of_state.shape[1])
    earlier, cells = (torch.empty(rows, dtype=x.dtype, device=x.device, requires_grad=True) for _ in range(2))
    gates = F.linear(x, of_inputs), F.linear(earlier, of_state)
    biases = biases or [x.new_empty(len(of_state))] * 2  # the meta kernel wants them
    output: Tensor = _CELL(*(t.flatten(0, 1) for t in (*gates, cells)), *biases)[0]
    return output.unflatten(0, x.shape[:2])
