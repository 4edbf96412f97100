"""BERT in plain PyTorch (Devlin et al. 2019), trained to fill in masked tokens.

Attention takes all places of a sequence, so batches are packed full. Norms come after the sums, as published.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Target of a place that does not count for the loss."""

Streams = dict[str, Tensor]
"""What goes from layer to layer: "x" [batch, time, width] and "positions" [batch, places] of the masked tokens."""


class Attention(nn.Module):
    """Self-attention over the whole sequence."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, time, heads * head_dim] -> [batch, heads, time, head_dim]; the heads here may be a part of all
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Embed(nn.Module):
    """Sum of the embeddings of tokens, of places and of the two segments, normed."""

    def __init__(self, vocab_size: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(context, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: Streams) -> Streams:
        tokens = batch["tokens"]
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit the model's context of {self.context} (model.context)")
        places = self.places(torch.arange(length, device=tokens.device))
        x = self.tokens(tokens) + self.segments(batch["segments"]) + places
        return {"x": self.dropout(self.norm(x)), "positions": batch["positions"]}


class Block(nn.Module):
    """Attention and feed-forward, each added to what came in and normed."""

    def __init__(self, width: int, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.attention_dropout = nn.Dropout(dropout)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.mlp = FeedForward(width, hidden)
        self.mlp_dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, streams: Streams) -> Streams:
        x = streams["x"]
        x = self.attention_norm(x + self.attention_dropout(self.attention(x)))
        x = self.mlp_norm(x + self.mlp_dropout(self.mlp(x)))
        return {**streams, "x": x}


class Head(nn.Module):
    """Logits of the masked places only: linear, GELU, norm, and the projection to the vocabulary."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.projection = nn.Linear(width, vocab_size)

    def forward(self, streams: Streams) -> Tensor:
        x, positions = streams["x"], streams["positions"]
        x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.projection(self.norm(F.gelu(self.transform(x))))


class BERT(nn.Module):
    """Encoder over batches of int64: `tokens` and `segments` [B, T], and the masked `positions` and their `targets`
    [B, P], where a target of -100 is ignored.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        num_layers: int,
        num_heads: int,
        context: int,
        hidden: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        """`hidden` is the feed-forward width, 4 x `width` unless given. Raises `ValueError` for sizes that do not fit
        each other.
        """
        super().__init__()
        if num_heads < 1 or width % num_heads:
            raise ValueError(f"width {width} is not a multiple of num_heads {num_heads}: choose one that is")
        self.tensor_split = {
            "embed.tokens": "vocab",
            "blocks.*.attention": f"heads({num_heads}, {num_heads})",
            "blocks.*.mlp.up": "column",
            "blocks.*.mlp.down": "row",
            "head.projection": "vocab",
        }
        hidden = 4 * width if hidden is None else hidden
        self.embed = Embed(vocab_size, width, context, dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, hidden, dropout) for _ in range(num_layers))
        self.head = Head(width, vocab_size)
        self.head.projection.weight = self.embed.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers in order; each takes what the one before it gives."""
        yield "embed", self.embed
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}", block
        yield "head", self.head

    def forward(self, inputs: Streams) -> Tensor:
        x = inputs
        for _, layer in self.layers():
            x = layer(x)
        return x

    def inputs(self, batch: dict[str, Tensor]) -> Streams:
        """What the first layer gets."""
        return {name: batch[name] for name in ("tokens", "segments", "positions")}

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the masked tokens' cross entropies, in float32 at least, and the number of those that count."""
        targets = batch["targets"].flatten()
        logits = output.flatten(0, 1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return total, (targets != IGNORED).sum()
