"""The plain sections of the config: trainer, logger, checkpoint, and what stands at the top. Pure.

Each field says in its description what it takes; that text is the second half of the message when it is given another.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from whale_trainer.planning.precision import PRECISIONS
from whale_trainer.validation import did_you_mean, refusal

MODES = ("fit", "validate", "test", "predict", "plan", "calibrate", "export")
MAX_SEED = 2**32 - 1


class Section(BaseModel):
    """Settings that neither change nor are guessed: no unknown keys, no conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Top(Section):
    """What stands outside every section."""

    mode: Literal["fit", "validate", "test", "predict", "plan", "calibrate", "export"] = "fit"
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description=f"an integer from 0 to {MAX_SEED}")
    global_batch: int = Field(
        default=32, ge=1, le=2**31, description="samples of one optimizer step over all ranks, an integer from 1"
    )
    emulate: bool = Field(
        default=False, description="true: CPU ranks at the pace of the declared devices; false: as fast as they run"
    )
    timeout_s: float = Field(default=300.0, gt=0, le=1e7, description="seconds above 0, up to 10000000")
    ckpt_path: str | None = Field(
        default=None, min_length=1, description="the path of a checkpoint, `last`, or null for none"
    )
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="the path of first weights (safetensors, a Hugging Face folder), or null",
    )

    @model_validator(mode="after")
    def _weights_come_from_one_place(self) -> Self:
        if self.mode == "export" and self.ckpt_path is None:
            raise refusal("mode=export needs ckpt_path: the path of a checkpoint, or last with hydra.run.dir")
        if self.init_from is not None and self.mode in ("plan", "calibrate", "export"):
            raise refusal(f"init_from is of no use in mode={self.mode}; leave it out")
        if self.init_from is not None and self.ckpt_path not in (None, "last"):
            raise refusal(
                f"init_from ({self.init_from}) and ckpt_path ({self.ckpt_path}) both give weights; leave one out "
                "(ckpt_path=last takes init_from when there is no checkpoint yet)"
            )
        return self


REPLACED = {
    "accumulate_grad_batches": "a plan accumulates over its own micro-batches; set strategy.micro_batches",
    "devices": "the plan decides which devices are used; set cluster and strategy",
    "num_nodes": "the nodes are those of the cluster; set cluster",
    "strategy": "the parallelism is in the strategy section; set strategy",
    "sync_batchnorm": "BatchNorm over several ranks is not available; use GroupNorm or LayerNorm in the model",
    "use_distributed_sampler": "the plan gives each rank its rows; leave it out",
    "callbacks": "set callbacks, at the top of the config",
    "logger": "set logger, at the top of the config",
    "default_root_dir": "set hydra.run.dir",
    "enable_checkpointing": "set checkpoint.every_n_steps=null and checkpoint.save_top_k=0 for none",
    "max_time": "set trainer.max_steps",
    "deterministic": "a plan gives the same numbers on every run; leave it out",
}
"""Settings of Lightning's Trainer that assume equal copies or stand elsewhere here, and what to do instead."""


