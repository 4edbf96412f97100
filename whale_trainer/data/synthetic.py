"""Made-up samples of a declared shape, for planning and for speed: nothing is read or downloaded, nothing is learnt.

Sample i is a function of (seed, i) alone, made when it is asked for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from whale_trainer.errors import ConfigError, Problem


class Synthetic(Dataset[dict[str, Tensor]]):
    """`num_samples` samples; `sizes`, which have to be at least 1, are the declared ones by argument name."""

    deterministic = True
    """Reading draws no numbers but a sample's own."""

    def __init__(self, num_samples: int, seed: int, **sizes: int) -> None:
        problems = [
            Problem(f"data.{name}", f"{size} is below 1")
            for name, size in {"num_samples": num_samples, **sizes}.items()
            if size < 1
        ]
        if seed < 0:
            problems.append(Problem("data.seed", f"{seed} is below 0"))
        if problems:
            raise ConfigError(problems)
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def _generator(self, index: int) -> np.random.Generator:
        """The source of sample `index`; numpy's, since planning computes nothing with torch."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return np.random.default_rng((self.seed, index))


class SyntheticImages(Synthetic):
    """Images and their class: {"images": [3, size, size] of float32, "labels": [] of int64}."""

    def __init__(self, size: int, num_classes: int, num_samples: int = 1024, seed: int = 0) -> None:
        super().__init__(num_samples, seed, size=size, num_classes=num_classes)
        self.size = size
        self.num_classes = num_classes

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = self._generator(index)
        image = torch.from_numpy(draw.standard_normal((3, self.size, self.size), dtype=np.float32))
        return {"images": image, "labels": torch.tensor(draw.integers(self.num_classes))}


class SyntheticPairs(Synthetic):
    """Two sequences of int64, as for translation: {"source": [S], "target": [T], "targets": [T]}.

    "target" is what a decoder gets, a 0 and then "targets" one place later.
    """

    def __init__(
        self, vocab_size: int, source_length: int, target_length: int, num_samples: int = 1024, seed: int = 0
    ) -> None:
        super().__init__(
            num_samples, seed, vocab_size=vocab_size, source_length=source_length, target_length=target_length
        )
        self.vocab_size = vocab_size
        self.source_length = source_length
        self.target_length = target_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = self._generator(index)
        source = draw.integers(self.vocab_size, size=self.source_length)
        targets = draw.integers(self.vocab_size, size=self.target_length)
        target = np.concatenate(([0], targets[:-1]))
        return {name: torch.from_numpy(a) for name, a in (("source", source), ("target", target), ("targets", targets))}


class SyntheticMaskedText(Synthetic):
    """A sequence of two segments in which some tokens are to be found, as for BERT, of int64.

    {"tokens": [T], "segments": [T], "positions": [P], "targets": [P]}: the tokens at `num_masked` ascending positions
    are replaced by `mask_token`, and "targets" are what they were.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        num_masked: int,
        mask_token: int = 103,
        num_samples: int = 1024,
        seed: int = 0,
    ) -> None:
        super().__init__(num_samples, seed, vocab_size=vocab_size, context=context, num_masked=num_masked)
        problems = []
        if num_masked > context:
            problems.append(Problem("data.num_masked", f"{num_masked} is above context, which is {context}"))
        if not 0 <= mask_token < vocab_size:
            problems.append(Problem("data.mask_token", f"{mask_token} is not from 0 to {vocab_size - 1}"))
        if problems:
            raise ConfigError(problems)
        self.vocab_size = vocab_size
        self.context = context
        self.num_masked = num_masked
        self.mask_token = mask_token

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = self._generator(index)
        tokens = draw.integers(self.vocab_size, size=self.context)
        segments = (np.arange(self.context) >= draw.integers(1, self.context + 1)).astype(np.int64)
        positions = np.sort(draw.choice(self.context, self.num_masked, replace=False))
        targets = tokens[positions]
        tokens[positions] = self.mask_token
        named = {"tokens": tokens, "segments": segments, "positions": positions, "targets": targets}
        return {name: torch.from_numpy(array) for name, array in named.items()}
