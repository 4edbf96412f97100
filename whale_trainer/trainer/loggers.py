"""Where figures go besides metrics.csv: W&B, TensorBoard, or nowhere. One logger for a command, on rank 0 only.

W&B is offline unless the user is logged in, so no run needs an account or a network. It is imported when asked for.
"""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import DummyLogger
from typing_extensions import override

from whale_trainer.errors import ConfigError, Problem

_log = logging.getLogger(__name__)
KINDS = ("wandb", "csv", "tensorboard", "none")
_CONNECT_S = 30
"""Seconds that an online run waits for the server before it goes on offline."""


class RunLogger(WandbLogger):
    """Lightning's W&B logger around a run that was started by `start_wandb`; it never starts one itself."""

    @property
    @override
    def experiment(self) -> Any:
        return self._experiment


def make_logger(kind: str, run_dir: Path, *, rank: int, facts: Mapping[str, Any], options: Mapping[str, Any]) -> Logger:
    """The logger of this rank; on other ranks than 0, and for `csv` and `none`, one that does nothing.

    `facts` (config, plan, overrides) are what W&B shows as the run's config; `options` go to `wandb.init`.
    """
    if kind not in KINDS:
        raise ConfigError([Problem("logger", f"{kind!r} is not one of {', '.join(KINDS)}")])
    if rank != 0 or kind in ("csv", "none"):
        return DummyLogger()
    if kind == "wandb":
        return RunLogger(experiment=start_wandb(run_dir, facts, options), save_dir=str(run_dir))
    try:
        return TensorBoardLogger(save_dir=str(run_dir), name=None, version="tensorboard")
    except ModuleNotFoundError as error:
        text = "tensorboard is not installed: pip install tensorboard, or use logger=csv or logger=wandb"
        raise ConfigError([Problem("logger", text)]) from error


def start_wandb(run_dir: Path, facts: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The one W&B run of this command, in the run folder; restarts in one folder share a group, which links them."""
    import wandb

    mode: Any = os.environ.get("WANDB_MODE") or ("online" if is_logged_in() else "offline")
    arguments: dict[str, Any] = {
        "project": "whale_trainer",
        "name": run_dir.name,
        "group": "-".join(run_dir.absolute().parts[-2:]),
        **options,
        "dir": str(run_dir),
        "config": plain({k: v for k, v in facts.items() if k != "overrides"} | {"overrides": _resolved(facts)}),
        "settings": {"silent": True, "console": "off", "disable_git": True, "init_timeout": _CONNECT_S},
    }
    try:
        run = wandb.init(**arguments, mode=mode)
    except Exception as error:
        # whatever keeps W&B from its server, the training does not depend on it
        if mode != "online":
            raise
        _log.warning("W&B cannot be reached (%s): this run is kept offline in %s", error, run_dir)
        run = wandb.init(**arguments, mode="offline")
    # as Lightning's logger does for runs that it starts itself: every figure belongs to an optimizer step
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return run


def finish_logger(logger: Logger | None, exit_code: int) -> None:
    """End the W&B run, so that no helper process holds the command up."""
    if isinstance(logger, RunLogger):
        logger.experiment.finish(exit_code=exit_code)


def is_logged_in() -> bool:
    """Whether W&B has a key for its server, in the environment or in .netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


def plain(value: Any) -> Any:
    """`value` as dicts, lists, strings, numbers, booleans and None, at any depth."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _resolved(facts: Mapping[str, Any]) -> list[str]:
    """The overrides; those with an interpolation are left out, since the config holds their value."""
    return [text for text in facts.get("overrides", ()) if "${" not in text]
