"""Every file under conf/: composed by Hydra, loaded, and then spoilt one key at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from configs import CONF, DROPPED, composed, edited

from whale_trainer.config import load_config
from whale_trainer.errors import ConfigError, PlanError

FILES = sorted(str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml"))
COUNTS = {
    "callbacks": 2,
    "cluster": 8,
    "data": 5,
    "debug": 2,
    "experiment": 7,
    "logger": 4,
    "model": 9,
    "optimizer": 2,
    "scheduler": 2,
    "strategy": 6,
    "trainer": 1,
}
ALSO = {
    "data/text.yaml": [f"data.path={CONF}/config.yaml"],
    "model/custom.yaml": ["model._target_=torch.nn.Identity"],
}
"""What a file leaves to the user, given here."""


def overrides_of(file: str) -> list[str]:
    """The command line that takes a file of conf/ into the config."""
    if "/" not in file:
        return []
    group, _, option = file.removesuffix(".yaml").partition("/")
    return [f"{group}={option}", *ALSO.get(file, [])]


def test_every_file_is_counted() -> None:
    found = {group: sum(file.startswith(f"{group}/") for file in FILES) for group in COUNTS}
    assert found == COUNTS
    assert len(FILES) == 1 + sum(COUNTS.values())


@pytest.mark.parametrize("file", FILES)
def test_every_file_composes_and_loads(file: str) -> None:
    plain = composed(*overrides_of(file))
    config = load_config(plain)
    assert config.resolved == plain


def test_the_default_is_the_main_command() -> None:
    config = load_config(composed())
    assert (config.mode, config.seed, config.global_batch, config.timeout_s) == ("fit", 0, 32, 300)
    assert config.strategy.name == "hybrid"
    assert str(config.cluster) == "volta: 4 x V100-SXM2-32GB; pascal: 4 x P100-PCIE-16GB"
    assert config.model.target == "whale_trainer.models.gpt.GPT"
    assert config.data.train.target == "whale_trainer.data.PydocText"
    assert (config.logger.kind, config.callbacks, config.ckpt_path, config.emulate) == ("wandb", {}, None, False)


def test_what_is_left_to_the_user_is_asked_for() -> None:
    plain = composed()
    plain["data"] = {"path": "???", "train": {"_target_": "whale_trainer.data.TextFiles", "path": "???", "context": 8}}
    with pytest.raises(ConfigError) as caught:
        load_config(plain)
    assert [problem.path for problem in caught.value.problems] == ["data.path", "data.train.path"]


def test_experiments_and_debug_say_how_to_run_them() -> None:
    for file in FILES:
        group, _, option = file.removesuffix(".yaml").partition("/")
        if group in ("experiment", "debug"):
            assert f"python train.py {group}={option}" in (CONF / file).read_text()


# ---- one edit at a time ----


def paths_of(value: object, prefix: str = "") -> Iterator[str]:
    """The dotted path of every key, and of every position of a list."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in steps:
        path = f"{prefix}{step}"
        yield path
        yield from paths_of(item, f"{path}.")


def own_paths(file: str) -> list[str]:
    """The paths of a file's own keys, as they stand in the whole config."""
    text = (CONF / file).read_text()
    own = yaml.safe_load(text) or {}
    own = {key: value for key, value in own.items() if key not in ("defaults", "hydra")}
    is_global = "/" not in file or "# @package _global_" in text
    return list(paths_of(own if is_global else {file.split("/")[0]: own}))


def retyped(value: object) -> list[object]:
    """Values of every type that YAML can write, without those of the same one."""
    values: list[object] = [None, "word", "", "3", 3.7, True, -1, 0, float("nan"), [], [None], {}, {"a": 1}]
    return [other for other in values if type(other) is not type(value) or other != value]


def edits_of(plain: dict[str, Any], path: str) -> Iterator[dict[str, Any]]:
    *parents, last = path.split(".")
    owner: Any = plain
    for step in parents:
        owner = owner[int(step)] if isinstance(owner, list) else owner[step]
    value = owner[int(last)] if isinstance(owner, list) else owner[last]
    yield {path: DROPPED}
    yield from ({path: other} for other in retyped(value))
    if isinstance(value, str):
        yield {path: value[:-1]}
        yield {path: value + "x"}
    if isinstance(owner, dict):
        misspelt = ".".join([*parents, last[:1] + last[2:] if len(last) > 2 else last + "x"])
        yield {misspelt: copy.deepcopy(value), path: DROPPED}


@pytest.mark.parametrize("file", FILES)
def test_one_wrong_edit_is_refused_or_harmless(file: str) -> None:
    plain = composed(*overrides_of(file))
    num_refused = 0
    for path in own_paths(file):
        for edits in edits_of(plain, path):
            spoilt = edited(plain, edits)
            try:
                load_config(spoilt)
            except (ConfigError, PlanError):
                num_refused += 1
            except Exception as error:
                pytest.fail(f"{edits}: {type(error).__name__}: {error}")
    assert num_refused or not own_paths(file)
