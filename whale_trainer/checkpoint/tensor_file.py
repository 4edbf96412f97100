"""Writing tensors in the safetensors format straight from their memory: nothing is copied that lies in order on a CPU.

8 bytes  length of the header, little-endian
header   JSON: name -> dtype, shape, place of the data; padded with spaces
data     one tensor after the other
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whale_trainer.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""Safetensors' names of torch's dtypes."""

_ALIGNMENT = 8


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> int:
    """Write `file` and have the disk hold it; its size in bytes. Raises `OSError`, `CheckpointError`."""
    # wide elements first, so that each tensor begins at a multiple of its element's size
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header = _header(tensors, order, metadata)
    size = len(header) + sum(tensors[name].nbytes for name in order)
    with file.open("wb", buffering=0) as out:
        _write(out, header)
        for name in order:
            _write(out, bytes_of(tensors[name]))
        os.fsync(out.fileno())
        if (found := os.fstat(out.fileno()).st_size) != size:
            raise CheckpointError(f"{file} has {found} bytes after {size} were written")
    return size


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a tensor in order; a copy only where they lie on a GPU or out of order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _header(tensors: Mapping[str, Tensor], order: list[str], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name} is of {tensor.dtype}, which safetensors files cannot hold")
        stop = offset + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write(out: Any, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[out.write(view) :]  # one call of the system takes 2 GiB at most
