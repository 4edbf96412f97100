"""From the composed YAML to a frozen `Config`: every rule that can be held before a plan exists, all at once.

`load_config` takes plain data (dicts, lists, numbers, text) and returns a `Config`, or raises one `ConfigError` with
every problem in the order of the sections. Knows nothing of Hydra; torch and Lightning are imported by targets only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from whale_trainer.cluster import Cluster, load_cluster
from whale_trainer.config.argument_types import LEFT_OPEN
from whale_trainer.config.files import profile_of, with_file
from whale_trainer.config.rules import (
    callback_problems,
    checked,
    dataset_problems,
    model_problems,
    optimizer_problems,
    trial_problems,
)
from whale_trainer.config.sections import (
    REPLACED,
    CheckpointConfig,
    LoggerConfig,
    PaperConfig,
    Section,
    Top,
    TrainerConfig,
)
from whale_trainer.config.target import Target, read_target
from whale_trainer.errors import ConfigError, Problem
from whale_trainer.planning.simulation.profile import Profile
from whale_trainer.planning.strategy import StrategySpec, load_strategy
from whale_trainer.validation import did_you_mean, problems_of, yaml_path

_NOT_GIVEN = "is missing, and has to be given"


class DataConfig(Section):
    """Data sets by use, and how batches are made of them. A loader's batch is the global batch."""

    path: str | None = None
    """A place for the data's own path, for data sets that refer to it as ${data.path}."""
    train: Target
    validation: Target | None = None
    test: Target | None = None
    collate: Target | None = None
    shuffle: bool = Field(default=True, description="true or false")
    drop_last: bool = Field(default=True, description="true or false")
    num_workers: int = Field(default=0, ge=0, le=1024, description="processes per rank that read, an integer from 0")
    validation_batch: int | None = Field(
        default=None,
        ge=1,
        description="samples of a batch when evaluating: an integer from 1, or null for global_batch",
    )

    def of_mode(self, mode: str) -> Target:
        """The data set that a mode runs over; predict takes test, or validation where there is none."""
        if mode == "validate":
            found = self.validation
        elif mode == "test":
            found = self.test
        elif mode == "predict":
            found = self.test or self.validation
        else:
            found = self.train
        assert found is not None
        return found


class Config(Top):
    """A whole command. Whatever holds it may rely on every rule; `resolved` is the same as plain data."""

    strategy: StrategySpec
    cluster: Cluster
    model: Target
    data: DataConfig
    optimizer: Target
    scheduler: Target | None
    trainer: TrainerConfig
    logger: LoggerConfig
    callbacks: dict[str, Target]
    checkpoint: CheckpointConfig
    paper: PaperConfig | None = None
    profile: Profile | None = None
    """What was measured of the cluster's kinds: the files of `cluster.profile`, merged."""
    resolved: dict[str, Any]

    def make_optimizer(self, named_parameters: Iterable[tuple[str, Any]]) -> Any:
        """The optimizer over a rank's (name, parameter) pairs."""
        return self.optimizer.build(named_parameters)

    def make_scheduler(self, optimizer: Any, num_steps: int) -> Any:
        """The schedule over an optimizer; one that takes `num_steps` gets the steps of the whole run."""
        assert self.scheduler is not None
        return self.scheduler.build_with(optimizer, offered={"num_steps": num_steps})


_T = TypeVar("_T")
_S = TypeVar("_S", bound=BaseModel)
_TARGETS_OF_DATA = ("train", "validation", "test", "collate")
_SECTIONS = tuple(name for name in Config.model_fields if name not in (*Top.model_fields, "profile", "resolved"))


def load_config(plain: object) -> Config:
    """The config that `plain` (the composed YAML as dicts, lists and scalars) stands for.

    Raises `ConfigError` with every problem. Targets are imported and held against their signatures; none is built.
    """
    if not isinstance(plain, Mapping):
        raise ConfigError([Problem("config", f"{plain!r} is not a mapping; allowed: {', '.join(_names())}")])
    reader = _Reader(plain)
    config = reader.config()
    if config is None:
        raise ConfigError(_ordered(reader.problems))
    return config


