"""GNMT in plain PyTorch (Wu et al. 2016): LSTMs that read, LSTMs that write, attention between them.

As in its later releases, the attention looks with the lowest decoder layer's output of the same step, and all layers
above get what it found; so each LSTM runs over its whole sequence at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Target of a token that does not count for the loss."""

Streams = dict[str, Tensor]
"""The encoder's layers pass "source" and the target's tokens along, the decoder's "target" and what was "found"."""


class LSTM(nn.Module):
    """One layer in one direction, with its weights as two linear layers: of what comes in, and of the state."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.of_input = nn.Linear(num_inputs, 4 * width)
        self.of_state = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        start = x.new_zeros(1, x.shape[0], self.of_state.in_features)
        weights = [layer.weight for layer in (self.of_input, self.of_state)]
        biases = [layer.bias for layer in (self.of_input, self.of_state)]
        return torch.lstm(x, (start, start), [*weights, *biases], True, 1, 0.0, self.training, False, True)[0]


class Attention(nn.Module):
    """What `x` finds in `memory`, by a small network of both (Bahdanau et al. 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_query = nn.Linear(width, width, bias=False)
        self.of_key = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        # [batch, target, 1, width] + [batch, 1, source, width] -> scores [batch, target, source]
        both = self.of_query(x).unsqueeze(2) + self.of_key(memory).unsqueeze(1)
        return self.score(both.tanh()).squeeze(-1).softmax(-1) @ memory


class EmbedSource(nn.Module):
    """The source's tokens embedded; the target's go along for the decoder."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)

    def forward(self, inputs: Streams) -> Streams:
        return {**inputs, "source": self.tokens(inputs["source"])}


class BothWays(nn.Module):
    """The lowest encoder layer, which reads forwards and backwards and gives both."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.forwards = LSTM(width, width)
        self.backwards = LSTM(width, width)

    def forward(self, streams: Streams) -> Streams:
        x = self.dropout(streams["source"])
        y = torch.cat((self.forwards(x), self.backwards(x.flip(1)).flip(1)), dim=-1)
        return {**streams, "source": y}


class EncoderLayer(nn.Module):
    """An LSTM over "source", added to what came in where the widths agree."""

    def __init__(self, num_inputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = LSTM(num_inputs, width)

    def forward(self, streams: Streams) -> Streams:
        x = streams["source"]
        y = self.lstm(self.dropout(x))
        return {**streams, "source": x + y if x.shape == y.shape else y}


class LowestDecoderLayer(nn.Module):
    """The target's tokens embedded, an LSTM over them, and what its output finds in the encoder's."""

    def __init__(self, vocab_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.lstm = LSTM(width, width)
        self.attention = Attention(width)

    def forward(self, streams: Streams) -> Streams:
        x = self.lstm(self.dropout(self.tokens(streams["target"])))
        return {"target": x, "found": self.attention(x, streams["source"])}


class DecoderLayer(nn.Module):
    """An LSTM over "target" and "found" together, added to what came in except in the first such layer."""

    def __init__(self, width: int, dropout: float, is_added: bool) -> None:
        super().__init__()
        self.is_added = is_added
        self.dropout = nn.Dropout(dropout)
        self.lstm = LSTM(2 * width, width)

    def forward(self, streams: Streams) -> Streams:
        x = streams["target"]
        y = self.lstm(torch.cat((self.dropout(x), streams["found"]), dim=-1))
        return {**streams, "target": x + y if self.is_added else y}


class Head(nn.Module):
    """Projection to logits."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, vocab_size)

    def forward(self, streams: Streams) -> Tensor:
        return self.projection(streams["target"])


class GNMT(nn.Module):
    """Translation of batches of int64: `source` [B, S], `target` [B, T], the decoder's input, and `targets` [B, T],
    what it should give, where -100 is ignored.
    """

    tensor_split = {  # noqa: RUF012 -- plain data, never changed
        "embed_source.tokens": "vocab",
        "decoder.0.tokens": "vocab",
        "head.projection": "vocab",
    }

    def __init__(self, vocab_size: int, width: int, num_layers: int, dropout: float = 0.2) -> None:
        """`num_layers` each of encoder and decoder. Raises `ValueError` for fewer than two."""
        super().__init__()
        if num_layers < 2:
            raise ValueError(f"num_layers {num_layers} is below 2: the lowest layers of both halves are of their own")
        self.embed_source = EmbedSource(vocab_size, width)
        self.encoder = nn.ModuleList([BothWays(width, dropout), EncoderLayer(2 * width, width, dropout)])
        self.encoder.extend(EncoderLayer(width, width, dropout) for _ in range(num_layers - 2))
        self.decoder = nn.ModuleList([LowestDecoderLayer(vocab_size, width, dropout)])
        self.decoder.extend(DecoderLayer(width, dropout, is_added=index > 0) for index in range(num_layers - 1))
        self.head = Head(vocab_size, width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers in order; each takes what the one before it gives."""
        yield "embed_source", self.embed_source
        for index, layer in enumerate(self.encoder):
            yield f"encoder.{index}", layer
        for index, layer in enumerate(self.decoder):
            yield f"decoder.{index}", layer
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
