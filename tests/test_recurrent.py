"""An LSTM described at once costs what the loop over its steps does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from whale_trainer.describe import describe
from whale_trainer.errors import ConfigError
from whale_trainer.model_spec import LayerSpec

SAMPLES, STEPS, INPUTS, WIDTH = 3, 7, 10, 6


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.recurrent = Recurrent(**options)

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        yield "recurrent", self.recurrent


X = torch.zeros(SAMPLES, STEPS, INPUTS)


def described(**options: Any) -> LayerSpec:
    return describe(Model(**options), X).layers[0]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2}, {"num_layers": 3, "bidirectional": True}])
def test_flops_and_output_are_those_of_the_loop(options: dict[str, Any]) -> None:
    model = Recurrent(**options).to("meta")
    with FlopCounterMode(display=False) as counter:
        output = model(X.to("meta"))
    found = described(**options)
    assert found.forward_flops == pytest.approx(counter.get_total_flops() / SAMPLES)
    assert found.boundary_bytes == output[0].numel() * 4


def test_kept_are_the_inputs_the_gates_and_the_states() -> None:
    # both summands of the 4 gates and their activation, the state and the cell of the step before, and the cell
    assert described().activation_bytes == 4 * STEPS * (INPUTS + (3 * 4 + 3) * WIDTH)


def test_kernels_are_two_a_step_and_one_for_all_inputs() -> None:
    one_layer = described().num_kernels
    assert 2 * STEPS + 1 <= one_layer <= 2 * STEPS + 6
    assert described(num_layers=2).num_kernels == one_layer + 2 * STEPS + 1


def test_projections_run_as_they_are() -> None:
    found = described(proj_size=2)
    assert found.boundary_bytes == STEPS * 2 * 4
    assert found.forward_flops == 2 * STEPS * (4 * WIDTH * (INPUTS + 2) + WIDTH * 2)


def test_dropout_between_layers_is_refused_as_a_draw() -> None:
    with pytest.raises(ConfigError, match="draws random numbers in training"):
        described(num_layers=2, dropout=0.1)
