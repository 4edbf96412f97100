"""metrics.csv: a row for each optimizer step done, on disk before the step's checkpoint is.

A row may be completed later (by a validation after its step). Columns may come later: the file is then rewritten beside
its place. After a resume the rows beyond the resumed step are dropped, so that each step has one row.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from whale_trainer.errors import RankError

Value = int | float | str | None


class MetricsFile:
    """Writer of one metrics.csv; `columns` come first, in this order."""

    def __init__(self, path: str | os.PathLike[str], columns: Iterable[str]) -> None:
        self.path = Path(path)
        self._columns = ["step", *(c for c in columns if c != "step")]
        self._last: dict[str, str] | None = None
        self._last_offset = 0

    def start(self, after_step: int = 0) -> None:
        """Begin the file, keeping the whole rows of a former run up to `after_step`."""
        rows = [row for row in self._read() if int(row["step"]) <= after_step]
        for row in rows:
            self._columns += [c for c in row if c not in self._columns]
        self._rewrite(rows)

    def write(self, row: Mapping[str, Value]) -> None:
        """Add the row of a step, or complete it when it is that of the last row. What is written is on disk."""
        texts = {name: _text(value) for name, value in row.items()}
        if self._last is not None and texts["step"] == self._last["step"]:
            texts = self._last | texts
        try:
            if any(name not in self._columns for name in texts):
                self._widen(texts)
            self._put(texts)
        except OSError as error:
            raise RankError(
                f"{self.path} cannot be written ({error}): free some space; the last checkpoint is whole"
            ) from error

    def _put(self, texts: dict[str, str]) -> None:
        data = self._line([texts.get(name, "") for name in self._columns])
        with self.path.open("r+b", buffering=0) as file:
            is_new = self._last is None or texts["step"] != self._last["step"]
            offset = file.seek(0, os.SEEK_END) if is_new else self._last_offset
            # one call for the whole row: a run killed here leaves the row before it, or this one
            os.pwrite(file.fileno(), data, offset)
            file.truncate(offset + len(data))
        self._last, self._last_offset = texts, offset

    def _widen(self, texts: Mapping[str, str]) -> None:
        rows = self._read()
        self._columns += [name for name in texts if name not in self._columns]
        self._rewrite(rows)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        lines = [self._line([row.get(name, "") for name in self._columns]) for row in rows]
        beside = self.path.with_name(self.path.name + ".tmp")
        beside.write_bytes(b"".join([self._line(self._columns), *lines]))
        beside.replace(self.path)
        self._last = rows[-1] if rows else None
        self._last_offset = self.path.stat().st_size - len(lines[-1]) if lines else 0

    def _read(self) -> list[dict[str, str]]:
        """The whole rows on disk; what a killed run left unfinished is passed over."""
        if not self.path.is_file():
            return []
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]
        reader = csv.reader(io.StringIO(whole))
        names = next(reader, [])
        rows = [dict(zip(names, values, strict=True)) for values in reader if len(values) == len(names)]
        return [row for row in rows if row.get("step", "").isdigit()]

    @staticmethod
    def _line(values: Iterable[str]) -> bytes:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerow(values)
        return buffer.getvalue().encode()


def _text(value: Value) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)
