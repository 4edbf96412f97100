"""One rank's run under Lightning: module, callbacks, loggers, records, and `run_rank` that puts them together."""

from __future__ import annotations

from whale_trainer.trainer.run import find_checkpoint as find_checkpoint
from whale_trainer.trainer.run import run_rank as run_rank
