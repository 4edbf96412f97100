"""What `describe` finds out of a model: layers, costs, cuts; and what it refuses, with path and remedy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whale_trainer.models.gpt import GPT
from whale_trainer.models.mlp import MLP

from whale_trainer.describe import describe, first_inputs, layers_of, model_loss, unsynchronised_norms
from whale_trainer.errors import ConfigError
from whale_trainer.model_spec import Cut, ModelSpec, SplitDim, SplitKind

SMALL: dict[str, Any] = {"vocab_size": 11, "width": 12, "num_layers": 2, "num_heads": 6, "context": 5}


def gpt(**arguments: Any) -> GPT:
    return GPT(**{**SMALL, "num_kv_heads": 3, "bias": True, **arguments})


def tokens(size: int = 2, time: int = 5) -> dict[str, Tensor]:
    return {"tokens": torch.zeros(size, time, dtype=torch.int64), "targets": torch.zeros(size, time, dtype=torch.int64)}


class Stack(nn.Module):
    """Layers of the test's own, with the declarations it wants to try."""

    def __init__(self, *layers: nn.Module, split: dict[str, str] | None = None) -> None:
        super().__init__()
        self.steps = nn.ModuleList(layers)
        self.tensor_split = split or {}

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        for index, layer in enumerate(self.steps):
            yield f"steps.{index}", layer


