"""What a precision means for a plan: dtype of matrix products, bytes per weight, and which devices may run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale_trainer.cluster import Device, count_kinds
from whale_trainer.device_kinds import BF16_CAPABILITY, DType
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.model_spec import ParameterSpec
from whale_trainer.validation import did_you_mean


@dataclass(frozen=True)
class Precision:
    """One value of `trainer.precision`."""

    name: str
    dtype: DType
    """Of matrix products, which decides the speed of a device."""
    weight_bytes: int | None = None
    """Bytes of a weight and of its gradient; None keeps those of the user's model."""
    copy_bytes: int = 0
    """Bytes per weight of the copy that autocast makes and keeps for the step."""
    activation_factor: float = 1.0
    """Saved activations against those of the model as written."""

    def bytes_of(self, parameter: ParameterSpec) -> int:
        return self.weight_bytes or parameter.element_bytes


# Under autocast matrix inputs are saved at 2 bytes, while norms, softmax and the loss keep 4; three quarters is above
# what a decoder block keeps.
PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("32-true", "fp32"),
        Precision("64-true", "fp64", weight_bytes=8, activation_factor=2.0),
        Precision("bf16-mixed", "bf16", copy_bytes=2, activation_factor=0.75),
        Precision("16-mixed", "fp16", copy_bytes=2, activation_factor=0.75),
    )
}


def precision_of(name: str) -> Precision:
    """The precision called `name`. Raises `ConfigError` for another word."""
    if name not in PRECISIONS:
        hint = did_you_mean(name, tuple(PRECISIONS))
        raise ConfigError([Problem("trainer.precision", f"{name!r} is no precision; {hint}")])
    return PRECISIONS[name]


def check_dtype(precision: Precision, devices: Sequence[Device]) -> None:
    """Raises `ConfigError` that names the devices which may not run the precision: the weakest one rules."""
    lacking = [d for d in devices if precision.dtype not in d.kind.dtypes]
    if not lacking:
        return
    capabilities = sorted({d.kind.compute_capability for d in lacking if d.kind.compute_capability})
    which = count_kinds(tuple(d.kind for d in lacking))
    needs = f", {precision.dtype} needs {'.'.join(map(str, BF16_CAPABILITY))}" if precision.dtype == "bf16" else ""
    found = f" (compute capability {', '.join(capabilities)}{needs})" if capabilities else ""
    nodes = ", ".join(dict.fromkeys(d.node for d in lacking))
    legal = [p.name for p in PRECISIONS.values() if all(p.dtype in d.kind.dtypes for d in devices)]
    message = (
        f"{precision.name} needs {precision.dtype}, which is not legal on {which} in {nodes}{found}; one precision "
        f"holds for all ranks: use {' or '.join(legal)}, or leave these devices out with strategy.scopes[0].devices"
    )
    raise ConfigError([Problem("trainer.precision", message)])
