"""What a target has to be in its place: a module, a data set, a callback, an optimizer, a schedule.

Optimizer and schedule are made once on an empty parameter, so that their own rules (no negative rate) are told before
any process starts. torch and Lightning are imported only where a target brought them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from whale_trainer.config.target import Target, check_target
from whale_trainer.errors import ConfigError, Problem

_OPTIMIZER = "torch.optim.AdamW"
_SCHEDULE = "whale_trainer.schedules.warmup_cosine"


def model_problems(target: Target) -> Iterator[Problem]:
    """A class has to be a torch module; a function may give one."""
    call = target.locate()
    if inspect.isclass(call) and not _is_subclass(call, "torch.nn", "Module"):
        yield _wrong(target, "no torch.nn.Module", "a class derived from torch.nn.Module, or a function that makes one")


def dataset_problems(target: Target) -> Iterator[Problem]:
    """A class has to be map-style, since each rank reads its rows of the global batch by their position."""
    call = target.locate()
    if not inspect.isclass(call):
        return
    lacking = [name for name in ("__getitem__", "__len__") if not hasattr(call, name)]
    if lacking or _is_subclass(call, "torch.utils.data", "IterableDataset"):
        found = f"a class without {' and '.join(lacking)}" if lacking else "an iterable-style data set"
        yield _wrong(target, found, "a map-style data set: each rank reads its rows by their position")


def callback_problems(target: Target) -> Iterator[Problem]:
    """A class has to be one of Lightning's callbacks."""
    call = target.locate()
    if inspect.isclass(call) and not _is_subclass(call, "pytorch_lightning.callbacks", "Callback"):
        yield _wrong(target, "no callback", "a class derived from pytorch_lightning.callbacks.Callback")


def optimizer_problems(target: Target) -> Iterator[Problem]:
    """The form of the numbers that all optimizers share, and that a class is an optimizer of torch's kind."""
    call = target.locate()
    if inspect.isclass(call) and not _is_subclass(call, "torch.optim", "Optimizer"):
        yield _wrong(target, "no torch optimizer", f"a class derived from torch.optim.Optimizer, such as {_OPTIMIZER}")
        return
    for name in ("lr", "weight_decay"):
        value = target.arguments.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value < float("inf"):
            yield Problem(f"{target.path}.{name}", f"{value!r} is not a finite number from 0")


def trial_problems(optimizer: Target, scheduler: Target | None, num_steps: int) -> Iterator[Problem]:
    """What the optimizer, and the schedule over it, say when they are made."""
    import torch

    # empty and on the CPU: nothing is computed before the ranks are forked
    parameter = torch.nn.Parameter(torch.empty(1, 1))
    try:
        made = optimizer.build(iter([("weight", parameter)]))
    except ConfigError as error:
        yield from error.problems
        return
    if not isinstance(made, torch.optim.Optimizer):
        remedy = f"a torch optimizer, such as {_OPTIMIZER}"
        yield _wrong(optimizer, f"{type(made).__name__}, no torch optimizer", remedy, gives=True)
    elif scheduler is not None:
        yield from _schedule_problems(scheduler, made, num_steps)


def _schedule_problems(target: Target, optimizer: Any, num_steps: int) -> Iterator[Problem]:
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    try:
        made = target.build_with(optimizer, offered={"num_steps": num_steps})
    except ConfigError as error:
        yield from error.problems
        return
    if isinstance(made, ReduceLROnPlateau):
        text = "waits for a metric, and schedules are stepped once for each optimizer step without one"
        yield Problem(f"{target.path}._target_", f"{target.target} {text}; use such as {_SCHEDULE}")
    elif not isinstance(made, LRScheduler):
        remedy = f"a torch schedule (LRScheduler), such as {_SCHEDULE}"
        yield _wrong(target, f"{type(made).__name__}, no schedule", remedy, gives=True)


def checked(
    target: Target, rules: Callable[[Target], Iterator[Problem]], *, given: int = 0, offered: tuple[str, ...] = ()
) -> list[Problem]:
    """The problems of name and arguments, and those of the place once the name is right."""
    problems = check_target(target, given=given, offered=offered)
    where = f"{target.path}._target_"
    return problems if any(p.path == where for p in problems) else [*rules(target), *problems]


def _is_subclass(call: type, module: str, name: str) -> bool:
    """Whether `call` derives from a class of torch or Lightning; without its module loaded nothing does."""
    return module in sys.modules and issubclass(call, getattr(sys.modules[module], name))


def _wrong(target: Target, found: str, allowed: str, *, gives: bool = False) -> Problem:
    verb = "gives" if gives else "is"
    return Problem(f"{target.path}._target_", f"{target.target} {verb} {found}; allowed: {allowed}")
