"""From an `nn.Module` to a `ModelSpec`, on the meta device: layers, costs, and what may be cut."""

from __future__ import annotations

from whale_trainer.describe.layers import can_be_cut as can_be_cut
from whale_trainer.describe.layers import first_inputs as first_inputs
from whale_trainer.describe.layers import layers_of as layers_of
from whale_trainer.describe.layers import model_loss as model_loss
from whale_trainer.describe.layers import unsynchronised_norms as unsynchronised_norms
from whale_trainer.describe.meta import build_on_meta as build_on_meta
from whale_trainer.describe.model import describe as describe
from whale_trainer.describe.optimizers import optimizer_bytes as optimizer_bytes
