"""Global batches and each rank's part of them: data sets, order, draws, slicing."""

from __future__ import annotations

from whale_trainer.data.datasets import PydocText as PydocText
from whale_trainer.data.datasets import TextFiles as TextFiles
from whale_trainer.data.rank_loader import RankBatch as RankBatch
from whale_trainer.data.rank_loader import RankLoader as RankLoader
from whale_trainer.data.slicing import slice_loader as slice_loader
from whale_trainer.data.synthetic import SyntheticImages as SyntheticImages
from whale_trainer.data.synthetic import SyntheticMaskedText as SyntheticMaskedText
from whale_trainer.data.synthetic import SyntheticPairs as SyntheticPairs
