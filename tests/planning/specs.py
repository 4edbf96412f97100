"""Model specs and clusters written out by hand, for tests that need no torch."""

from __future__ import annotations

from typing import Any

from whale_trainer.cluster import Cluster, load_cluster
from whale_trainer.model_spec import Cut, LayerSpec, ModelSpec, ModuleSplit, ParameterSpec, SplitDim, SplitKind
from whale_trainer.planning.strategy import PRESETS, StrategySpec, load_strategy


def gpt_spec(
    width: int = 96,
    num_blocks: int = 6,
    num_heads: int = 6,
    num_kv_heads: int | None = None,
    vocab_size: int = 256,
    context: int = 64,
    tied: bool = True,
) -> ModelSpec:
    """A decoder as `describe` tells it: embed, blocks.0 …, head; heads, columns and vocabulary may be cut."""
    num_kv_heads = num_kv_heads or num_heads
    hidden, head_dim = 4 * width, width // num_heads
    heads = SplitDim("heads", num_heads, num_kv_heads)
    columns, vocabulary = SplitDim("columns", hidden), SplitDim("vocabulary", vocab_size)
    last = num_blocks + 1
    table = (0, last) if tied else (0,)
    parameters = [
        ParameterSpec("embed.tokens.weight", (vocab_size, width), 4, table, Cut(vocabulary, 0, 1)),
        ParameterSpec("embed.positions.weight", (context, width), 4, (0,)),
    ]
    splits = [ModuleSplit("embed.tokens", SplitKind.VOCAB, 0, vocabulary)]
    for index in range(num_blocks):
        layer, name = index + 1, f"blocks.{index}"
        kv = num_kv_heads * head_dim
        parameters += [
            ParameterSpec(f"{name}.attention.q_proj.weight", (width, width), 4, (layer,), Cut(heads, 0, head_dim)),
            ParameterSpec(f"{name}.attention.k_proj.weight", (kv, width), 4, (layer,), Cut(heads, 0, head_dim, True)),
            ParameterSpec(f"{name}.attention.v_proj.weight", (kv, width), 4, (layer,), Cut(heads, 0, head_dim, True)),
            ParameterSpec(f"{name}.attention.o_proj.weight", (width, width), 4, (layer,), Cut(heads, 1, head_dim)),
            ParameterSpec(f"{name}.norm.weight", (width,), 4, (layer,)),
            ParameterSpec(f"{name}.feed_forward.up.weight", (hidden, width), 4, (layer,), Cut(columns, 0, 1)),
            ParameterSpec(f"{name}.feed_forward.down.weight", (width, hidden), 4, (layer,), Cut(columns, 1, 1)),
        ]
        splits += [
            ModuleSplit(f"{name}.attention", SplitKind.HEADS, layer, heads, head_dim),
            ModuleSplit(f"{name}.feed_forward.up", SplitKind.COLUMN, layer, columns),
            ModuleSplit(f"{name}.feed_forward.down", SplitKind.ROW, layer, columns),
        ]
    parameters.append(ParameterSpec("head.norm.weight", (width,), 4, (last,)))
    if not tied:
        parameters.append(ParameterSpec("head.project.weight", (vocab_size, width), 4, (last,), Cut(vocabulary, 0, 1)))
    splits.append(ModuleSplit("head.project", SplitKind.VOCAB, last, vocabulary))
    boundary = 4 * context * width
    matrices = 2.0 * context * width * (2 * width + 2 * num_kv_heads * head_dim + 2 * hidden)
    block_flops = matrices + 4.0 * context * context * width
    layers = (
        LayerSpec("embed", 2.0 * context * width, 0.0, 2 * boundary, boundary, (vocabulary,), 1),
        *(
            LayerSpec(f"blocks.{i}", block_flops, 0.98 * block_flops, 17 * boundary, boundary, (heads, columns), 2)
            for i in range(num_blocks)
        ),
        LayerSpec(
            "head",
            2.0 * context * width * vocab_size,
            2.0 * context * width * vocab_size,
            2 * boundary + 8 * context * vocab_size,
            4 * context * vocab_size,
            (vocabulary,),
            1,
        ),
    )
    return ModelSpec("GPT", layers, tuple(parameters), tuple(splits))


def plain_spec(flops: list[float], *, bytes_each: int = 400, activation: int = 100) -> ModelSpec:
    """Layers that cannot be cut, of given FLOPs."""
    layers = tuple(LayerSpec(f"layer.{i}", f, 0.0, activation, activation // 4) for i, f in enumerate(flops))
    parameters = tuple(ParameterSpec(f"layer.{i}.weight", (bytes_each // 4,), 4, (i,)) for i in range(len(flops)))
    return ModelSpec("Plain", layers, parameters)


def module_spec() -> ModelSpec:
    """A module without layers(): it may only be replicated."""
    layer = LayerSpec("model", 1000.0, 0.0, 100, 10)
    return ModelSpec("Net", (layer,), (ParameterSpec("weight", (10,), 4, (0,)),), can_be_cut=False)


def cpu_cluster(*nodes: list[float], memory_gib: float | list[float] = 1.0) -> Cluster:
    """One node for each list of speeds in GFLOP/s; memory for all devices, or one figure for each in order."""
    kinds: dict[str, Any] = {}
    written, index = [], 0
    for number, speeds in enumerate(nodes):
        devices: dict[str, int] = {}
        for speed in speeds:
            memory = memory_gib[index] if isinstance(memory_gib, list) else memory_gib
            name = f"cpu-{speed:g}-{memory:g}"
            tflops = speed / 1000
            kinds[name] = {
                "peak_tflops": {"fp32": tflops, "fp64": tflops, "fp16": tflops},
                "memory_gib": memory,
                "memory_bandwidth_gb_per_s": 10,
            }
            devices[name] = devices.get(name, 0) + 1
            index += 1
        written.append({"name": f"node{number}", "devices": devices, "link": "shared_memory"})
    return load_cluster({"nodes": written, "kinds": kinds})


def preset(name: str, **changes: Any) -> StrategySpec:
    """A shipped strategy with some keys changed."""
    return load_strategy({**PRESETS.get(name, {"name": name, "left_over": "allow"}), **changes})


def scopes(*parts: dict[str, Any], **others: Any) -> StrategySpec:
    """A strategy with these scopes."""
    return load_strategy({"scopes": list(parts), **others})