class Does(nn.Module):
    """A layer with a weight that does what the test wants."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.action = action

    def forward(self, x: Any) -> Any:
        return self.action(self.linear(x) if isinstance(x, Tensor) else x)


X = torch.zeros(2, 4)


def refusal(model: nn.Module, batch: Any = X) -> str:
    with pytest.raises(ConfigError) as caught:
        describe(model, batch)
    return str(caught.value)


# --- layers and parameters -------------------------------------------------------------------------------------------


def test_layers_of_a_model_that_tells_them() -> None:
    spec = describe(gpt(), tokens())
    assert spec.name == "GPT"
    assert spec.layer_names == ("embed", "blocks.0", "blocks.1", "head")
    assert spec.can_be_cut


def test_layers_of_a_sequential() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    spec = describe(model, (X, X))
    assert spec.layer_names == ("0", "1", "2")
    assert [p.layers for p in spec.parameters] == [(0,), (0,), (2,), (2,)]
    assert spec.layers[0].forward_flops == 2 * 4 * 8


def test_a_tied_weight_is_one_parameter_under_its_first_name() -> None:
    tied = {p.name: p for p in describe(gpt(), tokens()).parameters}
    assert tied["embed.tokens.weight"].layers == (0, 3)
    assert "head.projection.weight" not in tied
    untied = describe(gpt(tied=False), tokens())
    assert untied.num_parameters - sum(p.num_elements for p in tied.values()) == 11 * 12


def test_frozen_parameters_and_element_sizes() -> None:
    model = MLP(4, 4, 4).double()
    model.blocks[0].up.weight.requires_grad_(False)
    first, second, *_ = describe(model, (X.double(), X.double())).parameters
    assert (first.trainable, second.trainable) == (False, True)
    assert first.size_bytes == 4 * 4 * 8


def test_the_model_stays_as_it_was() -> None:
    model = gpt(dropout=0.1).eval()
    before = {n: (id(p), p.device.type) for n, p in model.named_parameters()}
    describe(model, tokens())
    assert {n: (id(p), p.device.type) for n, p in model.named_parameters()} == before
    assert not model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- cuts ------------------------------------------------------------------------------------------------------------

HEADS = SplitDim("heads", 6, 3)
COLUMNS = SplitDim("columns", 48)
VOCABULARY = SplitDim("vocabulary", 11)


def test_how_each_parameter_is_cut() -> None:
    spec = describe(gpt(qk_norm=True), tokens())
    cuts = {p.name: p.cut for p in spec.parameters if p.cut}
    block = {
        "attention.q_proj": Cut(HEADS, 0, 2),
        "attention.k_proj": Cut(HEADS, 0, 2, is_kv=True),
        "attention.v_proj": Cut(HEADS, 0, 2, is_kv=True),
        "mlp.up": Cut(COLUMNS, 0, 1),
    }
    expected = {"embed.tokens.weight": Cut(VOCABULARY, 0, 1)}
    for i in range(2):
        expected |= {f"blocks.{i}.{n}.{kind}": cut for n, cut in block.items() for kind in ("weight", "bias")}
        expected[f"blocks.{i}.attention.o_proj.weight"] = Cut(HEADS, 1, 2)
        expected[f"blocks.{i}.mlp.down.weight"] = Cut(COLUMNS, 1, 1)
    assert cuts == expected
    partial = {p.name for p in spec.parameters if p.is_partial}
    assert partial == {
        f"blocks.{i}.attention.{n}.{kind}"
        for i in range(2)
        for n in ("q_norm", "k_norm")
        for kind in ("weight", "bias")
    }


def test_modules_and_dims_that_a_group_cuts() -> None:
    spec = describe(gpt(), tokens())
    assert [(s.module, s.kind, s.layer) for s in spec.splits][:4] == [
        ("embed.tokens", SplitKind.VOCAB, 0),
        ("blocks.0.attention", SplitKind.HEADS, 1),
        ("blocks.0.mlp.up", SplitKind.COLUMN, 1),
        ("blocks.0.mlp.down", SplitKind.ROW, 1),
    ]
    assert [s.head_dim for s in spec.splits if s.kind is SplitKind.HEADS] == [2, 2]
    assert [layer.split_dims for layer in spec.layers] == [
        (VOCABULARY,),
        (HEADS, COLUMNS),
        (HEADS, COLUMNS),
        (VOCABULARY,),
    ]
    assert [layer.num_collectives for layer in spec.layers] == [1, 2, 2, 1]


def test_words_of_hugging_face_and_partial() -> None:
    model = Stack(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
    model.tensor_split = {"steps.0.0": "colwise", "steps.0.1": "partial", "steps.0.2": "rowwise"}
    parameters = {p.name: p for p in describe(model, X).parameters}
    dim = SplitDim("columns", 8)
    assert parameters["steps.0.0.bias"].cut == Cut(dim, 0, 1)
    assert parameters["steps.0.2.weight"].cut == Cut(dim, 1, 1)
    assert parameters["steps.0.1.weight"].is_partial
    row_bias = parameters["steps.0.2.bias"]
    assert (row_bias.cut, row_bias.is_partial) == (None, False)


# --- costs -----------------------------------------------------------------------------------------------------------


def test_flops_by_hand() -> None:
    model = gpt()
    embed, block, _, head = describe(model, tokens()).layers
    # 5 places: q and o 12 x 12, k and v 12 x 6, feed-forward 2 x 12 x 48; scores and values 5 x 5 x 12 each
    assert block.forward_flops == 2 * 5 * (2 * 12 * 12 + 2 * 12 * 6 + 2 * 12 * 48) + 2 * (2 * 5 * 5 * 12)
    assert block.split_flops == block.forward_flops
    assert head.forward_flops == 2 * 5 * 12 * 11
    assert embed.forward_flops == 0


def test_only_cut_modules_are_shared_out() -> None:
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Linear(4, 4))
    spec = describe(Stack(layer, split={"steps.0.0": "column", "steps.0.2": "row"}), X)
    assert spec.layers[0].forward_flops == 2 * (4 * 8 + 8 * 4 + 4 * 4)
    assert spec.layers[0].split_flops == 2 * (4 * 8 + 8 * 4)


def test_costs_are_per_sample() -> None:
    few, many = describe(gpt(), tokens(1)).layers, describe(gpt(), tokens(6)).layers
    for a, b in zip(few, many, strict=True):
        assert (a.forward_flops, a.boundary_bytes, a.num_kernels) == (b.forward_flops, b.boundary_bytes, b.num_kernels)
        assert abs(a.moved_bytes - b.moved_bytes) < 0.5 * a.moved_bytes  # tables that all samples read, once a batch
        assert abs(a.activation_bytes - b.activation_bytes) < 5 * 8  # the numbers of the places, kept once a batch


def test_boundary_is_what_the_next_layer_gets() -> None:
    assert [layer.boundary_bytes for layer in describe(gpt(), tokens()).layers] == [5 * 12 * 4] * 3 + [5 * 11 * 4]


def kept_bytes(model: GPT, batch: dict[str, Tensor]) -> int:
    """Bytes that autograd really keeps on the CPU for a forward pass and its loss."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    alive = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.loss(model(batch["tokens"]), batch)
    return sum(kept.values())


