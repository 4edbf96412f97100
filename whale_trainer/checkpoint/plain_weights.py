"""Weights as others keep them: one `model.safetensors`, or a Hugging Face folder, also of several files.

Going out, all names of the user's model are in the file, those of tied weights and of buffers too, so that
`load_state_dict(..., strict=True)` takes it. Coming in, names and shapes must be the model's; a model that declares
`weight_names = {"their.*.name": "its.*.name"}` is offered the renamed ones. Pickles (`.bin`, `.pt`) are never opened.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from whale_trainer.checkpoint.reader import INDEX, load_full, read_checkpoint
from whale_trainer.checkpoint.tensor_file import write_tensors
from whale_trainer.errors import CheckpointError

FILE = "model.safetensors"
SHARDS = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MANY = 5


def export_weights(checkpoint: str | os.PathLike[str], file: str | os.PathLike[str], model: nn.Module) -> int:
    """Write the weights of a checkpoint of ours to one file for `model` (on any device); the size in bytes.

    The file is written beside its place and renamed. Raises `CheckpointError` when the checkpoint is of another model,
    or the file cannot be written.
    """
    _check_names(_shapes_of(checkpoint), model, str(checkpoint))
    file = Path(file)
    beside = file.with_name(file.name + ".tmp")
    try:
        size = write_tensors(beside, load_full(checkpoint), metadata={"format": "pt"})
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"{file} could not be written ({error}): free some space") from error
    return size


def check_weights(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Raise `CheckpointError` unless `path` holds weights for `model`, with what differs by name; reads no weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    if Path(path, INDEX).is_file():
        _check_names(_shapes_of(path), model, str(path))
        return
    places = _places(Path(path), model)
    for file in {file for file, _ in places.values()}:
        with _opened(file) as handle:
            for name, (place, theirs) in places.items():
                if place == file:
                    shapes[name] = tuple(handle.get_slice(theirs).get_shape())
    _check_names(shapes, model, str(path))


def load_weights_from(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Fill the model's parameters and persistent buffers from `path`. Raises `CheckpointError`."""
    path = Path(path)
    check_weights(path, model)
    if (path / INDEX).is_file():
        _fill(model, load_full(path))
        return
    places = _places(path, model)
    for file in sorted({file for file, _ in places.values()}):
        with _opened(file) as handle:
            _fill(model, {n: handle.get_tensor(theirs) for n, (place, theirs) in places.items() if place == file})


def _shapes_of(checkpoint: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights of a checkpoint of ours, by all their names."""
    with read_checkpoint(checkpoint) as reader:
        return {name: reader.shape(name) for name in (*reader.names(), *reader.aliases)}


def _fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in weights:
                tensor.copy_(weights[name])


def _places(path: Path, model: nn.Module) -> dict[str, tuple[Path, str]]:
    """Name in the model -> (file, name in the file)."""
    found: dict[str, tuple[Path, str]] = {}
    for file, names in _files(path).items():
        with _opened(file) as handle:
            held = set(handle.keys())
        if lost := sorted(set(names or ()) - held):
            raise CheckpointError(f"{file} lacks {_listed(lost)}, which {SHARDS} says is in it")
        for theirs in sorted(held if names is None else names):
            found[_renamed(theirs, getattr(model, "weight_names", {}))] = file, theirs
    return found


def _files(path: Path) -> dict[Path, list[str] | None]:
    """The safetensors files at `path`, each with the names to take from it (None: all)."""
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path} is a pickle, which can run code when it is read: {_CONVERT}")
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if (path / SHARDS).is_file():
        return _shards(path)
    if (path / FILE).is_file():
        return {path / FILE: None}
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(f"{path} has {', '.join(pickles)} only, which can run code when read: {_CONVERT}")
    raise CheckpointError(f"{path} holds neither {FILE} nor {SHARDS}")


_CONVERT = f"convert it to safetensors (model.save_pretrained(FOLDER), or safetensors.torch.save_file), as {FILE}"


def _shards(path: Path) -> dict[Path, list[str] | None]:
    try:
        places = json.loads((path / SHARDS).read_text())["weight_map"].items()
        found: dict[Path, list[str] | None] = {}
        for name, file in places:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{path / SHARDS} names {file!r}, which is no safetensors file of its folder")
            names = found.setdefault(path / file, [])
            assert names is not None
            names.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / SHARDS} is damaged ({error!r})") from error
    return found


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors ({error})") from error


def _renamed(name: str, patterns: Mapping[str, str]) -> str:
    """The model's name for `name`: each `*` of a pattern stands for any text, and is put into the new name in order."""
    for pattern, new in patterns.items():
        expression = "(.*)".join(re.escape(part) for part in pattern.split("*"))
        if match := re.fullmatch(expression, name):
            for text in match.groups():
                new = new.replace("*", text, 1)
            return new
    return name


def _check_names(shapes: Mapping[str, tuple[int, ...]], model: nn.Module, where: str) -> None:
    """Raise `CheckpointError` with every name that is missing, unknown, or of another shape."""
    own = model.state_dict(keep_vars=True)
    groups: dict[int, list[str]] = {}
    for name, tensor in own.items():
        groups.setdefault(id(tensor), []).append(name)
    # one name of a tied weight is enough
    missing = [n for n, t in own.items() if not any(other in shapes for other in groups[id(t)])]
    wrong = [f"{name} {list(own[name].shape)} is not in it" for name in missing]
    wrong += [f"{name} {list(shape)} is not in the model" for name, shape in shapes.items() if name not in own]
    wrong += [
        f"{name} has shape {list(shape)}, the model's is {list(own[name].shape)}"
        for name, shape in shapes.items()
        if name in own and tuple(own[name].shape) != shape
    ]
    if wrong:
        raise CheckpointError(f"{where} holds another model's weights: {_listed(wrong, '; ')}")


def _listed(items: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - _MANY} more" if len(items) > _MANY else ""
    return separator.join(items[:_MANY]) + more
