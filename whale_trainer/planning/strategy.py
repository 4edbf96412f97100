"""The `strategy` section: how a step is run, never what is learned.

`load_strategy` takes the section as plain data and returns a `StrategySpec`, or raises one `ConfigError` that holds
every problem. Whether the degrees fit a model and a cluster is the planner's to say.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from whale_trainer.errors import ConfigError, Problem
from whale_trainer.validation import problems_of, refusal


def _degree(value: object) -> object:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or value == "auto" or (is_whole and isinstance(value, int) and 1 <= value <= 65536):
        return value
    raise refusal(f"{value!r} is not a degree; allowed: auto, or a whole number from 1 to 65536")


def _count_or_auto(value: object) -> object:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if value == "auto" or (is_whole and isinstance(value, int) and 1 <= value <= 65536):
        return value
    raise refusal(f"{value!r} is no number of micro-batches; allowed: auto, or a whole number from 1 to 65536")


def _words(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Degree = Annotated[int | Literal["auto"] | None, BeforeValidator(_degree)]
_Word = Annotated[str, Field(min_length=1, description="text")]
Words = Annotated[tuple[_Word, ...], BeforeValidator(_words), Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Degrees(_Section):
    """How many copies, stages and shards some layers get. A degree that is not given is 1; `auto` fills the devices."""

    replicate: Degree = None
    split: Degree = None
    stages: Degree = None
    chunks: int | None = Field(default=None, ge=1, le=64, description="parts of each stage's layers, from 1 to 64")
    """How often a pipeline goes over the same devices; not given: 2 with `schedule: interleaved`, else 1."""
    placement: Literal["loop", "v"] = "loop"
    """Where chunks go: over the devices in turns, or back and forth, so that the first device also has the end."""
    devices: Words | None = Field(default=None, description="a list of device kinds or node names")

    @property
    def is_fixed(self) -> bool:
        return "auto" not in (self.replicate, self.split, self.stages)


class Scope(Degrees):
    """One TaskGraph: the layers whose names match `layers`, and how they are run."""

    name: str | None = Field(default=None, description="a name for messages")
    layers: Words = Field(description="a pattern of layer names such as 'blocks.*', or a list of them")
    colocate: bool = Field(default=False, description="true to share the devices of the scope before (or of default)")


SCHEDULES_TO_TRY = ("1f1b", "gpipe", "interleaved", "zero_bubble", "fitted")
"""What `schedule: auto` stands for."""


class StrategySpec(_Section):
    """The whole section. Without `default` and `scopes` the planner chooses."""

    name: str = Field(default="custom", description="the preset's name")
    micro_batches: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)] = 1
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "fitted", "auto"] = "1f1b"
    balance: Literal["hardware", "even", "whale"] = "hardware"
    """`hardware`: the least step time; base lines: `even` takes all devices as equal, `whale` is the paper's own
    algorithm."""
    default: Degrees | None = Field(
        default=None, description="{replicate, split, stages, devices}, for layers in no scope"
    )
    scopes: tuple[Scope, ...] = Field(
        default=(), strict=False, description="a list of {layers, replicate, split, stages}"
    )
    max_candidates: int | None = Field(
        default=None, ge=1, le=10**9, description="how many plans the search may simulate, from 1, or null"
    )
    """None: as many as the search's own limits allow. Not a time, so that the answer is the same on any machine."""
    left_over: Literal["refuse", "allow"] = "refuse"
    """Whether fixed degrees may leave devices of the cluster unused."""

    @property
    def is_auto(self) -> bool:
        """True when the planner is to choose everything."""
        return self.default is None and not self.scopes

    @property
    def may_split(self) -> bool:
        """True when tensor groups may come of it."""
        degrees = (*self.scopes, *(() if self.default is None else (self.default,)))
        return self.is_auto or any(each.split not in (None, 1) for each in degrees)

    @property
    def variants(self) -> tuple[tuple[int | None, str], ...]:
        """(micro-batches, schedule) that the strategy leaves open; None for any number of micro-batches."""
        schedules = SCHEDULES_TO_TRY if self.schedule == "auto" else (self.schedule,)
        return tuple((None if self.micro_batches == "auto" else self.micro_batches, s) for s in schedules)


def load_strategy(data: object) -> StrategySpec:
    """The `strategy` section of the config. Raises `ConfigError` with all its problems."""
    if not isinstance(data, dict):
        raise ConfigError([Problem("strategy", f"{data!r} is not a mapping; allowed: {{micro_batches, scopes, ...}}")])
    try:
        spec = StrategySpec.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems_of(error, "strategy", StrategySpec)) from None
    if spec.scopes and spec.scopes[0].colocate and spec.default is None:
        message = "true, but there is no scope before and no default to share devices with; give strategy.default"
        raise ConfigError([Problem("strategy.scopes[0].colocate", message)])
    return spec


PRESETS: dict[str, dict[str, Any]] = {
    "single": {"name": "single", "scopes": [{"layers": "*", "replicate": 1}], "left_over": "allow"},
    "replicate": {"name": "replicate", "scopes": [{"layers": "*", "replicate": "auto"}], "left_over": "allow"},
    "split": {"name": "split", "scopes": [{"layers": "*", "split": "auto"}], "left_over": "allow"},
    "pipeline": {
        "name": "pipeline",
        "micro_batches": 4,
        "schedule": "1f1b",
        "scopes": [{"layers": "*", "stages": "auto"}],
        "left_over": "allow",
    },
    "hybrid": {
        "name": "hybrid",
        "micro_batches": 4,
        "schedule": "1f1b",
        "balance": "hardware",
        "scopes": [{"layers": "*", "replicate": "auto", "stages": 2, "split": 2}],
        "left_over": "allow",
    },
}
"""The shipped strategies, as in conf/strategy; `auto` has no scopes and may do what any of them does, and more."""
