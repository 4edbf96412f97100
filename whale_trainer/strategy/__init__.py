"""The seam to Lightning: `WhaleStrategy`, its plugins, and what it refuses."""

from __future__ import annotations

from whale_trainer.strategy.whale import WhaleStrategy as WhaleStrategy