@pytest.mark.parametrize("arguments", [{}, {"num_kv_heads": 6, "norm": "rms"}, {"positions": "rotary"}])
@pytest.mark.parametrize(("size", "length"), [(1, 16), (4, 16), (4, 64), (16, 64)])
def test_kept_bytes_are_those_of_a_real_pass(arguments: dict[str, Any], size: int, length: int) -> None:
    model = gpt(width=96, num_layers=8, context=64, bias=False, **arguments)
    batch = tokens(size, length)
    estimate = size * sum(layer.activation_bytes for layer in describe(model, batch).layers)
    assert 0.95 < estimate / kept_bytes(model, batch) < 1.15


def test_what_the_loss_keeps_belongs_to_the_last_layer() -> None:
    model, batch = gpt(vocab_size=1000), tokens()
    with_loss = describe(model, batch).layers[-1].activation_bytes
    model.loss = lambda output, batch: (output[batch["targets"] > 0].sum(), 1)  # type: ignore[method-assign]
    assert with_loss - describe(model, batch).layers[-1].activation_bytes >= 5 * 1000 * 4


def test_equal_layers_are_run_once() -> None:
    runs = []
    model = Stack(*(Does(lambda x: runs.append(x) or x) for _ in range(5)))
    for step in model.steps:
        step.action = model.steps[0].action
    spec = describe(model, X)
    assert len(runs) == 1
    assert len({(layer.forward_flops, layer.activation_bytes) for layer in spec.layers}) == 1


def test_layers_that_differ_in_a_setting_only_are_each_run() -> None:
    tall = nn.Sequential(*(nn.Sequential(Does(F.relu)) for _ in range(3)))
    tall[1][0].action = F.silu  # keeps its input, where relu keeps its output, which is needed anyway
    tall[2][0].action = lambda x: torch.cat((x, x), 1)
    spec = describe(tall, X)
    assert [layer.boundary_bytes for layer in spec.layers] == [16, 16, 32]


def test_96_blocks_are_described_fast() -> None:
    with torch.device("meta"):
        model = GPT(vocab_size=50257, width=1024, num_layers=96, num_heads=16, context=512)
        batch = tokens(2, 512)
    start = time.process_time()
    spec = describe(model, batch)
    assert time.process_time() - start < 10
    assert spec.num_layers == 98
    assert len({layer.forward_flops for layer in spec.layers[1:-1]}) == 1


def test_dropouts_with_the_size_of_what_they_get() -> None:
    assert describe(gpt(dropout=0.1), tokens()).dropouts == (
        ("embed.dropout", 12),
        ("blocks.0.attention_dropout", 12),
        ("blocks.0.mlp_dropout", 12),
        ("blocks.1.attention_dropout", 12),
        ("blocks.1.mlp_dropout", 12),
    )


def test_layers_may_pass_dicts_with_none_and_integers() -> None:
    first = Does(lambda x: {"x": x, "mask": torch.ones(len(x), 3, dtype=torch.int64, device=x.device), "rest": None})
    spec = describe(Stack(first, Does(lambda given: given), Does(lambda given: given["x"])), X)
    assert [layer.boundary_bytes for layer in spec.layers] == [4 * 4 + 3 * 8, 4 * 4 + 3 * 8, 4 * 4]


def test_buffers_and_draws_that_nobody_makes_are_fine() -> None:
    layer = Does(lambda x: F.dropout(x, 0.0, training=True))
    layer.register_buffer("table", torch.ones(4))
    assert describe(Stack(layer), X).num_parameters == 20


# --- modules that do not tell their layers ---------------------------------------------------------------------------


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 5, bias=False)


def whole(model: nn.Module, batch: Any) -> ModelSpec:
    spec = describe(model, batch)
    assert spec.layer_names == ("model",)
    assert not spec.can_be_cut
    assert all(p.layers == (0,) and p.cut is None for p in spec.parameters)
    return spec


@pytest.mark.parametrize("batch", [X, None, "text"])
def test_a_module_without_layers_is_one_layer_with_guessed_costs(batch: Any) -> None:
    spec = whole(NoForward(), batch)
    assert spec.layers[0].forward_flops == 2 * 15
    assert spec.num_parameters == 15


