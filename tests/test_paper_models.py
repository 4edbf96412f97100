"""The models of the paper: what is published of them, other implementations, and the same numbers under plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from configs import composed
from ranks import run_ranks
from runs import Case, run_case, single
from test_equivalence import assert_same
from tilings import plan_of, tile
from torch import Tensor, nn
from whale_trainer.models.bert import BERT
from whale_trainer.models.bert import Block as BertBlock
from whale_trainer.models.gnmt import GNMT, LSTM, BothWays
from whale_trainer.models.resnet import ResNet
from whale_trainer.models.t5 import T5, Distances

from whale_trainer.config import load_config
from whale_trainer.describe import describe, unsynchronised_norms
from whale_trainer.model_spec import ModelSpec
from whale_trainer.planning.plan import Plan


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device="meta")


def shipped(name: str) -> nn.Module:
    """The model of conf/model."""
    return load_config(composed(f"model={name}")).model.build()


def images() -> dict[str, Tensor]:
    return {"images": torch.empty(2, 3, 224, 224), "labels": ints(2)}


def pairs(source: int, target: int) -> dict[str, Tensor]:
    return {"source": ints(2, source), "target": ints(2, target), "targets": ints(2, target)}


LARGE: dict[str, Any] = {
    "resnet50": (lambda: shipped("resnet50"), images),
    "resnet101": (lambda: ResNet(blocks=(3, 4, 23, 3)), images),
    "bert_large": (
        lambda: shipped("bert_large"),
        lambda: {"tokens": ints(2, 128), "segments": ints(2, 128), "positions": ints(2, 20), "targets": ints(2, 20)},
    ),
    "t5_large": (lambda: shipped("t5_large"), lambda: pairs(512, 114)),
    "gnmt": (lambda: shipped("gnmt"), lambda: pairs(50, 50)),
}


def described(name: str) -> ModelSpec:
    with torch.device("meta"):
        model, batch = LARGE[name]
        return describe(model(), batch())


PUBLISHED = {
    "resnet50": (25_557_032, 0),  # He et al. 2016, as torchvision counts it
    "resnet101": (44_549_160, 0),
    "bert_large": (340e6, 0.02),  # Devlin et al. 2019; without the pooler and the next-sentence head
    "t5_large": (737_668_096, 0),  # Raffel et al. 2020, as the released weights count it
    "gnmt": (278e6, 0.01),  # Wu et al. 2016, as counted by Shazeer et al. 2017
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    expected, tolerance = PUBLISHED[name]
    assert described(name).num_parameters == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(("name", "giga_macs"), [("resnet50", 4.09), ("resnet101", 7.80)])
def test_flops_of_resnets_are_as_published(name: str, giga_macs: float) -> None:
    assert sum(layer.forward_flops for layer in described(name).layers) == pytest.approx(2e9 * giga_macs, rel=0.01)


def test_flops_of_bert_are_two_a_weight_and_token_and_those_of_attention() -> None:
    layers = described("bert_large").layers
    block = 128 * (2 * 12 * 1024**2 + 2 * 2 * 128 * 1024)
    assert [layer.forward_flops for layer in layers[1:-1]] == [block] * 24
    assert layers[0].forward_flops == 0
    assert layers[-1].forward_flops == 20 * 2 * 1024 * (1024 + 30522)


def test_flops_of_t5() -> None:
    layers = described("t5_large").layers
    source, target, width, hidden = 512, 114, 1024, 4096
    per_block = 2 * (4 * width**2 + 2 * width * hidden)
    encoder = source * per_block + 2 * 2 * source**2 * width
    decoder = target * (per_block + 4 * width**2) + source * 4 * width**2 + 2 * 2 * target * (target + source) * width
    # beside these, the bias of the distances
    assert layers[1].forward_flops == pytest.approx(encoder, rel=1e-3)
    assert layers[26].forward_flops == pytest.approx(decoder, rel=1e-3)
    assert layers[-1].forward_flops == target * 2 * width * 32128


def test_flops_of_gnmt() -> None:
    layers = {layer.name: layer.forward_flops for layer in described("gnmt").layers}
    steps, width = 50, 1024
    assert layers["encoder.0"] == steps * 2 * 2 * 4 * width * 2 * width
    assert layers["encoder.1"] == steps * 2 * 4 * width * 3 * width
    assert layers["encoder.2"] == layers["encoder.7"] == steps * 2 * 4 * width * 2 * width
    attention = 2 * steps * 2 * width**2 + steps**2 * (2 * width + 2 * width)
    assert layers["decoder.0"] == steps * 2 * 4 * width * 2 * width + attention
    assert layers["decoder.1"] == layers["decoder.7"] == steps * 2 * 4 * width * 3 * width
    assert layers["head"] == steps * 2 * width * 32000


# --- other implementations of the same -------------------------------------------------------------------------------


def test_a_bert_block_is_torchs_encoder_layer() -> None:
    block = BertBlock(width=12, num_heads=3, hidden=20, dropout=0.0).double()
    expected = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, activation="gelu", layer_norm_eps=1e-12).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.5)
        attention = block.attention
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        expected.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        expected.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        pairs = (
            (expected.self_attn.out_proj, attention.o_proj),
            (expected.linear1, block.mlp.up),
            (expected.linear2, block.mlp.down),
            (expected.norm1, block.attention_norm),
            (expected.norm2, block.mlp_norm),
        )
        for theirs, ours in pairs:
            theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 12).double()
    found = block({"x": x, "positions": torch.zeros(2, 1)})["x"]
    torch.testing.assert_close(found, expected(x.transpose(0, 1)).transpose(0, 1), rtol=1e-10, atol=1e-12)


def copied(ours: LSTM, theirs: nn.LSTM, ending: str) -> None:
    """Give torch's module the weights of ours; `ending` names its layer and direction."""
    with torch.no_grad():
        for kind, layer in (("ih", ours.of_input), ("hh", ours.of_state)):
            getattr(theirs, f"weight_{kind}_{ending}").copy_(layer.weight)
            getattr(theirs, f"bias_{kind}_{ending}").copy_(layer.bias)


