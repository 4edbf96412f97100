"""The strategy section: presets, and every refusal with path, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from whale_trainer.errors import ConfigError
from whale_trainer.planning.strategy import PRESETS, load_strategy

FOLDER = Path(__file__).parents[2] / "conf" / "strategy"


def problems(data: object) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        load_strategy(data)
    return {problem.path: problem.message for problem in error.value.problems}


def test_shipped_files_are_the_presets() -> None:
    found = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.rglob("*.yaml")}
    assert len(found) == 6
    assert load_strategy(found.pop("auto")).is_auto
    assert {name: load_strategy(data) for name, data in found.items()} == {
        name: load_strategy(data) for name, data in PRESETS.items()
    }


def test_defaults() -> None:
    spec = load_strategy({"scopes": [{"layers": "a"}, {"layers": ["b", "c"], "split": "auto", "devices": "volta"}]})
    first, second = spec.scopes
    assert first.layers == ("a",)
    assert first.is_fixed
    assert not second.is_fixed
    assert second.devices == ("volta",)
    assert (spec.micro_batches, spec.schedule, spec.balance, spec.left_over) == (1, "1f1b", "hardware", "refuse")
    assert hash(spec) == hash(spec.model_copy())


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        ([], "strategy", "[] is not a mapping"),
        ({"micro_batchs": 3}, "strategy.micro_batchs", "unknown key; did you mean micro_batches?"),
        ({"micro_batches": 0}, "strategy.micro_batches", "0 is no number of micro-batches; allowed: auto, or a whole"),
        ({"micro_batches": "4"}, "strategy.micro_batches", "'4' is no number of micro-batches; allowed: auto"),
        ({"micro_batches": 2.5}, "strategy.micro_batches", "2.5 is no number of micro-batches; allowed: auto"),
        ({"micro_batches": True}, "strategy.micro_batches", "True is no number of micro-batches; allowed: auto"),
        ({"micro_batches": None}, "strategy.micro_batches", "None is no number of micro-batches; allowed: auto"),
        (
            {"schedule": "1f1"},
            "strategy.schedule",
            "'1f1' is not allowed; did you mean 1f1b? (allowed: 1f1b, gpipe, interleaved, zero_bubble, fitted, auto)",
        ),
        (
            {"schedule": "hanayo"},
            "strategy.schedule",
            "'hanayo' is not allowed; allowed: 1f1b, gpipe, interleaved, zero_bubble, fitted, auto",
        ),
        ({"balance": "evn"}, "strategy.balance", "'evn' is not allowed; did you mean even?"),
        ({"max_candidates": 0}, "strategy.max_candidates", "0 is below 1; allowed: how many plans the search may"),
        ({"left_over": True}, "strategy.left_over", "True is not allowed; allowed: refuse, allow"),
        ({"scopes": "x"}, "strategy.scopes", "'x' is not a list; allowed: a list of {layers, replicate"),
        ({"scopes": [{}]}, "strategy.scopes[0].layers", "is missing; allowed: a pattern of layer names"),
        (
            {"scopes": [{"layers": 3}]},
            "strategy.scopes[0].layers",
            "3 is not a list; allowed: a pattern of layer names",
        ),
        ({"scopes": [{"layers": []}]}, "strategy.scopes[0].layers", "is empty; allowed: a pattern of layer names"),
        (
            {"default": {"layers": "x"}},
            "strategy.default.layers",
            "unknown key; allowed: replicate, split, stages, chunks, placement, devices",
        ),
        (
            {"default": {"replicate": "all"}},
            "strategy.default.replicate",
            "'all' is not a degree; allowed: auto, or a whole",
        ),
        ({"default": {"split": 0}}, "strategy.default.split", "0 is not a degree"),
        ({"default": {"split": -2}}, "strategy.default.split", "-2 is not a degree"),
        ({"default": {"stages": 2.0}}, "strategy.default.stages", "2.0 is not a degree"),
        ({"default": {"stages": True}}, "strategy.default.stages", "True is not a degree"),
        ({"default": {"devices": []}}, "strategy.default.devices", "is empty; allowed: a list of device kinds"),
        (
            {"scopes": [{"layers": "*", "colocate": True}]},
            "strategy.scopes[0].colocate",
            "true, but there is no scope before and no default to share devices with; give strategy.default",
        ),
    ],
)
def test_refusals(data: dict[str, Any], path: str, message: str) -> None:
    found = problems(data)
    assert list(found) == [path]
    assert found[path].startswith(message)


def test_all_problems_are_told_at_once() -> None:
    found = problems({"micro_batchs": 3, "schedule": "x", "scopes": [{"layer": "x", "split": "atuo"}]})
    assert sorted(found) == [
        "strategy.micro_batchs",
        "strategy.schedule",
        "strategy.scopes[0].layer",
        "strategy.scopes[0].layers",
        "strategy.scopes[0].split",
    ]
