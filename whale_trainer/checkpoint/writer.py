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
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

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
from whale_trainer.checkpoint.tensor_file import write_tensors
from whale_trainer.errors import CheckpointError

Exchange = Callable[[Any], list[Any]]
"""Gives every rank what each rank gave, by rank; all ranks call it."""

_T = TypeVar("_T")
_INDEX_BYTES = 1 << 20
"""What is set aside for the index and the headers when free space is looked at."""


def alone(value: Any) -> list[Any]:
    """The exchange of a single rank."""
    return [value]


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
    exchange: Exchange = alone,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Write the folder `path`; every rank calls this with the pieces it owns, rank 0's `state` is kept.

    `shapes` names every tensor that must be whole under the key `model`; `aliases` gives further names of tied ones.
    Raises `CheckpointError`, the same on all ranks, and leaves whatever was at `path` before, when anything is missing
    or cannot be written on any rank.
    """
    path = Path(path)
    beside = path.with_name(path.name + ".tmp")
    pieces = list(pieces)
    more = {"aliases": dict(aliases or {}), "global_step": state.get("global_step", 0)}

    def begin() -> tuple[Any, int]:
        encoded = None
        if rank == 0:
            encoded = encode(dict(state))
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        return encoded, sum(piece.tensor.nbytes for piece in pieces)

    def write(num_bytes: int) -> tuple[list[dict[str, Any]], int]:
        _check_space(beside, num_bytes + _INDEX_BYTES)
        return _write_pieces(beside / file_of(rank), pieces, shapes)

    def end(written: list[tuple[list[dict[str, Any]], int]], encoded: Any) -> None:
        if rank == 0:
            _write_index(beside, _make_index(beside, written, shapes) | more | {"state": encoded})
            _put_in_place(beside, path)

    try:
        encoded, own_bytes = _together(path, rank, exchange, begin)[rank]
        total = sum(exchange(own_bytes))
        written = _together(path, rank, exchange, lambda: write(total))
        _together(path, rank, exchange, lambda: end(written, encoded))
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)  # half of a checkpoint is of no use, and fills the disk
        raise


def file_of(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank{rank}.safetensors"


def _together(path: Path, rank: int, exchange: Exchange, act: Callable[[], _T]) -> list[_T]:
    """What `act` gives on each rank. When it fails on one, all raise the same `CheckpointError`, and none waits."""
    problem, found = "", None
    try:
        found = act()
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = (
            f"{path} could not be written by rank {rank} ({error}): free some space or choose another hydra.run.dir; "
            "checkpoints saved before it are untouched"
        )
    answers = exchange((problem, found))
    for told, _ in answers:
        if told:
            raise CheckpointError(told)
    return [value for _, value in answers]


def _check_space(folder: Path, num_bytes: int) -> None:
    """Raises `OSError` when the disk has less free than all ranks together are about to write."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < num_bytes:
        raise OSError(f"{num_bytes / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")


def _write_pieces(
    file: Path, pieces: Sequence[Piece], shapes: Mapping[str, Sequence[int]]
) -> tuple[list[dict[str, Any]], int]:
    """Write the pieces of a rank: the place of each, for the index, and the size of the file (0: there is none)."""
    tensors: dict[str, Tensor] = {}
    entries = []
    for piece in pieces:
        shape, box = piece.box(shapes)
        if sizes(box) != tuple(piece.tensor.shape):
            part = f"a part of shape {list(piece.tensor.shape)}"
            raise CheckpointError(f"{piece.key} {piece.name}: {part} does not fit {show_box(box)} of {list(shape)}")
        entry = f"{piece.key}:{piece.name}[{show_box(box)}]"
        tensors[entry] = piece.tensor
        place = {"file": file.name, "entry": entry, "box": [[i.start, i.stop] for i in box]}
        entries.append({"key": piece.key, "name": piece.name, "shape": list(shape), "place": place})
    return entries, write_tensors(file, tensors) if tensors else 0


def _make_index(
    folder: Path, written: Sequence[tuple[list[dict[str, Any]], int]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    files = {file_of(rank): size for rank, (_, size) in enumerate(written) if size}
    tensors: dict[str, dict[str, Any]] = {MODEL: {}}
    for e in (e for entries, _ in written for e in entries):
        tensor = tensors.setdefault(e["key"], {}).setdefault(e["name"], {"shape": e["shape"], "pieces": []})
        tensor["pieces"].append(e["place"])
    lost = [name for name, size in files.items() if not _has_size(folder / name, size)]
    _check_whole(folder, tensors, shapes, lost, len(written))
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": len(written),
        "files": files,
        "tensors": tensors,
    }


def _has_size(file: Path, size: int) -> bool:
    with suppress(OSError):
        return file.stat().st_size == size
    return False


def _check_whole(
    folder: Path,
    tensors: dict[str, dict[str, Any]],
    shapes: Mapping[str, Sequence[int]],
    lost: Sequence[str],
    world_size: int,
) -> None:
    wrong = [f"{name} (not in this folder)" for name in lost]
    wrong += [f"{MODEL} {name} (nobody wrote it)" for name in shapes if name not in tensors[MODEL]]
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
