"""Saving in the background: training goes on while a thread of each rank writes what was copied to host memory.

A checkpoint is whole or absent as in the foreground: the threads agree over a process group of their own, so that
nothing comes between the collectives of training, and rank 0 renames the folder once all have written. One save is in
flight at most. An error waits for the next step, the next save, or the end.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from whale_trainer.checkpoint.snapshot import Snapshot
from whale_trainer.checkpoint.state import decode, encode
from whale_trainer.checkpoint.writer import Exchange, Piece, remove_checkpoint


class BackgroundWriter:
    """Writes one snapshot at a time; all ranks start the same ones in the same order."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._copies: dict[tuple[str, str, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_writing = False
        self._doomed: list[Path] = []

    def start(self, snapshot: Snapshot) -> None:
        """Copy the snapshot and return; it is written from now on. Waits for the one before, and raises its error."""
        self.wait()
        state = decode(encode(snapshot.state)) if snapshot.rank == 0 else snapshot.state
        copied = replace(snapshot, pieces=tuple(map(self._copy, snapshot.pieces)), state=state)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._is_writing = True
        self._thread = threading.Thread(target=self._write, args=(copied,), daemon=True, name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a save that failed since the last look; waits for nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is in flight any more. Raises the `CheckpointError` of a save that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, after the save in flight is whole: until then the older one is needed."""
        with self._lock:
            if self._is_writing:
                self._doomed.append(path)
                return
        remove_checkpoint(path)

    def _copy(self, piece: Piece) -> Piece:
        """The piece in host memory of ours, which is taken again for the next save."""
        key = (piece.key, piece.name, str(piece.cut))
        tensor, former = piece.tensor, self._copies.get(key)
        if former is None or former.shape != tensor.shape or former.dtype != tensor.dtype:
            former = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[key] = former
        former.copy_(tensor.detach(), non_blocking=True)
        return replace(piece, tensor=former)

    def _write(self, snapshot: Snapshot) -> None:
        try:
            snapshot.write(self._exchange)
        except BaseException as error:  # whatever it is, the training thread raises it
            self._error = error
        with self._lock:
            self._is_writing = False
            doomed, self._doomed = self._doomed, []
        if self._error is not None:
            return
        try:
            for path in doomed:
                remove_checkpoint(path)
        except OSError as error:
            self._error = error
