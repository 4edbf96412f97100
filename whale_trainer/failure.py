"""What went wrong first in a job of several ranks, and how it is told.

When a rank dies, its peers lose their connections and fail too. Here an exception becomes a `Failure` that knows
whether it is the cause or such a consequence; `first_failure` picks the one to show. No processes, no torch.
"""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from whale_trainer.errors import ConfigError, PlanError, WhaleError

_LOST_PEER = re.compile(
    r"gloo/transport|Gloo connectFullMesh|Connection (closed|reset|refused)|Broken pipe|Socket closed"
    r"|Application timeout caused pair closure|NCCL (error|communicator)|nccl(Remote|System)Error"
)
_NETWORK_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_MAX_LINES = 12
"""Longer messages are cut in the middle; the whole text stands in the rank's log."""


@dataclass(frozen=True)
class Failure:
    """The end of one rank's part in a job, as plain data."""

    rank: int
    text: str
    at: float
    is_refusal: bool = False
    """The config or the plan is at fault, on every rank alike."""
    is_consequence: bool = False
    """The rank only lost its connection to another one."""
    log: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        return cls(**json.loads(text))


def describe_failure(rank: int, error: BaseException, run_dir: Path) -> Failure:
    """The failure of `rank`; its whole traceback goes to `rank<r>.err` in the run folder."""
    error = cause_of(error)
    return Failure(
        rank=rank,
        text=short_text(error),
        at=time.time(),
        is_refusal=isinstance(error, (ConfigError, PlanError)),
        is_consequence=is_lost_peer(error),
        log=_write_log(run_dir / f"rank{rank}.err", error),
    )


def cause_of(error: BaseException) -> BaseException:
    """What was being handled when a signal ended the rank, if anything was; else `error` itself."""
    inner = error
    while isinstance(inner, (SystemExit, KeyboardInterrupt)) and inner.__context__ is not None:
        inner = inner.__context__
    return inner if isinstance(inner, Exception) else error


def is_lost_peer(error: BaseException) -> bool:
    """True when the error, or one that it came from, is a broken connection to another rank."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if type(link).__name__ in _NETWORK_ERRORS or (isinstance(link, RuntimeError) and _LOST_PEER.search(str(link))):
            return True
        link = link.__cause__ or link.__context__
    return False


def short_text(error: BaseException) -> str:
    """Kind, message and place of an exception in a few lines; the place only where it is not our own refusal."""
    lines = f"{type(error).__name__}: {error}".rstrip().splitlines()
    if len(lines) > _MAX_LINES:
        lines = [*lines[:3], "  ...", *lines[-(_MAX_LINES - 4) :]]
    if not isinstance(error, WhaleError) and (place := _place(error)):
        lines.append(f"  at {place}")
    return "\n".join(lines)


def _place(error: BaseException) -> str:
    """The innermost line outside installed libraries; the innermost of all where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "/lib/python" not in f.filename]
    for frame in reversed(own or list(frames)):
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def _write_log(path: Path, error: BaseException) -> str:
    """Path of the log, or nothing where it cannot be written (a full disk must not hide the error itself)."""
    try:
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        return ""
    return str(path)


def failure_text(failure: Failure, device: str) -> str:
    """What the user reads of it, once in a job: which rank, on which device, what, and where the rest stands."""
    if failure.is_refusal:
        return f"{failure.text}\n"
    hint = (
        "\n  No other rank failed: one did not come within timeout_s, or the network broke."
        if failure.is_consequence
        else ""
    )
    log = f"\n  The whole traceback is in {failure.log}" if failure.log else ""
    return f"rank {failure.rank} ({device}) failed: {failure.text}{hint}{log}\n"


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The one that came first; consequences only when there is nothing else."""
    return min(failures, key=lambda f: (f.is_consequence, f.at), default=None)


def death_text(exit_code: int) -> str:
    """How a process ended that left no exception."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and no exception: something in it called os._exit or the like"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hints = {
        "SIGKILL": ": somebody killed it, or the machine ran out of memory (dmesg tells)",
        "SIGSEGV": ": a crash in native code; its stack is above",
        "SIGABRT": ": a crash in native code; its stack is above",
        "SIGBUS": ": a crash in native code, or no space left in /dev/shm",
    }
    return f"was killed by {name}{hints.get(name, '')}"


_reporter: Callable[[BaseException], None] | None = None


def report_errors_to(reporter: Callable[[BaseException], None] | None) -> None:
    """Name who hears of this process's errors; the launcher does so in each rank."""
    global _reporter
    _reporter = reporter


def report(error: BaseException) -> None:
    """Tell the launcher of an error as soon as it is known, before any clean-up that might block.

    Does nothing in a process that was not launched as a rank. May be called again with the same error.
    """
    if _reporter is not None:
        _reporter(error)
