"""Checkpoints that any plan can read: JSON and safetensors, written by all ranks, whole or absent."""

from __future__ import annotations

from whale_trainer.checkpoint.plain_weights import check_weights as check_weights
from whale_trainer.checkpoint.plain_weights import export_weights as export_weights
from whale_trainer.checkpoint.plain_weights import load_weights_from as load_weights_from
from whale_trainer.checkpoint.reader import CheckpointReader as CheckpointReader
from whale_trainer.checkpoint.reader import load_full as load_full
from whale_trainer.checkpoint.reader import newest_checkpoint as newest_checkpoint
from whale_trainer.checkpoint.reader import read_checkpoint as read_checkpoint
from whale_trainer.checkpoint.writer import Exchange as Exchange
from whale_trainer.checkpoint.writer import Piece as Piece
from whale_trainer.checkpoint.writer import alone as alone
from whale_trainer.checkpoint.writer import remove_checkpoint as remove_checkpoint
from whale_trainer.checkpoint.writer import write_checkpoint as write_checkpoint
