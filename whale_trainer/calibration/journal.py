"""What a measuring process found so far, line by line in a file, so that its end loses nothing.

Each trial is noted before it starts: one that took its process down with it is found out, and not tried again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Journal:
    """Trials by name, each with what it gave: figures, or `{"failed": reason}`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, dict[str, Any]] = {}
        self._begun: str | None = None
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            self._read(line)
        if text and not text.endswith("\n"):
            with path.open("a") as file:
                file.write("\n")

    def _read(self, line: str) -> None:
        try:
            name, result = json.loads(line)
        except ValueError:  # cut off in the midst of writing
            return
        if result is None:
            self._begun = name
        else:
            self.found[name] = result
            self._begun = None

    @property
    def unfinished(self) -> str | None:
        """The trial that was begun and has no result."""
        return self._begun

    def begin(self, name: str) -> None:
        """Note that the trial is about to start."""
        self._begun = name
        self._write(name, None)

    def end(self, name: str, result: dict[str, Any]) -> None:
        """Note what the trial gave."""
        self.found[name] = result
        self._begun = None
        self._write(name, result)

    def _write(self, name: str, result: dict[str, Any] | None) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([name, result]) + "\n")
