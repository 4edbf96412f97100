"""One shard of one layer without its partners: cut as in a run, and the model stays whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from whale_trainer.models.gpt import GPT

from whale_trainer.describe import describe, layers_of, model_loss
from whale_trainer.errors import PlanError
from whale_trainer.planning.shares import Interval
from whale_trainer.runtime.alone import AbsentGroup, lone_tile
from whale_trainer.runtime.dropout import DropoutState

CPU = torch.device("cpu")
BATCH = {"tokens": torch.arange(32).view(2, 16), "targets": torch.arange(1, 33).view(2, 16)}


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=64, width=32, num_layers=2, num_heads=8, context=16, num_kv_heads=4, dropout=0.1)


def shard(model: GPT, index: int, weights: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    spec = describe(model, BATCH)
    layers = Interval(index, index + 1)
    return lone_tile(model, spec, layers, weights, device=CPU, dtype=dtype, dropout=DropoutState(0))


def test_sums_over_an_absent_group_leave_what_they_get() -> None:
    values = torch.arange(4.0)
    dist.all_reduce(values, group=AbsentGroup())
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=AbsentGroup())
    assert values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("index", range(4))
def test_an_uncut_layer_computes_what_the_model_does(model: GPT, index: int) -> None:
    model.eval()
    x: Tensor = BATCH["tokens"]
    with torch.no_grad():
        for _, layer in layers_of(model)[:index]:
            x = layer(x)
        tile = shard(model, index, (1,))
        tile.train(False)
        assert torch.equal(tile(x), layers_of(model)[index][1](x))


@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (1, 1, 1, 1), (1,) * 8], ids=str)
def test_cut_layers_run_forward_and_backward(model: GPT, weights: tuple[int, ...]) -> None:
    """Also where query heads outnumber the kv heads that two shards share."""
    before = dict(model.named_parameters(remove_duplicate=False))
    embed, block, head = (shard(model, index, weights) for index in (0, 1, 3))
    assert dict(model.named_parameters(remove_duplicate=False)) == before
    assert all(parameter.grad is None for parameter in before.values())
    x = block(embed(BATCH["tokens"]))
    assert x.shape == (2, 16, 32)
    loss, count = model_loss(model, head(x), BATCH)
    assert int(count) == 32
    loss.backward()
    part = weights[0] / sum(weights)
    up = block.layers[0].mlp.up.weight
    assert up.shape == (round(128 * part), 32)
    assert up.grad is not None
    assert embed.layers[0].tokens.weight.shape == (round(64 * part), 32)
    assert all(parameter.grad is None for parameter in before.values()), "the model's own weights are not touched"


def test_it_has_the_dtype_that_is_asked_for(model: GPT) -> None:
    tile = shard(model, 1, (1, 1), torch.float64)
    out = tile(torch.ones(2, 16, 32, dtype=torch.float64))
    assert out.dtype == torch.float64
    assert next(model.parameters()).dtype == torch.float32


def test_more_shards_than_units_are_refused(model: GPT) -> None:
    with pytest.raises(PlanError, match="8 heads cannot be cut over 9 ranks"):
        shard(model, 1, (1,) * 9)
