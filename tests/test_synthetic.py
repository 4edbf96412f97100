"""Made-up samples: the shapes that were declared, the same ones every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whale_trainer.data import SyntheticImages, SyntheticMaskedText, SyntheticPairs
from whale_trainer.data.synthetic import Synthetic
from whale_trainer.errors import ConfigError

SETS: dict[str, Any] = {
    "images": lambda **o: SyntheticImages(size=8, num_classes=5, **o),
    "pairs": lambda **o: SyntheticPairs(vocab_size=50, source_length=7, target_length=4, **o),
    "masked text": lambda **o: SyntheticMaskedText(vocab_size=200, context=30, num_masked=6, **o),
}
SHAPES = {
    "images": {"images": (torch.float32, (3, 8, 8)), "labels": (torch.int64, ())},
    "pairs": {"source": (torch.int64, (7,)), "target": (torch.int64, (4,)), "targets": (torch.int64, (4,))},
    "masked text": {
        "tokens": (torch.int64, (30,)),
        "segments": (torch.int64, (30,)),
        "positions": (torch.int64, (6,)),
        "targets": (torch.int64, (6,)),
    },
}


@pytest.mark.parametrize("name", SETS)
def test_shapes(name: str) -> None:
    data: Synthetic = SETS[name](num_samples=3)
    assert len(data) == 3
    for index in range(3):
        assert {k: (v.dtype, tuple(v.shape)) for k, v in data[index].items()} == SHAPES[name]
    with pytest.raises(IndexError, match="sample 3 of 3"):
        data[3]


@pytest.mark.parametrize("name", SETS)
def test_a_sample_depends_on_seed_and_index_only(name: str) -> None:
    first, again, other = SETS[name](), SETS[name](), SETS[name](seed=1)
    key = next(iter(SHAPES[name]))
    first[0]
    assert torch.equal(first[5][key], again[5][key])
    assert not torch.equal(first[5][key], first[6][key])
    assert not torch.equal(first[5][key], other[5][key])


def test_a_decoder_gets_the_targets_one_place_later() -> None:
    item = SETS["pairs"]()[2]
    assert item["target"][0] == 0
    assert torch.equal(item["target"][1:], item["targets"][:-1])


def test_masked_tokens_are_the_targets() -> None:
    for index in range(20):
        item = SETS["masked text"]()[index]
        positions = item["positions"]
        assert (positions.diff() > 0).all()
        assert (item["tokens"][positions] == 103).all()
        assert (item["segments"].diff() >= 0).all()
        assert 0 <= item["segments"].min() <= item["segments"].max() <= 1
        assert item["targets"].max() < 200


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SyntheticImages(size=0, num_classes=0), "2 problems in the config"),
        (lambda: SyntheticImages(size=8, num_classes=5, seed=-1), "data.seed  -1 is below 0"),
        (lambda: SyntheticPairs(10, 4, 4, num_samples=0), "data.num_samples  0 is below 1"),
        (lambda: SyntheticMaskedText(200, 8, 9), "data.num_masked  9 is above context, which is 8"),
        (lambda: SyntheticMaskedText(100, 8, 2), "data.mask_token  103 is not from 0 to 99"),
    ],
)
def test_sizes_that_make_no_sample(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)
