"""Starting one process per planned device, by ourselves or under torchrun, and ending all of them together."""

from __future__ import annotations

from whale_trainer.launch.job import Entry as Entry
from whale_trainer.launch.local import launch as launch
from whale_trainer.launch.torchrun import join_torchrun as join_torchrun
from whale_trainer.launch.torchrun import release_torchrun as release_torchrun
from whale_trainer.launch.torchrun import torchrun_rank as torchrun_rank