def test_a_module_without_layers_is_measured_where_its_forward_runs() -> None:
    layer = whole(nn.Bilinear(4, 4, 3, bias=False), X).layers[0]
    assert layer.forward_flops == 2 * 4 * 4 * 3  # two inputs: cannot run on the batch
    layer = whole(Does(lambda x: F.dropout(x @ x.T, 0.0)), (X, X)).layers[0]
    assert layer.forward_flops == (2 * 2 * 4 * 4 + 2 * 2 * 2 * 4) / 2
    assert layer.activation_bytes > 0


# --- conventions -----------------------------------------------------------------------------------------------------


def test_first_inputs() -> None:
    plain = nn.Linear(4, 4)
    assert first_inputs(plain, X) is X
    assert first_inputs(plain, (X, 1)) is X
    assert first_inputs(plain, [X, 1]) is X
    batch = tokens()
    assert first_inputs(plain, batch) is batch
    assert first_inputs(gpt(), batch) is batch["tokens"]


def test_a_model_without_loss_is_told_how_to_have_one() -> None:
    with pytest.raises(ConfigError, match=r"Linear has no loss: give it loss\(output, batch\) -> \(sum, count\)"):
        model_loss(nn.Linear(4, 4), X, X)


def test_unsynchronised_norms() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3)), nn.LayerNorm(4))
    assert unsynchronised_norms(model) == ["0", "1.0"]


# --- refusals --------------------------------------------------------------------------------------------------------

SPLITS = [
    ({"steps.0.linaer": "row"}, "model.tensor_split", "'steps.0.linaer' matches no module; did you mean steps.0.linea"),
    ({"xyz": "row"}, "model.tensor_split", "matches no module; the model has steps, steps.0, steps.0.linear, steps.1"),
    ({"steps.0.linear": "colum"}, "model.steps.0.linear", "heads(num_heads, num_kv_heads); did you mean column?"),
    ({"steps.0.linear": "diagon"}, "model.steps.0.linear", "not one of column, colwise, row, rowwise, vocab, partial"),
    ({"steps.0": "column"}, "model.steps.0", "'column' needs nn.Linear, this is Does: name the linear module inside"),
    ({"steps.1": "row"}, "model.steps.1", "'row' needs nn.Linear, this is nn.Embedding: use 'vocab'"),
    ({"steps.0": "vocab"}, "model.steps.0", "'vocab' needs nn.Linear or nn.Embedding, this is Does"),
    ({"steps.0": "heads(4, 2)"}, "model.steps.0", "q_proj, k_proj, v_proj, o_proj is none"),
    ({"steps.0.*": "column", "*.linear": "row"}, "model.steps.0.linear", "two patterns of tensor_split name it"),
]  # fmt: skip


@pytest.mark.parametrize(("split", "path", "message"), SPLITS)
def test_a_split_that_does_not_fit(split: dict[str, str], path: str, message: str) -> None:
    text = refusal(Stack(Does(lambda x: x), nn.Embedding(3, 4), split=split))
    assert f"  {path} " in text
    assert message in text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("heads(6, 4)", "6 heads are not a multiple of 4 kv heads"),
        ("heads(6, 0)", "6 heads are not a multiple of 0 kv heads"),
        ("heads(6, 6)", r"(12, 6, 6, 12) elements are no 6 heads and 6 kv heads of one width"),
        ("heads(5, 5)", "elements are no 5 heads"),
    ],
)
def test_heads_that_do_not_fit(word: str, message: str) -> None:
    model = gpt()
    model.tensor_split = {"blocks.1.attention": word}
    text = refusal(model, tokens())
    assert "model.blocks.1.attention " in text
    assert message in text


def test_all_problems_of_the_splits_at_once() -> None:
    text = refusal(Stack(Does(lambda x: x), split={"steps.9": "row", "steps.0": "row", "steps.0.linear": "rows"}))
    assert text.startswith("3 problems in the config")


def test_a_weight_cut_in_two_ways() -> None:
    model = Stack(nn.Linear(4, 4), nn.Linear(4, 4), split={"steps.0": "column", "steps.1": "row"})
    model.steps[1].weight = model.steps[0].weight
    assert "model.steps.1  its weight is tied to one that is cut in another way" in refusal(model)


