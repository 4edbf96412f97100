"""Text from a language model, one token at a time, over a window of fixed size.

The window is padded on the right: a causal model's outputs do not depend on what comes after, and with one shape for
every token any plan can run it. The caller gives the forward pass; all ranks draw the same tokens from its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def generate(
    forward: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    context: int,
    num_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `num_tokens` new tokens after `prompt`.

    `forward` maps tokens `[1, context]` to scores `[1, context, vocabulary]`. A temperature of 0 takes the likeliest
    token, a higher one draws, always the same for one seed. Only the last `context` tokens are looked at.
    """
    if not prompt:
        raise ValueError("a prompt needs at least one token")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = tokens[-context:]
        padded = torch.tensor([window + [0] * (context - len(window))])
        scores = forward(padded)[0, len(window) - 1].detach().to("cpu", torch.float64)
        token = pick(scores, temperature, generator)
        tokens.append(token)
        yield token


def pick(scores: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One token from the scores of all."""
    if temperature <= 0:
        return int(scores.argmax())
    probabilities = torch.softmax(scores / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
