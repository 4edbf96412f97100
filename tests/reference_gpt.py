"""The reference: a GPT and its training in bare PyTorch, which everything else must equal. Imports nothing of ours.

The decoder is a function of a dict of weights, written from the formulas: attention by an explicit softmax over all
scores, rotation by complex numbers, norms and GELU by hand. `python tests/reference_gpt.py` trains a small one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """What the shapes of the weights do not tell."""

    num_heads: int
    num_kv_heads: int
    norm: str = "layer"
    rotary: bool = False


@dataclass(frozen=True)
class Training:
    """Mean loss and gradient norm of each step, gradients of the first one, weights after the last one."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def logits(weights: Weights, tokens: Tensor, sizes: Sizes) -> Tensor:
    """[batch, time] of tokens to [batch, time, vocabulary]."""
    x = weights["embed.tokens.weight"][tokens]
    if not sizes.rotary:
        x = x + weights["embed.positions.weight"][: tokens.shape[1]]
    block = 0
    while f"blocks.{block}.mlp.up.weight" in weights:
        name = f"blocks.{block}"
        x = x + attention(weights, f"{name}.attention", normed(weights, f"{name}.attention_norm", x, sizes), sizes)
        hidden = linear(weights, f"{name}.mlp.up", normed(weights, f"{name}.mlp_norm", x, sizes))
        x = x + linear(weights, f"{name}.mlp.down", gelu(hidden))
        block += 1
    # where the head's weight is tied it has no entry of its own
    head = weights.get("head.projection.weight", weights["embed.tokens.weight"])
    return normed(weights, "head.norm", x, sizes) @ head.T


def attention(weights: Weights, name: str, x: Tensor, sizes: Sizes) -> Tensor:
    """Each query head looks at its own and all earlier places of the kv head of its group, one head after the other."""
    time = x.shape[1]
    q, k, v = (linear(weights, f"{name}.{part}", x) for part in ("q_proj", "k_proj", "v_proj"))
    width = q.shape[-1] // sizes.num_heads
    later = torch.ones(time, time, dtype=torch.bool).triu(1)
    heads = []
    for head in range(sizes.num_heads):
        kv = head // (sizes.num_heads // sizes.num_kv_heads)
        query = q[..., head * width : (head + 1) * width]
        key, value = (t[..., kv * width : (kv + 1) * width] for t in (k, v))
        query, key = normed(weights, f"{name}.q_norm", query, sizes), normed(weights, f"{name}.k_norm", key, sizes)
        if sizes.rotary:
            query, key = rotated(query), rotated(key)
        scores = (query @ key.transpose(1, 2) / math.sqrt(width)).masked_fill(later, -math.inf)
        heads.append(scores.softmax(-1) @ value)
    return linear(weights, f"{name}.o_proj", torch.cat(heads, -1))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def normed(weights: Weights, name: str, x: Tensor, sizes: Sizes) -> Tensor:
    """Layer or root-mean-square norm; `x` itself where the model has none of this name."""
    if f"{name}.weight" not in weights:
        return x
    if sizes.norm == "rms":
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def rotated(x: Tensor) -> Tensor:
    """Element i and i + width / 2 are one complex number, turned by place x 10000^(-2i / width)."""
    half = x.shape[-1] // 2
    turns = torch.arange(x.shape[1], dtype=torch.float64)[:, None] / 10_000 ** (torch.arange(half) / half).double()
    number = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * turns).to(
        torch.complex128 if x.dtype == torch.float64 else torch.complex64
    )
    return torch.cat((number.real, number.imag), -1)


def loss(weights: Weights, batch: Batch, sizes: Sizes) -> tuple[Tensor, int]:
    """Sum of -log p(target) over tokens whose target is not -100, and their number."""
    target = batch["targets"]
    counts = target != -100
    log_p = logits(weights, batch["tokens"], sizes).log_softmax(-1)
    picked = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return -(picked * counts).sum(), int(counts.sum())


def train(
    weights: Weights,
    batches: Sequence[Batch],
    sizes: Sizes,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    clip: float = 0.0,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Training:
    """One step for each batch, from `weights`, by the mean loss over the tokens that count."""
    parameters = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    options = {} if optimizer is torch.optim.SGD else {"weight_decay": weight_decay, "betas": betas}
    steps = optimizer(list(parameters.values()), lr=lr, **options)  # type: ignore[call-arg]
    losses, norms, gradients = [], [], {}
    for batch in batches:
        total, count = loss(parameters, batch, sizes)
        mean = total / count
        steps.zero_grad()
        mean.backward()
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), clip or math.inf).item())
        steps.step()
        losses.append(mean.item())
    return Training(losses, norms, gradients, {name: p.detach() for name, p in parameters.items()})


def start_weights(vocab_size: int, width: int, num_layers: int, context: int, sizes: Sizes) -> dict[str, Tensor]:
    """Start values for a decoder without biases, with a tied head."""
    kv_width = width // sizes.num_heads * sizes.num_kv_heads
    weights = {"embed.tokens.weight": torch.randn(vocab_size, width) * 0.02, "head.norm.weight": torch.ones(width)}
    if not sizes.rotary:
        weights["embed.positions.weight"] = torch.randn(context, width) * 0.02
    for block in range(num_layers):
        shapes = {"attention.q_proj": (width, width), "attention.k_proj": (kv_width, width)}
        shapes |= {"attention.v_proj": (kv_width, width), "attention.o_proj": (width, width)}
        shapes |= {"mlp.up": (4 * width, width), "mlp.down": (width, 4 * width)}
        weights |= {f"blocks.{block}.{n}.weight": torch.randn(shape) * 0.02 for n, shape in shapes.items()}
        weights |= {f"blocks.{block}.{n}.weight": torch.ones(width) for n in ("attention_norm", "mlp_norm")}
    return weights


def main(num_steps: int = 20) -> None:
    from pydoc_data.topics import topics

    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    places = torch.randint(len(text) - 65, (num_steps, 8))
    windows = text[places[..., None] + torch.arange(65)]
    batches = [{"tokens": w[:, :-1], "targets": w[:, 1:]} for w in windows]
    sizes = Sizes(4, 2, rotary=True)
    done = train(start_weights(256, 64, 2, 64, sizes), batches, sizes, lr=3e-3, clip=1.0)
    sys.stdout.write(f"{num_steps} steps: loss {done.losses[0]:.3f} -> {done.losses[-1]:.3f} nats per byte\n")


if __name__ == "__main__":
    main()
