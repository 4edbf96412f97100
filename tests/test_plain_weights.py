"""Weights in and out as others keep them: one file, a Hugging Face folder of one or several, never a pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from runs import gpt
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whale_trainer.checkpoint import Piece, check_weights, export_weights, load_weights_from, write_checkpoint
from whale_trainer.errors import CheckpointError


class Tied(nn.Module):
    """A tied weight, a buffer that is kept and one that is not."""

    weight_names: ClassVar = {"transformer.wte.weight": "embed.weight", "h.*.ln_*.weight": "blocks.*.norm*.weight"}

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm1": nn.LayerNorm(3, bias=False)}) for _ in range(2))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


def saved(folder: Path, model: nn.Module) -> Path:
    """A checkpoint of ours, as one rank writes it."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {n: t for n, t in model.state_dict(keep_vars=True).items() if not isinstance(t, nn.Parameter)}
    write_checkpoint(
        folder,
        {"global_step": 4},
        [Piece(name, tensor) for name, tensor in tensors.items()],
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        aliases={"head.weight": "embed.weight"} if isinstance(model, Tied) else {},
    )
    return folder


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(t, b.state_dict()[name]) for name, t in a.state_dict().items())


def test_one_file_loads_strictly_in_the_plain_model(tmp_path: Path) -> None:
    model = Tied(3.0)
    with torch.device("meta"):
        skeleton = Tied()
    size = export_weights(saved(tmp_path / "c", model), tmp_path / "model.safetensors", skeleton)
    assert (tmp_path / "model.safetensors").stat().st_size == size
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == {"embed.weight", "head.weight", "count", "blocks.0.norm1.weight", "blocks.1.norm1.weight"}
    other = Tied()
    other.load_state_dict(weights, strict=True)
    assert same(other, model)
    again = Tied()
    load_weights_from(tmp_path / "model.safetensors", again)
    assert same(again, model)


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"c holds another model's weights: .*embed.weight \[5, 3\] is not in it"):
        export_weights(path, tmp_path / "model.safetensors", Tied())
    assert not (tmp_path / "model.safetensors").exists()


def as_file(folder: Path, weights: dict[str, Tensor]) -> Path:
    save_file(weights, folder / "model.safetensors")
    return folder / "model.safetensors"


def as_folder(folder: Path, weights: dict[str, Tensor]) -> Path:
    as_file(folder, weights)
    (folder / "config.json").write_text("{}")
    return folder


def as_shards(folder: Path, weights: dict[str, Tensor]) -> Path:
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({n: t for n, t in weights.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.parametrize("write", [as_file, as_folder, as_shards])
def test_weights_are_taken_by_their_names_and_by_those_that_the_model_declares(tmp_path: Path, write: Any) -> None:
    theirs = {
        "transformer.wte.weight": torch.full((5, 3), 2.0, dtype=torch.bfloat16),  # the tied name may be absent
        "h.0.ln_1.weight": torch.full((3,), 3.0),
        "blocks.1.norm1.weight": torch.full((3,), 4.0),
        "count": torch.tensor(7),
    }
    model = Tied()
    place = write(tmp_path, theirs)
    check_weights(place, model)
    load_weights_from(place, model)
    assert torch.equal(model.head.weight, torch.full((5, 3), 2.0))
    assert [block["norm1"].weight[0].item() for block in model.blocks] == [3.0, 4.0]
    assert int(model.count) == 7


def test_a_checkpoint_of_ours_gives_first_weights_too(tmp_path: Path) -> None:
    model = Tied(3.0)
    other = Tied()
    load_weights_from(saved(tmp_path / "c", model), other)
    assert same(other, model)


def pickled(folder: Path) -> Path:
    torch.save({}, folder / "pytorch_model.bin")
    return folder


def outside(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    return folder


def lacking(folder: Path) -> Path:
    as_shards(folder, {name: t.clone() for name, t in gpt().state_dict().items()})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["more"] = next(iter(index["weight_map"].values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def garbage(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: pickled(f) / "pytorch_model.bin", r"pytorch_model.bin is a pickle, .*run code.*: convert it"),
        (pickled, r"has pytorch_model.bin only, which can run code when read: convert it to safetensors"),
        (lambda f: f / "nowhere", r"nowhere does not exist"),
        (lambda f: f, r"holds neither model.safetensors nor model.safetensors.index.json"),
        (outside, r"names '\.\./a.safetensors', which is no safetensors file of its folder"),
        (lacking, r"lacks more, which model.safetensors.index.json says is in it"),
        (garbage, r"model.safetensors cannot be read as safetensors"),
        (
            lambda f: as_file(f, {"embed.weight": torch.ones(5, 4), "lm_head": torch.ones(2)}),
            r"another model's weights: .*blocks.0.norm1.weight \[3\] is not in it; .*"
            r"lm_head \[2\] is not in the model; embed.weight has shape \[5, 4\], the model's is \[5, 3\]",
        ),
    ],
    ids=["pickle", "folder of pickles", "nothing", "empty", "outside", "lacking", "garbage", "another model"],
)
def test_what_cannot_be_taken_is_told_by_name(tmp_path: Path, make: Any, message: str) -> None:
    model = gpt() if make is lacking else Tied()
    with pytest.raises(CheckpointError, match=message):
        check_weights(make(tmp_path), model)
