"""From the composed YAML to a frozen `Config`: sections, rules, and targets held against their signatures."""

from __future__ import annotations

from whale_trainer.config.load import Config as Config
from whale_trainer.config.load import DataConfig as DataConfig
from whale_trainer.config.load import load_config as load_config
from whale_trainer.config.sections import CheckpointConfig as CheckpointConfig
from whale_trainer.config.sections import LoggerConfig as LoggerConfig
from whale_trainer.config.sections import TrainerConfig as TrainerConfig
from whale_trainer.config.target import Target as Target
