"""The parameters of a model in columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from whale_trainer.model_spec import Cut, ModelSpec
from whale_trainer.planning.precision import Precision
from whale_trainer.planning.shares import cut_elements

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int_]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class ParameterTable:
    """The parameters of a model in columns, so that a shard's part of all of them is a few operations on arrays."""

    cuts: tuple[Cut, ...]
    cut_of: Indices
    """Which of the cuts; the number of cuts for a whole parameter."""
    of_cut: Numbers
    """Elements for each position along the cut dim."""
    num_elements: Numbers
    bytes_each: Numbers
    is_trained: Numbers
    """1 or 0."""
    is_whole: Flags
    is_tied: Flags
    last_layer: Indices

    @classmethod
    def of(cls, model: ModelSpec, precision: Precision) -> ParameterTable:
        parameters = model.parameters
        cuts = tuple(dict.fromkeys(p.cut for p in parameters if p.cut is not None))
        places = {cut: i for i, cut in enumerate(cuts)}
        lengths = [p.shape[p.cut.dim] if p.cut is not None else 1 for p in parameters]
        return cls(
            cuts,
            np.array([places[p.cut] if p.cut is not None else len(cuts) for p in parameters], dtype=int),
            np.array([p.num_elements // length for p, length in zip(parameters, lengths, strict=True)], dtype=float),
            np.array([p.num_elements for p in parameters], dtype=float),
            np.array([precision.bytes_of(p) for p in parameters], dtype=float),
            np.array([p.trainable for p in parameters], dtype=float),
            np.array([p.cut is None for p in parameters], dtype=bool),
            np.array([len(p.layers) > 1 for p in parameters], dtype=bool),
            np.array([max(p.layers, default=0) for p in parameters], dtype=int),
        )

    def elements(self, weights: tuple[int, ...], shard: int) -> Numbers:
        """Of each parameter on one shard."""
        if len(weights) == 1:
            return self.num_elements
        lengths = np.array([*(len(cut_elements(cut, weights, shard)) for cut in self.cuts), 1], dtype=float)
        found: Numbers = self.of_cut * lengths[self.cut_of]
        return found
