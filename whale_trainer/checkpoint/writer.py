"""Checkpoints: an index in JSON and tensors in safetensors, written by all ranks, readable under any plan.

    checkpoints/step-000020/
      index.json            schema version, the run's state, and where each part of each tensor lies
      rank0.safetensors     the parts that rank 0 owns; one file for each rank that owns any

Tensors carry the names of the user's model. A folder is written beside its place and renamed when it is whole, so that
a run killed while saving leaves the checkpoints before it. Nothing is pickled: reading a checkpoint cannot run code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whale_trainer.checkpoint.reader import (
    INDEX,
    MODEL,
    SCHEMA_VERSION,
    Box,
    Cut,
    box_of,
    show_box,
    sizes,
)
from whale_trainer.checkpoint.state import encode
from whale_trainer.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """A part of a logical tensor that one rank owns, that is, writes for all its holders."""

    name: str
    """Name of the parameter or buffer in the user's model."""
    tensor: Tensor
    cut: Cut = None
    key: str = MODEL

    def box(self, shapes: Mapping[str, Sequence[int]]) -> tuple[tuple[int, ...], Box]:
        """Full shape of the tensor, and this piece's place in it. An uncut piece has the shape of its tensor."""
        shape = tuple(self.tensor.shape) if self.cut is None else tuple(shapes[self.name])
        return shape, box_of(shape, self.cut)


def write_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    pieces: Iterable[Piece],
    shapes: Mapping[str, Sequence[int]],
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], object] = lambda: None,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Write the folder `path`; every rank calls this with the pieces it owns, rank 0's `state` is kept.

    `shapes` names every tensor that must be whole under the key `model`; `aliases` gives further names of tied ones.
    Raises `CheckpointError`, and leaves whatever was at `path` before, when anything is missing or cannot be written.
    """
    path = Path(path)
    beside = path.with_name(path.name + ".tmp")
    try:
        encoded = encode(dict(state)) if rank == 0 else None
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        barrier()
        _write_pieces(beside / f"rank{rank}.safetensors", pieces, shapes)
        barrier()
        if rank == 0:
            index = _make_index(beside, shapes, world_size)
            index |= {"aliases": dict(aliases or {}), "global_step": state.get("global_step", 0), "state": encoded}
            _write_index(beside, index)
            _put_in_place(beside, path)
        barrier()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} could not be written by rank {rank} ({error}): free some space or choose another hydra.run.dir; "
            "checkpoints saved before it are untouched"
        ) from error


def _write_pieces(file: Path, pieces: Iterable[Piece], shapes: Mapping[str, Sequence[int]]) -> None:
    tensors: dict[str, Tensor] = {}
    entries = []
    for piece in pieces:
        shape, box = piece.box(shapes)
        if sizes(box) != tuple(piece.tensor.shape):
            part = f"a part of shape {list(piece.tensor.shape)}"
            raise CheckpointError(f"{piece.key} {piece.name}: {part} does not fit {show_box(box)} of {list(shape)}")
        entry = f"{piece.key}:{piece.name}[{show_box(box)}]"
        # a part is often a view into a larger tensor; the file must hold the part only
        tensors[entry] = piece.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        entries.append({"key": piece.key, "name": piece.name, "shape": shape, "box": box, "entry": entry})
    if not tensors:
        return
    save_file(tensors, file, metadata={"pieces": json.dumps(entries)})
    _sync(file)


def _make_index(folder: Path, shapes: Mapping[str, Sequence[int]], world_size: int) -> dict[str, Any]:
    files: dict[str, int] = {}
    tensors: dict[str, dict[str, Any]] = {MODEL: {}}
    for file in sorted(folder.glob("rank*.safetensors")):
        files[file.name] = file.stat().st_size
        with safe_open(file, framework="pt") as handle:
            entries = json.loads(handle.metadata()["pieces"])
        for e in entries:
            tensor = tensors.setdefault(e["key"], {}).setdefault(e["name"], {"shape": e["shape"], "pieces": []})
            tensor["pieces"].append({"file": file.name, "entry": e["entry"], "box": e["box"]})
    _check_whole(folder, tensors, shapes, world_size)
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": world_size,
        "files": files,
        "tensors": tensors,
    }


def _check_whole(
    folder: Path, tensors: dict[str, dict[str, Any]], shapes: Mapping[str, Sequence[int]], world_size: int
) -> None:
    wrong = [f"{MODEL} {name} (nobody wrote it)" for name in shapes if name not in tensors[MODEL]]
    for key, by_name in tensors.items():
        for name, tensor in by_name.items():
            found = sum(prod(b - a for a, b in piece["box"]) for piece in tensor["pieces"])
            if found != prod(tensor["shape"]):
                wrong.append(f"{key} {name} ({found} of {prod(tensor['shape'])} elements)")
            elif key == MODEL and list(shapes.get(name, tensor["shape"])) != tensor["shape"]:
                wrong.append(f"{key} {name} (shape {tensor['shape']} for {list(shapes[name])})")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"{folder.with_suffix('')} would not be whole: {', '.join(wrong[:5])}{more}. "
            f"All {world_size} ranks must write into one folder: on several nodes put hydra.run.dir on a shared disk"
        )


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    file = folder / INDEX
    file.write_text(json.dumps(index, allow_nan=False))
    _sync(file)
    _sync(folder)


def _put_in_place(beside: Path, path: Path) -> None:
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    beside.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint so that it is gone at once: half of one is never taken for a whole one."""
    path = Path(path)
    if not path.exists():
        return
    doomed = path.with_name(path.name + ".tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    """Have the disk hold what was written, so that a rename never overtakes the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
