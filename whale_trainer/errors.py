"""The errors that users meet. Each message says where in the YAML, what was found, and what to do.

`ConfigError` and `PlanError` end a command before any process starts (exit code 2); `RankError` and `CheckpointError`
end a running job (exit code 1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class WhaleError(Exception):
    """Base of all errors that this package raises for its users."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: a YAML path such as `cluster.nodes[1].devices`, and the remedy in words."""

    path: str
    message: str


class ConfigError(WhaleError, ValueError):
    """The configuration is wrong; holds every problem found, not the first only."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self._text())

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)

    def _text(self) -> str:
        count = len(self.problems)
        title = "1 problem in the config" if count == 1 else f"{count} problems in the config"
        width = max((len(p.path) for p in self.problems), default=0)
        return "\n".join([title, *(f"  {p.path:<{width}}  {p.message}" for p in self.problems)])


class PlanError(WhaleError, ValueError):
    """No plan can do what was asked on this cluster; the message holds the numbers of both sides."""


class RankError(WhaleError, RuntimeError):
    """A rank cannot go on; the message says which, at which action, and why."""


class CheckpointError(WhaleError, RuntimeError):
    """A checkpoint cannot be written or read; the message names the path and what is wrong with it."""