def _names() -> tuple[str, ...]:
    return (*Top.model_fields, *_SECTIONS)


def _ordered(problems: list[Problem]) -> list[Problem]:
    """Once each, by section, and a value that the user has yet to give without what else is wrong with it."""
    names = _names()
    open_paths = {p.path for p in problems if p.message.startswith(_NOT_GIVEN)}
    told = [p for p in dict.fromkeys(problems) if p.path not in open_paths or p.message.startswith(_NOT_GIVEN)]

    def section(problem: Problem) -> int:
        name = problem.path.split(".")[0].split("[")[0]
        return names.index(name) if name in names else -1

    return sorted(told, key=section)


class _Reader:
    """Reads section after section and keeps all problems."""

    def __init__(self, plain: Mapping[Any, Any]) -> None:
        self.plain = plain
        self.problems: list[Problem] = []

    def config(self) -> Config | None:
        """The whole; None when anything is wrong."""
        plain = self.plain
        self.problems += [
            Problem(yaml_path("", [str(key)]), f"unknown key; {did_you_mean(key, _names())}")
            for key in plain
            if key not in _names()
        ]
        self.problems += list(_missing_values(plain, ""))
        top = self._section({k: v for k, v in plain.items() if k in Top.model_fields}, "", Top)
        mode = top.mode if top is not None else str(plain.get("mode"))
        trainer = self._trainer(plain.get("trainer"))
        cluster, profile = self._cluster()
        parts: dict[str, Any] = {
            "strategy": self._loaded(load_strategy, "strategy"),
            "cluster": cluster,
            "model": self._target("model", model_problems),
            "data": self._data(plain.get("data"), mode),
            "optimizer": self._target("optimizer", optimizer_problems, given=1),
            "scheduler": self._target("scheduler", _no_problems, given=1, offered=("num_steps",), is_optional=True),
            "trainer": trainer,
            "logger": self._section(plain.get("logger"), "logger", LoggerConfig),
            "callbacks": self._callbacks(plain.get("callbacks"), mode),
            "checkpoint": self._section(plain.get("checkpoint"), "checkpoint", CheckpointConfig),
            "paper": None if plain.get("paper") is None else self._section(plain["paper"], "paper", PaperConfig),
            "profile": profile,
        }
        if top is not None and top.emulate and trainer is not None and trainer.accelerator == "gpu":
            message = (
                "true runs CPU processes at the pace of the devices; use trainer.accelerator=cpu, or leave it false"
            )
            self.problems.append(Problem("emulate", message))
        if not self.problems and mode not in ("plan", "export"):
            assert trainer is not None
            self.problems += trial_problems(parts["optimizer"], parts["scheduler"], trainer.max_steps)
        if self.problems or top is None:
            return None
        return Config.model_construct(**dict(top), **parts, resolved=copy.deepcopy(dict(self.plain)))

    def _loaded(self, load: Callable[[object], _T], name: str) -> _T | None:
        if name not in self.plain:
            self.problems.append(Problem(name, f"is missing; give a file of conf/{name}, as {name}=NAME"))
            return None
        try:
            return load(self.plain[name])
        except ConfigError as error:
            self.problems += error.problems
            return None

    def _cluster(self) -> tuple[Cluster | None, Profile | None]:
        """The cluster and its profile; what a file of the user's holds stands in the resolved config."""
        section = self.plain.get("cluster")
        if not isinstance(section, Mapping):
            return self._loaded(load_cluster, "cluster"), None
        try:
            section = with_file(section)
        except ConfigError as error:
            self.problems += error.problems
            return None, None
        self.plain = {**self.plain, "cluster": section}
        profile: Profile | None = None
        try:
            profile = profile_of(section)
        except ConfigError as error:
            self.problems += error.problems
        bare = {key: value for key, value in section.items() if key not in ("file", "profile")}
        try:
            return load_cluster(bare), profile
        except ConfigError as error:
            self.problems += error.problems
            return None, profile

    def _section(self, data: object, path: str, model: type[_S]) -> _S | None:
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            allowed = ", ".join(model.model_fields)
            self.problems.append(Problem(path, f"{data!r} is not a mapping; allowed: {{{allowed}}}"))
            return None
        try:
            return model.model_validate(dict(data))
        except ValidationError as error:
            self.problems += problems_of(error, path, model)
            return None

    def _trainer(self, data: object) -> TrainerConfig | None:
        if isinstance(data, Mapping):
            self.problems += [
                Problem(f"trainer.{key}", f"{data[key]!r}: {REPLACED[key]}") for key in data if key in REPLACED
            ]
            data = {key: value for key, value in data.items() if key not in REPLACED}
        return self._section(data, "trainer", TrainerConfig)

    def _target(
        self,
        path: str,
        rules: Callable[[Target], Iterator[Problem]],
        *,
        given: int = 0,
        offered: tuple[str, ...] = (),
        is_optional: bool = False,
    ) -> Target | None:
        value: Any = self.plain
        for step in path.split("."):
            value = value.get(step)
        if value is None:
            if not is_optional:
                self.problems.append(Problem(path, "is missing; give a mapping {_target_: package.module.Name, ...}"))
            return None
        target, problems = read_target(value, path)
        self.problems += problems or checked(target, rules, given=given, offered=offered)
        return target

    def _data(self, data: object, mode: str) -> DataConfig | None:
        if not isinstance(data, Mapping):
            self.problems.append(
                Problem("data", f"{data!r} is not a mapping; allowed: {', '.join(DataConfig.model_fields)}")
            )
            return None
        targets = {
            name: self._target(
                f"data.{name}", _no_problems if name == "collate" else dataset_problems, is_optional=name != "train"
            )
            for name in _TARGETS_OF_DATA
        }
        rest = {key: value for key, value in data.items() if key not in _TARGETS_OF_DATA}
        stand_in = targets["train"] or Target(path="data.train", target="")
        section = self._section({**rest, **targets, "train": stand_in}, "data", DataConfig)
        needed = {"validate": ("validation",), "test": ("test",), "predict": ("test", "validation")}.get(mode, ())
        self.problems += self._monitor_problems(data)
        if needed and not any(data.get(name) for name in needed):
            text = f"is missing, and mode={mode} runs over it; give {' or '.join(f'data.{n}' for n in needed)}"
            self.problems.append(Problem(f"data.{needed[0]}", text))
        return section

    def _monitor_problems(self, data: Mapping[Any, Any]) -> Iterator[Problem]:
        checkpoint = self.plain.get("checkpoint")
        monitor = checkpoint.get("monitor") if isinstance(checkpoint, Mapping) else None
        if isinstance(monitor, str) and monitor.startswith("val/") and data.get("validation") is None:
            text = f"{monitor!r} comes from validations, and there is no data.validation; give it, or set this to null"
            yield Problem("checkpoint.monitor", text)

    def _callbacks(self, data: object, mode: str) -> dict[str, Target] | None:
        if data is None:
            return {}
        if not isinstance(data, Mapping) or "_target_" in data:
            text = f"{data!r} is not a mapping of names to callbacks; allowed: {{NAME: {{_target_: package.Name}}}}"
            self.problems.append(Problem("callbacks", text))
            return None
        found: dict[str, Target] = {}
        for name, value in data.items():
            if value is None:
                continue  # callbacks.NAME=null takes one away
            target, problems = read_target(value, f"callbacks.{name}")
            found[str(name)] = target
            # planning and measuring start no training and load no Lightning, which callbacks come with
            is_training = mode not in ("plan", "calibrate", "export")
            self.problems += problems or (checked(target, callback_problems) if is_training else [])
        return found


def _no_problems(target: Target) -> Iterator[Problem]:
    return iter(())


def _missing_values(value: object, path: str) -> Iterator[Problem]:
    """Each value that a YAML file leaves to the user."""
    if value == LEFT_OPEN:
        yield Problem(path, f"{_NOT_GIVEN}: {path}=VALUE")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _missing_values(item, yaml_path(path, [str(key)]))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _missing_values(item, yaml_path(path, [index]))
