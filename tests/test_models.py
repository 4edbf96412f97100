"""The shipped models: the same numbers as the bare reference, and what they tell of themselves."""

from __future__ import annotations

import inspect
import math
from importlib import import_module
from importlib.resources import files
from typing import Any

import pytest
import reference_gpt
import reference_mlp
import torch
import yaml
from torch import Tensor, nn
from whale_trainer.models.gpt import GPT
from whale_trainer.models.mlp import MLP

from whale_trainer.describe import describe

SMALL: dict[str, Any] = {"vocab_size": 11, "width": 12, "num_layers": 2, "num_heads": 6, "context": 5}

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, biases": {"num_kv_heads": 3, "bias": True},
    "one kv head, untied": {"num_kv_heads": 1, "tied": False},
    "qk-norm": {"qk_norm": True, "bias": True},
    "rms, rotary": {"norm": "rms", "positions": "rotary", "num_kv_heads": 2, "qk_norm": True},
    "narrow feed-forward": {"hidden": 7, "num_heads": 3},
}


def batch(size: int = 3, time: int = 5, vocab_size: int = 11) -> dict[str, Tensor]:
    tokens = torch.randint(vocab_size, (size, time + 1))
    targets = tokens[:, 1:].clone()
    targets[0, 1:3] = -100
    return {"tokens": tokens[:, :-1], "targets": targets}


def far_from_start(model: nn.Module) -> nn.Module:
    """Weights of a size that matters in every place, biases and norms included."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


@pytest.mark.parametrize("name", SWITCHES)
def test_gpt_equals_the_reference(name: str) -> None:
    arguments = {**SMALL, **SWITCHES[name]}
    model = far_from_start(GPT(**arguments))
    data = batch()
    sizes = reference_gpt.Sizes(
        arguments["num_heads"],
        arguments.get("num_kv_heads", arguments["num_heads"]),
        arguments.get("norm", "layer"),
        arguments.get("positions") == "rotary",
    )
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected, count = reference_gpt.loss(weights, data, sizes)
    expected.backward()
    found, found_count = model.loss(model(model.inputs(data)), data)
    found.backward()
    assert found_count == count == 13
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[parameter_name].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_mlp_equals_the_reference(bias: bool) -> None:
    model = far_from_start(MLP(4, 12, 3, depth=2, bias=bias))
    x, y = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected, count = reference_mlp.loss(weights, x, y)
    expected.backward()
    for data in ((x, y), {"x": x, "y": y}):
        model.zero_grad()
        found, found_count = model.loss(model(model.inputs(data)), data)
        found.backward()
        assert found_count == count == 5
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-12)


def test_gpt_starts_as_gpt2() -> None:
    model = GPT(vocab_size=256, width=256, num_layers=8, num_heads=4, context=16, bias=True)
    block = model.blocks[3]
    for weight, std in [
        (model.embed.tokens.weight, 0.02),
        (block.mlp.up.weight, 0.02),
        (block.mlp.down.weight, 0.02 / 4),  # sqrt(2 x 8 layers)
        (block.attention.o_proj.weight, 0.02 / 4),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert not block.mlp.up.bias.any()
    data = batch(8, 16, vocab_size=256)
    total, count = model.loss(model(data["tokens"]), data)
    assert (total / count).item() == pytest.approx(math.log(256), rel=0.02)


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = GPT(**SMALL), GPT(**SMALL, tied=False)
    assert tied.head.projection.weight is tied.embed.tokens.weight
    assert "head.projection.weight" not in dict(tied.named_parameters())
    assert untied.head.projection.weight is not untied.embed.tokens.weight


def test_attention_runs_on_a_part_of_the_heads() -> None:
    """Two parts of the heads, each with its rows of q, k, v and its columns of o, add up to the whole."""
    whole = far_from_start(GPT(**SMALL, num_kv_heads=3)).blocks[0].attention
    x = torch.randn(2, 5, 12).double()
    parts = []
    for heads, kv_heads in (((0, 4), (0, 2)), ((4, 6), (2, 3))):
        part = far_from_start(GPT(**SMALL, num_kv_heads=3)).blocks[0].attention
        for child, (start, stop) in {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}.items():
            rows = getattr(whole, child).weight[2 * start : 2 * stop]
            getattr(part, child).weight = nn.Parameter(rows.clone())
        part.o_proj.weight = nn.Parameter(whole.o_proj.weight[:, 2 * heads[0] : 2 * heads[1]].clone())
        parts.append(part(x))
    torch.testing.assert_close(sum(parts), whole(x), rtol=1e-12, atol=1e-12)


def test_loss_of_half_precision_is_summed_in_float32() -> None:
    model = GPT(**SMALL)
    data = batch()
    output = model(data["tokens"])
    expected, _ = model.loss(output, data)
    found, _ = model.loss(output.bfloat16(), data)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-2)
    assert model.loss(output.double(), data)[0].dtype == torch.float64


def test_dropout_acts_in_training_only() -> None:
    model = GPT(**SMALL, dropout=0.5)
    tokens = batch()["tokens"]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 13}, "width 13 is not a multiple of num_heads 6"),
        ({"num_kv_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"num_kv_heads": 0}, "num_heads 6 and num_kv_heads 0 must be at least 1"),
        ({"norm": "batch"}, "norm 'batch' is not one of layer, rms"),
        ({"positions": "none"}, "positions 'none' is not one of learned, rotary"),
        ({"positions": "rotary", "num_heads": 4}, "rotary positions need an even head width, not 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPT(**{**SMALL, **arguments})


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"6 tokens do not fit the model's context of 5 \(model.context\)"):
        GPT(**SMALL)(torch.zeros(1, 6, dtype=torch.int64))


def test_an_mlp_has_a_layer() -> None:
    with pytest.raises(ValueError, match="depth 0 is below 1"):
        MLP(2, 2, 2, depth=0)


OF_THE_PAPER = ("bert_large", "gnmt", "resnet50", "t5_large")
"""Described in test_paper_models.py."""
SIZES = {"gpt_mini": 574_336, "mlp": 66_688, "gpt2": 124_439_808, "gpt2_xl": 1_557_611_200}


@pytest.mark.parametrize("name", SIZES)
def test_a_shipped_model_is_described_whole(name: str) -> None:
    """Built on the meta device: no shipped model takes memory to be planned."""
    config = yaml.safe_load((files("whale_trainer.conf") / "model" / f"{name}.yaml").read_text())
    module_name, _, class_name = config.pop("_target_").rpartition(".")
    factory = getattr(import_module(module_name), class_name)
    assert set(config) <= set(inspect.signature(factory).parameters)
    with torch.device("meta"):
        model = factory(**config)
        tokens = torch.zeros(2, config.get("context", 1), dtype=torch.int64)
        features = torch.zeros(2, config.get("num_inputs", 1))
    spec = describe(model, (features, features) if name == "mlp" else {"tokens": tokens, "targets": tokens})
    assert spec.num_parameters == SIZES[name] == sum(p.numel() for p in model.parameters())
    assert all(layer.boundary_bytes and layer.activation_bytes for layer in spec.layers)
    uncut = {p.name for p in spec.parameters if p.cut is None}
    assert all("norm" in n or n.endswith(("positions.weight", "o_proj.bias", "down.bias")) for n in uncut)


def test_every_shipped_model_is_tested() -> None:
    found = {file.name for file in (files("whale_trainer.conf") / "model").iterdir()}
    assert found - {"custom.yaml"} == {f"{name}.yaml" for name in (*SIZES, *OF_THE_PAPER)}  # custom is the user's own
