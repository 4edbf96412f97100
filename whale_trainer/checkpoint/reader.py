"""Reading checkpoints: any part of any tensor, however it was cut when it was saved.

What is read is checked first: a folder of another program, of another schema version, or with a file missing or short
is refused with its path and what is wrong. Reading cannot run code: the index is JSON, the tensors are safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whale_trainer.checkpoint.state import decode
from whale_trainer.errors import CheckpointError
from whale_trainer.planning.shares import Interval

SCHEMA_VERSION = 1
FOLDER = "checkpoints"
INDEX = "index.json"
MODEL = "model"
"""Key of the weights; optimizer moments have keys such as `optimizer.exp_avg`."""

Cut = tuple[int, Interval] | None
"""A part of a tensor: a dim and the elements along it, or None for the whole."""
Box = tuple[Interval, ...]
"""A part of a tensor by all its dims."""


def newest_checkpoint(run_dir: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint of most steps under `run_dir`, or None; half-written and damaged ones are passed over."""
    found = []
    for index in sorted(Path(run_dir, FOLDER).glob(f"*/{INDEX}")):
        if index.parent.suffix == ".tmp":
            continue
        try:
            step = read_checkpoint(index.parent).global_step
        except CheckpointError:
            continue
        found.append((step, index.stat().st_mtime_ns, index.parent))
    return max(found)[-1] if found else None


def load_full(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All weights as one plain state dict, which the user's own model loads with `strict=True`."""
    with read_checkpoint(path) as reader:
        weights = {name: reader.read(name) for name in reader.names()}
        return weights | {alias: weights[name] for alias, name in reader.aliases.items()}


def read_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open a checkpoint; raises `CheckpointError` unless the folder is ours, whole, and of this schema version."""
    path = Path(path)
    file = path / INDEX
    if path.is_file():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder with {INDEX} (pickles are not read)")
    try:
        index = json.loads(file.read_text())
    except FileNotFoundError:
        what = "does not exist"
        if path.is_dir():
            what = f"has no {INDEX}: it is not a checkpoint, or was not written to its end"
        raise CheckpointError(f"{path} {what}{_others(path)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}){_others(path)}") from error
    version = index.get("schema_version") if isinstance(index, dict) else None
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{file} has schema version {version!r}, this release reads {SCHEMA_VERSION}")
    try:
        for name, size in index["files"].items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise CheckpointError(f"{path} is damaged: {name} {what}{_others(path)}")
        return CheckpointReader(path, index)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged ({error!r}){_others(path)}") from error


def _others(path: Path) -> str:
    folders = (index.parent for index in path.parent.glob(f"*/{INDEX}"))
    names = sorted(folder.name for folder in folders if folder != path and folder.suffix != ".tmp")
    return f"; beside it lie {', '.join(names[-3:])}" if names else ""


class CheckpointReader:
    """An open checkpoint: its state, and any part of any tensor in it."""

    def __init__(self, path: Path, index: Mapping[str, Any]) -> None:
        self.path = path
        self.aliases: dict[str, str] = index["aliases"]
        self.global_step: int = index["global_step"]
        self._state = index["state"]
        self._tensors: dict[str, dict[str, Any]] = index["tensors"]
        self._handles: dict[str, Any] = {}

    @cached_property
    def state(self) -> dict[str, Any]:
        """What rank 0 gave to `write_checkpoint`."""
        state: dict[str, Any] = decode(self._state)
        return state

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; reading opens them again."""
        self._handles.clear()

    @property
    def keys(self) -> tuple[str, ...]:
        """`model` and the optimizer's keys."""
        return tuple(self._tensors)

    def names(self, key: str = MODEL) -> tuple[str, ...]:
        """Names of the tensors saved under `key`."""
        return tuple(self._tensors.get(key, ()))

    def shape(self, name: str, key: str = MODEL) -> tuple[int, ...]:
        """Full shape of a saved tensor."""
        return tuple(self._entry(name, key)["shape"])

    def check_matches(self, shapes: Mapping[str, Sequence[int]], key: str = MODEL) -> None:
        """Raise `CheckpointError` with every name that is missing here, unknown to the model, or of another shape."""
        saved = self._tensors.get(key, {})
        wrong = [f"{name} {list(shape)} is not in it" for name, shape in shapes.items() if name not in saved]
        wrong += [f"{name} {saved[name]['shape']} is not in the model" for name in saved if name not in shapes]
        wrong += [
            f"{name} has shape {saved[name]['shape']}, the model's is {list(shape)}"
            for name, shape in shapes.items()
            if name in saved and saved[name]["shape"] != list(shape)
        ]
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(f"{self.path} was saved from another model: {'; '.join(wrong[:5])}{more}")

    def read(
        self,
        name: str,
        cut: Cut = None,
        *,
        key: str = MODEL,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        out: Tensor | None = None,
    ) -> Tensor:
        """The part `cut` of a tensor (the whole by default), put together from the parts that were saved.

        Only what is wanted of each file is read, straight into the result, which is `out` where it is given.
        """
        saved = self._entry(name, key)
        what = f"{self.path}: {key} {name}"
        wanted = box_of(saved["shape"], cut)
        if any(not Interval(0, size).contains(part) for size, part in zip(saved["shape"], wanted, strict=True)):
            raise CheckpointError(f"{what} has shape {saved['shape']}, which has no part {show_box(wanted)}")
        result = out
        filled = 0
        for piece in saved["pieces"]:
            box = tuple(Interval(*b) for b in piece["box"])
            common = tuple(a.intersect(b) for a, b in zip(wanted, box, strict=True))
            if is_empty(common) and not is_empty(wanted):
                continue
            part = self._read_part(piece, _relative(common, box))
            if result is None:
                result = torch.empty(sizes(wanted), dtype=dtype or part.dtype, device=device)
            result[_relative(common, wanted)].copy_(part)
            filled += part.numel()
        if result is None or filled != result.numel():
            raise CheckpointError(f"{what} is not whole: {filled} elements of {show_box(wanted)} were found")
        return result

    def _entry(self, name: str, key: str) -> dict[str, Any]:
        entry: dict[str, Any] | None = self._tensors.get(key, {}).get(self.aliases.get(name, name))
        if entry is None:
            raise CheckpointError(f"{self.path} holds no {key} {name}: it was saved from another model or optimizer")
        return entry

    def _read_part(self, piece: Mapping[str, Any], where: tuple[slice, ...]) -> Tensor:
        file = piece["file"]
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(self.path / file, framework="pt")
            handle = self._handles[file]
            part: Tensor = handle.get_slice(piece["entry"])[where] if where else handle.get_tensor(piece["entry"])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / file} is damaged at {piece['entry']} ({error})") from error
        return part


def box_of(shape: Sequence[int], cut: Cut) -> Box:
    """The part `cut` of a tensor of this shape, by all its dims."""
    return tuple(cut[1] if cut is not None and cut[0] == dim else Interval(0, size) for dim, size in enumerate(shape))


def sizes(box: Box) -> tuple[int, ...]:
    """Shape of a part."""
    return tuple(i.stop - i.start for i in box)


def is_empty(box: Box) -> bool:
    return any(i.stop <= i.start for i in box)


def show_box(box: Box) -> str:
    """A part as users read it: `0:384,0:768`."""
    return ",".join(f"{i.start}:{i.stop}" for i in box)


def _relative(part: Box, origin: Box) -> tuple[slice, ...]:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, origin, strict=True))