def test_a_weight_cut_in_one_place_only() -> None:
    model = gpt()
    del model.tensor_split["head.projection"]
    text = refusal(model, tokens())
    assert "model.embed.tokens.weight  tied between a module that tensor_split cuts and one that it does not" in text


def test_a_cut_module_in_two_layers() -> None:
    linear = nn.Linear(4, 4)
    text = refusal(Stack(nn.Sequential(linear), nn.Sequential(linear), split={"steps.0.0": "column"}))
    assert "model.steps.0.0  'column', but 2 layers hold this module: give each layer its own, and share" in text


def test_a_parameter_outside_all_layers() -> None:
    model = Stack(nn.Linear(4, 4))
    model.scale = nn.Parameter(torch.ones(1))
    model.extra = nn.Linear(4, 4)
    model.tensor_split = {}
    text = refusal(model)
    for name in ("scale", "extra.weight", "extra.bias"):
        assert f"model.{name} " in text
    assert "no layer of layers() uses this parameter: put its module into a layer" in text
    model.tensor_split = {"extra": "column"}
    assert "'column', but no layer of layers() holds this module" in refusal(model)


def test_a_parameter_of_another_layer() -> None:
    first = nn.Linear(4, 4)
    text = refusal(Stack(first, Does(Borrowed(first))))
    assert "model.steps.1  uses a parameter of shape (4, 4) that it does not hold" in text
    assert "register it in this layer too" in text


class Borrowed:
    """Holds a module where `nn.Module` does not look."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.module.weight)


class Layers(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def layers(self) -> list[tuple[str, nn.Module]]:
        return [(name, nn.Identity()) for name in self.names]


@pytest.mark.parametrize(("names", "found"), [(["a", "b", "a"], "gives a twice"), ([], "gives nothing")])
def test_layers_that_cannot_be_told_apart(names: list[str], found: str) -> None:
    with pytest.raises(ConfigError, match=rf"layers\(\) of Layers {found}: name each layer once, in order"):
        layers_of(Layers(names))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda x: (x, x), "gives tuple: a layer gives a tensor, or a dict of str to tensor or None"),
        (lambda x: {"x": x, "n": 3}, "gives a dict with ['Tensor', 'int']"),
        (lambda x: None, "gives NoneType"),
        (lambda x: x.sum(), "gives a tensor of shape () for 2 samples"),
        (lambda x: {"x": x, "mask": x.T}, "gives 'mask' of shape (4, 2) for 2 samples: the first dim"),
        (lambda x: x @ x, "fails on ((2, 4), 'torch.float32'): "),
    ],
)
def test_an_output_that_cannot_cross_a_bridge(action: Any, message: str) -> None:
    text = refusal(Stack(Does(action), nn.Linear(4, 4)))
    assert "model.steps.0  " in text
    assert message in text


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Scales(nn.Dropout):
    """A dropout of its own kind, which the runtime does not know."""


@pytest.mark.parametrize(
    ("layer", "drawer"),
    [
        (Does(lambda x: F.dropout(x, 0.1)), "Does"),
        (Does(lambda x: x * torch.rand_like(x)), "Does"),
        (Does(lambda x: F.scaled_dot_product_attention(*[x.view(2, 1, 1, 4)] * 3, dropout_p=0.1).view(2, 4)), "Does"),
        (nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.1)), "AlphaDropout"),
        (nn.Sequential(nn.Linear(4, 4), nn.RReLU()), "RReLU"),
        (nn.Sequential(nn.Linear(4, 4), Scales(0.1)), "Scales"),
        (Attends(), "MultiheadAttention"),
    ],
)
def test_draws_outside_of_dropout_modules(layer: nn.Module, drawer: str) -> None:
    text = refusal(Stack(layer), torch.zeros(2, 3, 4) if isinstance(layer, Attends) else X)
    assert "model.steps.0  draws random numbers in training (" in text
    assert f" in {drawer}), which would be others under every plan: use nn.Dropout modules" in text


def test_a_model_that_cannot_be_copied() -> None:
    model = Stack(nn.Linear(4, 4))
    model.lock = threading.Lock()
    assert "Stack cannot be copied" in refusal(model)
    assert "keep open files, locks and non-leaf tensors out of modules" in refusal(model)