def test_the_lowest_encoder_layer_is_torchs_lstm_of_two_directions() -> None:
    layer = BothWays(width=6, dropout=0.0).double()
    expected = nn.LSTM(6, 6, bidirectional=True, batch_first=True).double()
    copied(layer.forwards, expected, "l0")
    copied(layer.backwards, expected, "l0_reverse")
    x = torch.randn(3, 5, 6).double()
    torch.testing.assert_close(layer({"source": x})["source"], expected(x)[0], rtol=1e-10, atol=1e-12)


def test_classes_of_distances_are_those_of_t5() -> None:
    # key minus query; the released model's classes at some distances
    both, causal = Distances(1, is_causal=False), Distances(1, is_causal=True)
    far = [-200, -128, -127, -91, -64, -16, -12, -8, -7, -1, 0, 1, 7, 8, 15, 64, 200]
    expected_both = [15, 15, 15, 15, 14, 10, 9, 8, 7, 1, 0, 17, 23, 24, 25, 30, 31]
    expected_causal = [31, 31, 31, 29, 26, 16, 12, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0]
    for module, expected in ((both, expected_both), (causal, expected_causal)):
        with torch.no_grad():
            module.of_class.weight.copy_(torch.arange(32.0).unsqueeze(0))
        module.is_causal = False  # what may not be looked at has a class as well
        bias = module(401)[0, 0]
        assert [int(bias[200, 200 + d]) for d in far] == expected


def test_a_causal_bias_hides_what_comes_later() -> None:
    bias = Distances(2, is_causal=True)(5)
    assert bias.shape == (1, 2, 5, 5)
    assert torch.equal(bias[0, 0] == -math.inf, torch.ones(5, 5, dtype=torch.bool).triu(1))


# --- small ones, in training -----------------------------------------------------------------------------------------

VOCAB = 11


def bert(**options: Any) -> nn.Module:
    return moderate(BERT(VOCAB, 12, 2, 6, context=7, hidden=20, **options))


def t5(**options: Any) -> nn.Module:
    return moderate(T5(VOCAB, 12, 2, 6, hidden=20, **options))


