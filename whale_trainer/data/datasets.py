"""Text as bytes: windows of one long text, for models that predict the next byte.

A byte is a token, so there is no vocabulary to learn or to ship. Items are {"tokens": [T], "targets": [T]} of int64,
the targets being the tokens one place further on.
"""

from __future__ import annotations

import glob
import os
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from whale_trainer.errors import ConfigError, Problem

VOCAB_SIZE = 256
_SPLITS = ("train", "validation")


class TextWindows(Dataset[dict[str, Tensor]]):
    """Windows of `context` bytes of one split of `text`: its end validates, the rest trains.

    Validation windows do not overlap, so that each byte counts once. Training windows overlap by an eighth, so that
    the bytes at the start of one also stand behind a context.
    """

    deterministic = True
    """Reading draws no random numbers."""

    def __init__(self, text: bytes, context: int, split: str, validation_fraction: float, path: str) -> None:
        _check(context, split, validation_fraction)
        self.context = context
        end = len(text) - int(len(text) * validation_fraction)
        part = text[:end] if split == "train" else text[end:]
        self._bytes = torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0)
        self._stride = context if split == "validation" else max(1, context - context // 8)
        if len(self) < 1:
            raise ConfigError(
                [
                    Problem(
                        path,
                        f"{len(text):,} bytes leave {len(part):,} for split {split}, but one window takes "
                        f"{context + 1:,} (context + 1): give more text, a smaller context, or another "
                        "validation_fraction",
                    )
                ]
            )

    def __len__(self) -> int:
        return max(0, (len(self._bytes) - 1 - self.context) // self._stride + 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self._stride
        window = self._bytes[start : start + self.context + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


class PydocText(TextWindows):
    """Bytes of Python's own manual pages, which every CPython holds: about 466 KB of English."""

    def __init__(self, context: int, split: str = "train", validation_fraction: float = 0.1) -> None:
        super().__init__(pydoc_text(), context, split, validation_fraction, "data")


class TextFiles(TextWindows):
    """Bytes of the user's own files: `path` is a file, a folder (all files in it), or a pattern such as notes/**/*.md.

    A relative path counts from the folder in which the command was started. Files are joined in the order of their
    names. Raises `ConfigError` at `data.path` for what is missing, unreadable or too short.
    """

    def __init__(self, path: str, context: int, split: str = "train", validation_fraction: float = 0.1) -> None:
        text = b"\n".join(_read(file) for file in text_files(path))
        super().__init__(text, context, split, validation_fraction, "data.path")


def pydoc_text() -> bytes:
    """All topics of CPython's manual, in the order of their names."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def text_files(path: str) -> list[Path]:
    """The files that `path` means, sorted; hidden ones only where it names them. Raises `ConfigError`."""
    found = Path(os.path.expanduser(path))
    if found.is_dir():
        inside = (Path(folder) / name for folder, _, names in os.walk(found) for name in names)
        files = [f for f in inside if not any(p.startswith(".") for p in f.relative_to(found).parts)]
        lacking = "is a folder without files: put text there, or name a file"
    else:
        # a name that exists is not a pattern, whatever signs are in it
        names = [str(found)] if found.exists() else glob.glob(str(found), recursive=True)
        files = [Path(name) for name in names if Path(name).is_file()]
        lacking = f"matches no file from {Path.cwd()}: give a file, a folder, or a pattern such as 'notes/**/*.md'"
    if not files:
        raise ConfigError([Problem("data.path", f"{path!r} {lacking}")])
    return sorted(files)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        message = f"'{file}' cannot be read ({error.strerror}): allow reading it, or name other files"
        raise ConfigError([Problem("data.path", message)]) from error


def _check(context: int, split: str, validation_fraction: float) -> None:
    problems = []
    if context < 1:
        problems.append(Problem("data.context", f"{context} is below 1: a window holds at least one token"))
    if split not in _SPLITS:
        problems.append(Problem("data.split", f"{split!r} is not one of {', '.join(_SPLITS)}"))
    if not 0 < validation_fraction < 1:
        problems.append(
            Problem("data.validation_fraction", f"{validation_fraction} is not between 0 and 1: 0.1 is usual")
        )
    if problems:
        raise ConfigError(problems)
