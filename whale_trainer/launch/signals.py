"""Signals and time limits of a rank, and of the launcher that waits for ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

GRACE_S = 6.0
"""What a rank may still do after a signal or an error: close its tracking, its loaders, its files."""

_PR_SET_PDEATHSIG = 1


def end_soon(seconds: float, code: int) -> None:
    """End this process with `code` after `seconds`, whatever its threads do."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def end_with_parent() -> None:
    """End this process when the one that started it is gone."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    if os.getppid() == 1:  # it was gone before the kernel knew of our wish
        os._exit(1)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def exit_on_signals() -> None:
    """SIGINT and SIGTERM raise `SystemExit` in the main thread; `GRACE_S` later the process ends in any case."""
    _watch_signals()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _exit)
    for signum in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)


def _exit(signum: int, _: FrameType | None) -> None:
    _restore_defaults()  # a second signal ends the process at once
    raise SystemExit(128 + signum)


def _restore_defaults() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)


@cache
def _watch_signals() -> None:
    """Have a thread hear of each signal.

    Python runs handlers in the main thread only, which may be waiting in a collective. The byte that Python's C part
    writes for each signal comes through at once.
    """
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget_watch)
    threading.Thread(target=_end_after_signal, args=(heard,), daemon=True).start()


def _end_after_signal(heard: int) -> None:
    while byte := os.read(heard, 1):
        if byte[0] in (signal.SIGINT, signal.SIGTERM):
            end_soon(GRACE_S, 128 + byte[0])


def _forget_watch() -> None:
    """A loader's worker shares the pipe; its signals are not those of the rank."""
    signal.set_wakeup_fd(-1)
    _restore_defaults()


def interrupt_code(error: BaseException) -> int | None:
    """128 + the signal that ended the rank; None where it failed by itself, if only while a signal came."""
    code = None
    link: BaseException | None = error
    while isinstance(link, (SystemExit, KeyboardInterrupt)):
        if isinstance(link, KeyboardInterrupt):
            code = 128 + signal.SIGINT
        elif link.code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            code = int(link.code)
        link = link.__context__
    return code if link is None else None


@contextmanager
def interruptible(kill_ranks: Callable[[], None]) -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into torchelastic's exception, which ends the ranks in order.

    A second one calls `kill_ranks`. Handlers are those of before again afterwards. Does nothing off the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    num_heard = 0

    def handle(signum: int, _: FrameType | None) -> None:
        nonlocal num_heard
        num_heard += 1
        if num_heard > 1:
            kill_ranks()
            return
        raise SignalException(f"got {signal.Signals(signum).name}", sigval=signal.Signals(signum))

    before = {signum: signal.signal(signum, handle) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
