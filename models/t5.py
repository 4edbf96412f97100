"""T5 in plain PyTorch (Raffel et al. 2020): an encoder that reads, a decoder that writes, places as a bias of scores.

Layers pass a dict along: the encoder the source and the target's tokens, the decoder the encoder's output ("memory")
and its own stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Target of a token that does not count for the loss."""
NUM_CLASSES = 32
"""Classes of distances between two places that share a bias; distances from `FARTHEST` on are one class."""
FARTHEST = 128

Streams = dict[str, Tensor]


class Attention(nn.Module):
    """Attention of `x` over `memory`, over itself where there is none; scores are not scaled."""

    def __init__(self, width: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, num_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        # [batch, time, heads * head_dim] -> [batch, heads, time, head_dim]; the heads here may be a part of all
        read = x if memory is None else memory
        q, k, v = (
            proj(stream).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj, stream in ((self.q_proj, x), (self.k_proj, read), (self.v_proj, read))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Distances(nn.Module):
    """A bias of the scores for each head and class of distance: a linear layer of the class, so that its outputs can
    be cut together with the heads.
    """

    def __init__(self, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.of_class = nn.Linear(NUM_CLASSES, num_heads, bias=False)
        classes = [_distance_class(d, is_causal) for d in range(-FARTHEST, FARTHEST + 1)]
        one_hot = [[float(index == found) for index in range(NUM_CLASSES)] for found in classes]
        self.register_buffer("classes", torch.tensor(one_hot), persistent=False)

    def forward(self, length: int) -> Tensor:
        """Shape [1, heads, length, length], minus infinity where a causal one may not look."""
        bias = self.of_class(self.classes)  # [distance, heads]
        place = torch.arange(length, device=bias.device)
        distance = place - place.unsqueeze(1)
        bias = bias[distance.clamp(-FARTHEST, FARTHEST) + FARTHEST].movedim(-1, 0).unsqueeze(0)
        return bias.masked_fill(distance > 0, -math.inf) if self.is_causal else bias


def _distance_class(distance: int, is_causal: bool) -> int:
    """Half of the classes have one distance each, the others grow with its logarithm; both signs are apart unless
    causal.
    """
    num_classes = NUM_CLASSES if is_causal else NUM_CLASSES // 2
    size = max(0, -distance) if is_causal else abs(distance)
    offset = num_classes if distance > 0 and not is_causal else 0
    exact = num_classes // 2
    if size < exact:
        return offset + size
    grown = exact + int(math.log(size / exact) / math.log(FARTHEST / exact) * (num_classes - exact))
    return offset + min(grown, num_classes - 1)


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.relu(self.up(x))))


class Residual(nn.Module):
    """The norm before a part of a block and the dropout behind it."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.dropout = nn.Dropout(dropout)


class EncoderBlock(nn.Module):
    """Self-attention and feed-forward over "source"."""

    def __init__(self, width: int, num_heads: int, head_dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.distances = Distances(num_heads, is_causal=False)
        self.attention = Attention(width, num_heads, head_dim)
        self.mlp = FeedForward(width, hidden, dropout)
        self.around_attention = Residual(width, dropout)
        self.around_mlp = Residual(width, dropout)

    def forward(self, streams: Streams) -> Streams:
        x = streams["source"]
        attended = self.attention(self.around_attention.norm(x), bias=self.distances(x.shape[1]))
        x = x + self.around_attention.dropout(attended)
        x = x + self.around_mlp.dropout(self.mlp(self.around_mlp.norm(x)))
        return {**streams, "source": x}


class DecoderBlock(nn.Module):
    """Self-attention, attention over the encoder's output, and feed-forward, over "target"."""

    def __init__(self, width: int, num_heads: int, head_dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.distances = Distances(num_heads, is_causal=True)
        self.attention = Attention(width, num_heads, head_dim)
        self.reading = Attention(width, num_heads, head_dim)
        self.mlp = FeedForward(width, hidden, dropout)
        self.around_attention = Residual(width, dropout)
        self.around_reading = Residual(width, dropout)
        self.around_mlp = Residual(width, dropout)

    def forward(self, streams: Streams) -> Streams:
        x, memory = streams["target"], streams["memory"]
        attended = self.attention(self.around_attention.norm(x), bias=self.distances(x.shape[1]))
        x = x + self.around_attention.dropout(attended)
        x = x + self.around_reading.dropout(self.reading(self.around_reading.norm(x), memory))
        x = x + self.around_mlp.dropout(self.mlp(self.around_mlp.norm(x)))
        return {**streams, "target": x}


class EmbedSource(nn.Module):
    """The source's tokens embedded; the target's go along for the decoder."""

    def __init__(self, vocab_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Streams) -> Streams:
        return {"source": self.dropout(self.tokens(inputs["source"])), "target": inputs["target"]}


class EmbedTarget(nn.Module):
    """The end of the encoder, whose output is normed, and the start of the decoder."""

    def __init__(self, vocab_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.around_memory = Residual(width, dropout)
        self.tokens = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, streams: Streams) -> Streams:
        memory = self.around_memory.dropout(self.around_memory.norm(streams["source"]))
        return {"memory": memory, "target": self.dropout(self.tokens(streams["target"]))}


class Head(nn.Module):
    """Final norm and projection to logits, by the embedding scaled with 1 / sqrt(width)."""

    def __init__(self, vocab_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.around = Residual(width, dropout)
        self.projection = nn.Linear(width, vocab_size, bias=False)

    def forward(self, streams: Streams) -> Tensor:
        x = self.around.dropout(self.around.norm(streams["target"]))
        return self.projection(x * self.projection.in_features**-0.5)


class T5(nn.Module):
    """Encoder and decoder over batches of int64: `source` [B, S], `target` [B, T], the decoder's input, and `targets`
    [B, T], what it should give, where -100 is ignored.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        num_layers: int,
        num_heads: int,
        hidden: int,
        head_dim: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        """`num_layers` each of encoder and decoder; `head_dim` is `width / num_heads` unless given. Raises
        `ValueError` for sizes that do not fit each other.
        """
        super().__init__()
        if num_heads < 1 or num_layers < 1 or (head_dim is None and width % num_heads):
            raise ValueError(
                f"width {width} is not a multiple of num_heads {num_heads}, or num_layers {num_layers} is below 1: "
                "choose others, or give head_dim"
            )
        head_dim = width // num_heads if head_dim is None else head_dim
        heads = f"heads({num_heads}, {num_heads})"
        self.tensor_split = {
            "embed_source.tokens": "vocab",
            "embed_target.tokens": "vocab",
            "*.attention": heads,
            "*.reading": heads,
            "*.distances.of_class": "column",
            "*.mlp.up": "column",
            "*.mlp.down": "row",
            "head.projection": "vocab",
        }
        sizes = (width, num_heads, head_dim, hidden, dropout)
        self.embed_source = EmbedSource(vocab_size, width, dropout)
        self.encoder = nn.ModuleList(EncoderBlock(*sizes) for _ in range(num_layers))
        self.embed_target = EmbedTarget(vocab_size, width, dropout)
        self.decoder = nn.ModuleList(DecoderBlock(*sizes) for _ in range(num_layers))
        self.head = Head(vocab_size, width, dropout)
        self.head.projection.weight = self.embed_target.tokens.weight = self.embed_source.tokens.weight
        for blocks in (self.encoder, self.decoder):
            for block in blocks:
                block.distances.of_class.weight = blocks[0].distances.of_class.weight
        self._initialise(width, head_dim)

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers in order; each takes what the one before it gives."""
        yield "embed_source", self.embed_source
        for index, block in enumerate(self.encoder):
            yield f"encoder.{index}", block
        yield "embed_target", self.embed_target
        for index, block in enumerate(self.decoder):
            yield f"decoder.{index}", block
        yield "head", self.head

    def forward(self, inputs: Streams) -> Tensor:
        x = inputs
        for _, layer in self.layers():
            x = layer(x)
        return x

    def inputs(self, batch: dict[str, Tensor]) -> Streams:
        """What the first layer gets."""
        return {"source": batch["source"], "target": batch["target"]}

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the tokens' cross entropies, in float32 at least, and the number of tokens that count."""
        targets = batch["targets"].flatten()
        logits = output.flatten(0, 1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return total, (targets != IGNORED).sum()

    def _initialise(self, width: int, head_dim: int) -> None:
        """As published: normal with 1 / sqrt(inputs), queries smaller by sqrt(head_dim) since scores are not scaled."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif name.endswith("distances.of_class"):
                nn.init.normal_(module.weight, std=width**-0.5)
            elif isinstance(module, nn.Linear) and name != "head.projection":
                scale = head_dim if name.endswith("q_proj") else 1
                nn.init.normal_(module.weight, std=(module.in_features * scale) ** -0.5)