def _limit(value: object) -> object:
    """A number of batches, or as a float the fraction of all."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    is_fraction = isinstance(value, float) and 0.0 <= value <= 1.0
    if value is None or is_count or is_fraction:
        return value
    raise refusal(f"{value!r} is no limit; allowed: a number of batches from 0, a fraction such as 0.25, or null")


def _interval(value: object) -> object:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    is_fraction = isinstance(value, float) and 0.0 < value <= 1.0
    if value is None or is_count or is_fraction:
        return value
    raise refusal(f"{value!r} is no interval; allowed: steps from 1, a fraction of an epoch such as 0.25, or null")


def _precision(word: str) -> str:
    if word not in PRECISIONS:
        raise refusal(f"{word!r} is no precision; {did_you_mean(word, tuple(PRECISIONS))}")
    return word


Limit = Annotated[int | float | None, BeforeValidator(_limit)]


def _above_zero(limit: int | float | None) -> int | float | None:
    if limit == 0:
        raise refusal(f"{limit!r} trains on nothing; allowed: a number of batches from 1, a fraction above 0, or null")
    return limit


class TrainerConfig(Section):
    """How long and in what precision; what Lightning's Trainer is given."""

    max_steps: int = Field(default=200, ge=1, description="optimizer steps, an integer from 1")
    max_epochs: int | None = Field(default=None, ge=1, description="an integer from 1, or null for no limit")
    precision: Annotated[str, AfterValidator(_precision)] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    gradient_clip_val: float | None = Field(default=None, ge=0, description="a number from 0, or null for no clipping")
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    val_check_interval: Annotated[int | float | None, BeforeValidator(_interval)] = None
    """Steps, or as a float the fraction of an epoch; None: at the end of an epoch."""
    check_val_every_n_epoch: int | None = Field(default=None, ge=1, description="an integer from 1, or null")
    """None: steps of `val_check_interval` are counted over all epochs, and fractions hold for each epoch."""
    limit_train_batches: Annotated[Limit, AfterValidator(_above_zero)] = None
    limit_val_batches: Limit = None
    limit_test_batches: Limit = None
    limit_predict_batches: Limit = None
    log_every_n_steps: int = Field(default=10, ge=1, description="an integer from 1")
    num_sanity_val_steps: int = Field(default=0, ge=-1, description="validation batches before training, or -1 for all")
    enable_progress_bar: bool = Field(default=True, description="true or false")
    allow_tf32: bool = Field(default=False, description="true or false")

    @model_validator(mode="before")
    @classmethod
    def _fractions_are_of_one_epoch(cls, data: Any) -> Any:
        # Lightning refuses a fraction without a number of epochs
        if isinstance(data, dict) and data.get("check_val_every_n_epoch") is None:
            is_steps = isinstance(data.get("val_check_interval"), int)
            return {**data, "check_val_every_n_epoch": None if is_steps else 1}
        return data


_WANDB_ONLY = ("project", "name", "group", "entity", "notes", "tags")


class LoggerConfig(Section):
    """Where figures go besides metrics.csv; the text fields are W&B's."""

    kind: Literal["wandb", "csv", "tensorboard", "none"] = "wandb"
    project: str | None = Field(default=None, min_length=1, description="text, or null")
    name: str | None = Field(default=None, min_length=1, description="text, or null for the run folder's name")
    group: str | None = Field(default=None, min_length=1, description="text, or null")
    entity: str | None = Field(default=None, min_length=1, description="text, or null")
    notes: str | None = Field(default=None, description="text, or null")
    tags: tuple[str, ...] = Field(default=(), strict=False, description="a list of words")

    @model_validator(mode="after")
    def _of_wandb(self) -> Self:
        if self.kind != "wandb" and (given := [name for name in _WANDB_ONLY if getattr(self, name)]):
            raise refusal(f"{', '.join(given)}: known to logger=wandb only, this is {self.kind}; leave it out")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """What is set, for `wandb.init`."""
        found = {name: getattr(self, name) for name in _WANDB_ONLY if getattr(self, name)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept; the last step of a run always leaves one."""

    every_n_steps: int | None = Field(default=None, ge=1, description="an integer from 1, or null for the last only")
    save_top_k: int = Field(default=1, ge=-1, description="how many are kept: an integer from 0, or -1 for all")
    monitor: str | None = Field(default=None, min_length=1, description="a logged figure such as val/loss, or null")
    asynchronous: bool = Field(default=False, description="true or false")
    """Write in the background while training goes on; it takes host memory for a copy of what a rank owns."""

    @model_validator(mode="after")
    def _best_by_something(self) -> Self:
        if self.monitor is None and self.save_top_k > 1:
            raise refusal(
                f"save_top_k {self.save_top_k} keeps the best, and monitor is null: set monitor (val/loss), or "
                "save_top_k to 1 (the newest) or -1 (all)"
            )
        return self


class PaperConfig(Section):
    """What Whale's paper measured of an experiment, to be printed beside our prediction."""

    figure: int = Field(ge=1, description="the number of the paper's figure, an integer from 1")
    gain_over_even: float = Field(gt=0, description="the speed-up over equal shares in that figure, a number above 0")
