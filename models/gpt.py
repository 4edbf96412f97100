"""A GPT-style decoder in plain PyTorch: grouped-query attention, tied embeddings, dropout on embedding and residuals.

Knows nothing of ranks. What may be cut is declared as data in `tensor_split`; the attention reads its head counts off
the tensors, so that the same code runs on a part of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Target of a token that does not count for the loss."""


class Attention(nn.Module):
    """Causal self-attention in which `num_heads / num_kv_heads` query heads share one key and value head."""

    def __init__(
        self, width: int, num_heads: int, num_kv_heads: int, *, bias: bool, qk_norm: bool, norm: str, rotary: bool
    ) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.rotary = rotary
        self.q_proj = nn.Linear(width, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, width, bias=bias)
        self.q_norm = _norm(norm, self.head_dim, bias) if qk_norm else nn.Identity()
        self.k_norm = _norm(norm, self.head_dim, bias) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        # [batch, time, heads * head_dim] -> [batch, heads, time, head_dim]; the heads here may be a part of all
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(
        self, attention: Attention, mlp: FeedForward, norms: tuple[nn.Module, nn.Module], dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention = attention
        self.mlp = mlp
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class Embed(nn.Module):
    """Token embedding, plus a learned one of positions unless the attention rotates."""

    def __init__(self, vocab_size: int, width: int, context: int, dropout: float, *, learned_positions: bool) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width) if learned_positions else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit the model's context of {self.context} (model.context)")
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        return self.dropout(x)


class Head(nn.Module):
    """Final norm and projection to logits."""

    def __init__(self, norm: nn.Module, width: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = norm
        self.projection = nn.Linear(width, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


class GPT(nn.Module):
    """Decoder over batches `{"tokens": [B, T], "targets": [B, T]}` of int64, where a target of -100 is ignored."""

    def __init__(
        self,
        vocab_size: int,
        width: int,
        num_layers: int,
        num_heads: int,
        context: int,
        num_kv_heads: int | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        tied: bool = True,
        qk_norm: bool = False,
        norm: str = "layer",
        positions: str = "learned",
    ) -> None:
        """`hidden` is the feed-forward width, 4 x `width` unless given; `norm` layer or rms; `positions` learned or
        rotary. Raises `ValueError` for sizes that do not fit each other.
        """
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check(width, num_heads, num_kv_heads, norm, positions)
        self.num_layers = num_layers
        self.tensor_split = {
            "embed.tokens": "vocab",
            "blocks.*.attention": f"heads({num_heads}, {num_kv_heads})",
            "blocks.*.mlp.up": "column",
            "blocks.*.mlp.down": "row",
            "head.projection": "vocab",
        }
        rotary = positions == "rotary"
        self.embed = Embed(vocab_size, width, context, dropout, learned_positions=not rotary)
        self.blocks = nn.ModuleList(
            Block(
                Attention(width, num_heads, num_kv_heads, bias=bias, qk_norm=qk_norm, norm=norm, rotary=rotary),
                FeedForward(width, 4 * width if hidden is None else hidden, bias=bias),
                (_norm(norm, width, bias), _norm(norm, width, bias)),
                dropout,
            )
            for _ in range(num_layers)
        )
        self.head = Head(_norm(norm, width, bias), width, vocab_size)
        if tied:
            self.head.projection.weight = self.embed.tokens.weight
        self._initialise()

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers in order; each takes what the one before it gives."""
        yield "embed", self.embed
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}", block
        yield "head", self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for _, layer in self.layers():
            x = layer(x)
        return x

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        """What the first layer gets."""
        return batch["tokens"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the tokens' cross entropies, in float32 at least, and the number of tokens that count."""
        targets = batch["targets"].flatten()
        logits = output.flatten(0, 1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return total, (targets != IGNORED).sum()

    def _initialise(self) -> None:
        """GPT-2's: normal with 0.02, and the two projections into the residual stream smaller by sqrt(2 x layers)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith(("o_proj", "mlp.down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.num_layers) if into_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def _norm(kind: str, width: int, bias: bool) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-6) if kind == "rms" else nn.LayerNorm(width, bias=bias)


def _rotate(x: Tensor) -> Tensor:
    """Rotary position embedding: turn each pair of dims by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=torch.float64), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def _check(width: int, num_heads: int, num_kv_heads: int, norm: str, positions: str) -> None:
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"num_heads {num_heads} and num_kv_heads {num_kv_heads} must be at least 1")
    if width % num_heads:
        raise ValueError(f"width {width} is not a multiple of num_heads {num_heads}: choose one that is")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}: choose one that is")
    if norm not in ("layer", "rms"):
        raise ValueError(f"norm {norm!r} is not one of layer, rms")
    if positions not in ("learned", "rotary"):
        raise ValueError(f"positions {positions!r} is not one of learned, rotary")
    if positions == "rotary" and (width // num_heads) % 2:
        raise ValueError(f"rotary positions need an even head width, not {width // num_heads} (width / num_heads)")