def gnmt(**options: Any) -> nn.Module:
    return moderate(GNMT(VOCAB, 8, 2, **options))


def moderate(model: nn.Module) -> nn.Module:
    """Weights of a size that matters everywhere."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def bert_batch(size: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    draw = torch.rand(size, 6, generator=generator)
    return {
        "tokens": torch.randint(VOCAB, (size, 6), generator=generator),
        "segments": torch.randint(2, (size, 6), generator=generator),
        "positions": draw.argsort(1)[:, :3].sort(1).values,
        "targets": torch.randint(VOCAB, (size, 3), generator=generator).index_fill(1, torch.tensor([step % 3]), -100),
    }


def pairs_batch(size: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    targets = torch.randint(VOCAB, (size, 4), generator=generator)
    target = torch.cat((torch.zeros(size, 1, dtype=torch.int64), targets[:, :-1]), 1)
    targets[0, 1] = -100
    return {"source": torch.randint(VOCAB, (size, 6), generator=generator), "target": target, "targets": targets}


SMALL: dict[str, Any] = {"bert": (bert, bert_batch), "t5": (t5, pairs_batch), "gnmt": (gnmt, pairs_batch)}


def grid(num_layers: int, replicas: Sequence[int], num_stages: int, weights: Sequence[int]) -> Plan:
    """Sample shares x stages x shards, in two micro-batches."""
    tiles, rank, row = [], 0, 0
    cuts = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    for share in replicas:
        for start, stop in pairwise(cuts):
            ranks = range(rank, rank + len(weights))
            tiles.append(tile((start, stop), (row, row + share), *zip(ranks, weights, strict=True)))
            rank += len(weights)
        row += share
    return plan_of(tiles, micro_batches=2, global_batch=2 * row)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("replicas", "num_stages", "weights"),
    [([3, 1], 1, [1]), ([2], 3, [1]), ([2], 1, [2, 1]), ([2, 1], 2, [1]), ([2], 2, [3, 1])],
    ids=str,
)
@pytest.mark.parametrize("name", SMALL)
def test_plans_give_the_numbers_of_one_process(
    name: str, replicas: list[int], num_stages: int, weights: list[int]
) -> None:
    model, batch = SMALL[name]
    spec = describe(model(), batch(2, 0))
    plan = grid(spec.num_layers, replicas, num_stages, weights)
    case = Case(plan, model=model, batch=batch, arguments={"dropout": 0.2})
    assert_same(case, run_ranks(run_case, 1, case.under(single(plan)))[0])


def test_layers_in_a_row_are_the_model() -> None:
    for model, batch in SMALL.values():
        built, data = model().eval(), batch(3, 0)
        x = built.inputs(data)
        for _, layer in built.layers():
            x = layer(x)
        assert torch.equal(x, built(built.inputs(data)))
        total, count = built.loss(x, data)
        assert count == (data["targets"] != -100).sum()
        assert total > 0


def test_a_small_resnet_learns_and_its_norms_are_told() -> None:
    torch.manual_seed(0)
    model = ResNet(num_classes=4, blocks=(1, 1), width=4)
    data = {"images": torch.randn(8, 3, 16, 16), "labels": torch.arange(8) % 4}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(12):
        total, count = model.loss(model(model.inputs(data)), data)
        losses.append(float(total.detach()) / int(count))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    assert unsynchronised_norms(model)[0] == "stem.convolution.1"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet(blocks=()), "blocks \\[\\] must be at least 1"),
        (lambda: ResNet(num_classes=0), "num_classes 0"),
        (lambda: BERT(10, 12, 1, 5, 8), "width 12 is not a multiple of num_heads 5"),
        (lambda: T5(10, 12, 1, 5, 8), "width 12 is not a multiple of num_heads 5"),
        (lambda: GNMT(10, 12, 1), "num_layers 1 is below 2"),
    ],
)
def test_sizes_that_do_not_fit(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sequence_beyond_the_context_is_refused() -> None:
    model = BERT(VOCAB, 12, 1, 3, context=4)
    with pytest.raises(ValueError, match=r"6 tokens do not fit the model's context of 4 \(model.context\)"):
        model(model.inputs(bert_batch(2, 0)))
