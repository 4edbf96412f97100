"""The config: one test case per rule (path, value found, remedy), and what a good config becomes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import config_targets
import pytest
import torch
from configs import DROPPED, edited, small_config

from whale_trainer.config import Config, Target, load_config
from whale_trainer.errors import ConfigError
from whale_trainer.schedules import warmup_cosine


def problems(edits: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(edited(small_config(), edits))
    return {problem.path: problem.message for problem in caught.value.problems}


def loaded(edits: dict[str, Any] | None = None) -> Config:
    return load_config(edited(small_config(), edits or {}))


# ---- every rule: an edit, the path of its one problem, and parts of the message ----

TOP = {
    "unknown key": ({"globalbatch": 3}, "globalbatch", ["unknown key", "did you mean global_batch?"]),
    "far-off key": ({"zzz": 3}, "zzz", ["unknown key", "allowed: mode, seed"]),
    "mode": ({"mode": "fitt"}, "mode", ["'fitt'", "did you mean fit?", "validate"]),
    "mode list": ({"mode": ["fit"]}, "mode", ["['fit']", "allowed"]),
    "export": ({"mode": "export"}, "", ["mode=export needs ckpt_path", "or last with hydra.run.dir"]),
    "emulate on a GPU": (
        {"emulate": True, "trainer": {"accelerator": "gpu"}},
        "emulate",
        ["CPU processes", "use trainer.accelerator=cpu"],
    ),
    "emulate text": ({"emulate": "false"}, "emulate", ["'false' is not true or false"]),
    "seed float": ({"seed": 3.7}, "seed", ["3.7 is not an integer", "from 0 to 4294967295"]),
    "seed negative": ({"seed": -1}, "seed", ["-1 is below 0"]),
    "seed bool": ({"seed": True}, "seed", ["True is not an integer"]),
    "batch zero": ({"global_batch": 0}, "global_batch", ["0 is below 1", "samples of one optimizer step"]),
    "batch text": ({"global_batch": "32"}, "global_batch", ["'32' is not an integer"]),
    "batch null": ({"global_batch": None}, "global_batch", ["None is not an integer"]),
    "timeout zero": ({"timeout_s": 0}, "timeout_s", ["0 is not above 0", "seconds above 0"]),
    "timeout nan": ({"timeout_s": float("nan")}, "timeout_s", ["nan", "seconds above 0"]),
    "timeout bool": ({"timeout_s": True}, "timeout_s", ["True is not a number"]),
    "ckpt_path": ({"ckpt_path": 3}, "ckpt_path", ["3 is not text", "last"]),
    "ckpt_path empty": ({"ckpt_path": ""}, "ckpt_path", ["is empty", "null for none"]),
    "strategy": ({"strategy.micro_batchs": 2}, "strategy.micro_batchs", ["did you mean micro_batches?"]),
    "strategy word": ({"strategy": "hybrid"}, "strategy", ["'hybrid' is not a mapping"]),
    "strategy missing": ({"strategy": DROPPED}, "strategy", ["is missing", "conf/strategy", "strategy=NAME"]),
    "cluster": ({"cluster.nodes.0.devices.CPU": 3.7}, "cluster.nodes[0].devices.CPU", ["3.7 is not an integer"]),
    "cluster missing": ({"cluster": DROPPED}, "cluster", ["is missing", "conf/cluster"]),
    "left open": ({"data.path": "???"}, "data.path", ["is missing", "data.path=VALUE"]),
    "left open in a list": ({"optimizer.betas.1": "???"}, "optimizer.betas[1]", ["is missing"]),
}

TARGETS = {
    "no target": ({"model._target_": DROPPED}, "model._target_", ["is missing", "package.module.Name"]),
    "target misspelt": (
        {"model": {"target": "config_targets.Net"}},
        "model._target_",
        ["is missing", "did you write target"],
    ),
    "target empty": ({"model._target_": ""}, "model._target_", ["'' is not a dotted name"]),
    "target number": ({"model._target_": 3}, "model._target_", ["3 is not a dotted name"]),
    "one part": ({"model._target_": "Net"}, "model._target_", ["'Net' is not a dotted name", "package.module.Name"]),
    "dots": ({"model._target_": "a..b"}, "model._target_", ["'a..b' is not a dotted name"]),
    "no package": ({"model._target_": "config_targetz.Net"}, "model._target_", ["no module", "config_targets?"]),
    "far-off package": ({"model._target_": "qqxxqq.Net"}, "model._target_", ["no module 'qqxxqq'", "PYTHONPATH"]),
    "no module": (
        {"optimizer._target_": "torch.optimm.AdamW"},
        "optimizer._target_",
        ["torch has no 'optimm'", "did you mean optim?"],
    ),
    "no submodule": (
        {"scheduler._target_": "whale_trainer.schedulez.warmup_cosine"},
        "scheduler._target_",
        ["whale_trainer has no 'schedulez'", "did you mean schedules?"],
    ),
    "no attribute": ({"model._target_": "config_targets.Nett"}, "model._target_", ["has no 'Nett'", "mean Net?"]),
    "far-off attribute": ({"model._target_": "config_targets.Zq"}, "model._target_", ["has no 'Zq'"]),
    "a number": ({"model._target_": "config_targets.NUMBER"}, "model._target_", ["is int, not a class"]),
    "a module": ({"model._target_": "torch.nn"}, "model._target_", ["is module, not a class"]),
    "no argument of that name": ({"model.widht": 3}, "model.widht", ["3: config_targets.Net has no", "mean width?"]),
    "argument missing": ({"model.width": DROPPED}, "model.width", ["is missing", "config_targets.Net needs it"]),
    "argument left open": ({"model.width": "???"}, "model.width", ["is missing", "model.width=VALUE"]),
    "not an integer": ({"model.width": 3.7}, "model.width", ["3.7 is not an integer"]),
    "bool as integer": ({"model.width": True}, "model.width", ["True is not an integer"]),
    "not a number": ({"model.rate": "high"}, "model.rate", ["'high' is not a number"]),
    "nan": ({"model.rate": float("nan")}, "model.rate", ["nan is not a number"]),
    "not text": ({"model.name": 3}, "model.name", ["3 is not text"]),
    "text as bool": ({"model.gated": "false"}, "model.gated", ["'false' is not true or false"]),
    "other choice": ({"model.kind": "rellu"}, "model.kind", ["'rellu' is not allowed", "did you mean relu?"]),
    "choice of another type": ({"model.kind": 3}, "model.kind", ["3 is not one of relu, gelu"]),
    "list too short": ({"model.sizes": [1]}, "model.sizes", ["[1] is not a list of 2"]),
    "list item": ({"model.sizes": [1, 2.5]}, "model.sizes", ["2.5 is not an integer"]),
    "text as list": ({"model.sizes": "12"}, "model.sizes", ["'12' is not a list"]),
    "number as sequence": ({"model.depths": 3}, "model.depths", ["3 is not a list"]),
    "annotated": ({"model.scale": "big"}, "model.scale", ["'big' is not a number"]),
    "list as mapping": ({"model.options": [1]}, "model.options", ["[1] is not a mapping or null"]),
    "hydra's other keys": ({"model._args_": [1]}, "model._args_", ["not known here", "by their names"]),
    "partial": ({"model._partial_": "yes"}, "model._partial_", ["'yes' is not true or false"]),
    "number as key": ({"model": {"_target_": "config_targets.Net", "width": 2, 3: 4}}, "model.3", ["3 is not text"]),
    "nested": ({"model.inner": {"_target_": "config_targets.Nett"}}, "model.inner._target_", ["mean Net?"]),
    "nested in a list": (
        {"model.inner": [{"_target_": "config_targets.Net"}]},
        "model.inner[0].width",
        ["is missing", "config_targets.Net needs it"],
    ),
    "nested in a mapping": ({"model.inner": {"a": {"_target_": 3}}}, "model.inner.a._target_", ["3 is not a dotted"]),
    "not a mapping": ({"model": "gpt_mini"}, "model", ["'gpt_mini' is not a mapping", "_target_"]),
}

PLACES = {
    "model missing": ({"model": DROPPED}, "model", ["is missing", "_target_"]),
    "no model": ({"model._target_": "config_targets.NoModule", "model.width": DROPPED}, "model._target_", ["Module"]),
    "no data": ({"data": None}, "data", ["None is not a mapping", "train"]),
    "no train": ({"data.train": DROPPED}, "data.train", ["is missing", "_target_"]),
    "data key": ({"data.validate": {}}, "data.validate", ["unknown key", "did you mean validation?"]),
    "no data set": (
        {"data.train": {"_target_": "config_targets.NoModule"}},
        "data.train._target_",
        ["without __getitem__ and __len__", "map-style"],
    ),
    "a stream": (
        {"data.validation": {"_target_": "config_targets.Stream"}},
        "data.validation._target_",
        ["map-style", "by their position"],
    ),
    "collate called at once": (
        {"data.collate": {"_target_": "config_targets.stack"}},
        "data.collate.samples",
        ["is missing", "_partial_: true"],
    ),
    "workers": ({"data.num_workers": -1}, "data.num_workers", ["-1 is below 0", "an integer from 0"]),
    "shuffle": ({"data.shuffle": "yes"}, "data.shuffle", ["'yes' is not true or false"]),
    "validation batch": ({"data.validation_batch": 0}, "data.validation_batch", ["0 is below 1", "global_batch"]),
    "mode without data": ({"mode": "test"}, "data.test", ["is missing", "mode=test"]),
    "mode without validation": (
        {"mode": "validate", "data.validation": None},
        "data.validation",
        ["is missing", "mode=validate"],
    ),
    "predict without data": (
        {"mode": "predict", "data.validation": None},
        "data.test",
        ["mode=predict", "data.test or data.validation"],
    ),
    "optimizer missing": ({"optimizer": None}, "optimizer", ["is missing"]),
    "no optimizer": (
        {"optimizer": {"_target_": "config_targets.NoModule"}},
        "optimizer._target_",
        ["no torch optimizer", "torch.optim.Optimizer"],
    ),
    "gives no optimizer": (
        {"optimizer": {"_target_": "config_targets.no_optimizer"}},
        "optimizer._target_",
        ["gives int, no torch optimizer", "torch.optim.AdamW"],
    ),
    "partial optimizer": ({"optimizer._partial_": True}, "optimizer._partial_", ["true: ", "leave it out"]),
    "partial callback": ({"callbacks.watcher._partial_": True}, "callbacks.watcher._partial_", ["leave it out"]),
    "takes no parameters": (
        {"optimizer": {"_target_": "config_targets.takes_nothing"}},
        "optimizer._target_",
        ["takes 0 arguments by position", "called with 1"],
    ),
    "parameters given": ({"optimizer.params": []}, "optimizer.params", ["by the program itself", "leave it out"]),
    "negative rate": ({"optimizer.lr": -0.1}, "optimizer.lr", ["-0.1 is not a finite number from 0"]),
    "endless rate": ({"optimizer.lr": float("inf")}, "optimizer.lr", ["inf is not a finite number"]),
    "rate as text": ({"optimizer.lr": "1e-3x"}, "optimizer.lr", ["'1e-3x' is not a number"]),
    "decay": ({"optimizer.weight_decay": -1}, "optimizer.weight_decay", ["-1 is not a finite number from 0"]),
    "the optimizer's own rule": ({"optimizer.betas": [0.9, 1.5]}, "optimizer", ["ValueError", "beta", "1.5"]),
    "betas": ({"optimizer.betas": [0.9]}, "optimizer.betas", ["[0.9] is not a list of 2"]),
    "num_steps given": ({"scheduler.num_steps": 3}, "scheduler.num_steps", ["by the program itself"]),
    "the schedule's own rule": ({"scheduler.final_fraction": 2.0}, "scheduler", ["2.0 is not between 0 and 1"]),
    "warm-up in parts": ({"scheduler.warmup_steps": 2.5}, "scheduler.warmup_steps", ["2.5 is not an integer"]),
    "warm-up": ({"scheduler.warmup_steps": -1}, "scheduler", ["warmup_steps -1 is below 0"]),
    "on a metric": (
        {"scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}},
        "scheduler._target_",
        ["waits for a metric", "warmup_cosine"],
    ),
    "no schedule": (
        {"scheduler": {"_target_": "config_targets.no_optimizer"}},
        "scheduler",
        ["cannot be made: TypeError"],
    ),
    "gives no schedule": (
        {"scheduler": {"_target_": "config_targets.no_schedule"}},
        "scheduler._target_",
        ["gives NoneType, no schedule", "LRScheduler"],
    ),
    "callbacks list": ({"callbacks": []}, "callbacks", ["[] is not a mapping of names", "NAME"]),
    "one callback": (
        {"callbacks": {"_target_": "config_targets.Watcher"}},
        "callbacks",
        ["is not a mapping of names to callbacks"],
    ),
    "no callback": ({"callbacks.x": {"_target_": "config_targets.Rows"}}, "callbacks.x._target_", ["no callback"]),
    "callback's argument": ({"callbacks.watcher.evry": 3}, "callbacks.watcher.evry", ["did you mean every?"]),
}

SECTIONS = {
    "trainer word": ({"trainer": "default"}, "trainer", ["'default' is not a mapping", "max_steps"]),
    "accumulation": (
        {"trainer.accumulate_grad_batches": 4},
        "trainer.accumulate_grad_batches",
        ["4: ", "set strategy.micro_batches"],
    ),
    "devices": ({"trainer.devices": 4}, "trainer.devices", ["4: ", "set cluster and strategy"]),
    "no steps": ({"trainer.max_steps": 0}, "trainer.max_steps", ["0 is below 1", "an integer from 1"]),
    "endless steps": ({"trainer.max_steps": -1}, "trainer.max_steps", ["-1 is below 1"]),
    "epochs": ({"trainer.max_epochs": 1.5}, "trainer.max_epochs", ["1.5 is not an integer", "null for no limit"]),
    "precision": ({"trainer.precision": "bf16"}, "trainer.precision", ["'bf16'", "bf16-mixed"]),
    "precision number": ({"trainer.precision": 32}, "trainer.precision", ["32 is not text"]),
    "accelerator": ({"trainer.accelerator": "cuda"}, "trainer.accelerator", ["'cuda'", "auto, cpu, gpu"]),
    "clipping": ({"trainer.gradient_clip_val": -1.0}, "trainer.gradient_clip_val", ["-1.0 is below 0", "null"]),
    "clipping inf": ({"trainer.gradient_clip_val": float("inf")}, "trainer.gradient_clip_val", ["not a finite"]),
    "clipping's way": ({"trainer.gradient_clip_algorithm": "Norm"}, "trainer.gradient_clip_algorithm", ["mean norm?"]),
    "fraction": ({"trainer.limit_val_batches": 1.5}, "trainer.limit_val_batches", ["1.5 is no limit", "0.25"]),
    "limit": ({"trainer.limit_train_batches": True}, "trainer.limit_train_batches", ["True is no limit"]),
    "no training": (
        {"trainer.limit_train_batches": 0},
        "trainer.limit_train_batches",
        ["0 trains on nothing", "from 1"],
    ),
    "interval": ({"trainer.val_check_interval": 0}, "trainer.val_check_interval", ["0 is no interval", "steps from 1"]),
    "trainer key": ({"trainer.max_step": 4}, "trainer.max_step", ["unknown key", "did you mean max_steps?"]),
    "log": ({"trainer.log_every_n_steps": 0}, "trainer.log_every_n_steps", ["0 is below 1"]),
    "logger": ({"logger.kind": "wanb"}, "logger.kind", ["'wanb'", "did you mean wandb?", "tensorboard"]),
    "logger key": ({"logger.projekt": "x"}, "logger.projekt", ["did you mean project?"]),
    "project of csv": ({"logger.project": "x"}, "logger", ["project", "logger=wandb only", "this is csv"]),
    "tags": ({"logger": {"kind": "wandb", "tags": "a"}}, "logger.tags", ["'a' is not a list", "a list of words"]),
    "every": ({"checkpoint.every_n_steps": 0}, "checkpoint.every_n_steps", ["0 is below 1", "null for the last only"]),
    "best of nothing": ({"checkpoint.save_top_k": 3}, "checkpoint", ["save_top_k 3", "monitor is null", "val/loss"]),
    "monitor without validation": (
        {"checkpoint.monitor": "val/loss", "data.validation": None},
        "checkpoint.monitor",
        ["'val/loss'", "no data.validation"],
    ),
}

RULES = TOP | TARGETS | PLACES | SECTIONS


@pytest.mark.parametrize("rule", RULES)
def test_refuses(rule: str) -> None:
    edits, path, parts = RULES[rule]
    found = problems(edits)
    assert list(found) == [path]
    for part in parts:
        assert part in found[path]


def test_all_problems_at_once_in_the_order_of_the_sections() -> None:
    edits = {
        "checkpoint.save_top_k": -2,
        "optimizer.lr": "high",
        "strategy.micro_batches": 0,
        "trainer.max_steps": 0,
        "seed": 0.5,
        "mode": "fitt",
        "model.widht": 3,
        "unknown": 1,
        "data.shuffle": 1,
    }
    with pytest.raises(ConfigError) as caught:
        load_config(edited(small_config(), edits))
    found = [problem.path for problem in caught.value.problems]
    assert found == [
        "unknown",
        "mode",
        "seed",
        "strategy.micro_batches",
        "model.widht",
        "data.shuffle",
        "optimizer.lr",
        "trainer.max_steps",
        "checkpoint.save_top_k",
    ]
    reverse = edited(small_config(), dict(reversed(edits.items())))
    with pytest.raises(ConfigError) as again:
        load_config({key: reverse[key] for key in reversed(reverse)})
    assert [problem.path for problem in again.value.problems] == found
    assert str(caught.value).startswith("9 problems in the config\n  unknown ")


@pytest.mark.parametrize("data", [None, [], "fit", 3])
def test_refuses_what_is_no_mapping(data: object) -> None:
    with pytest.raises(ConfigError, match="is not a mapping; allowed: mode, seed"):
        load_config(data)


def test_a_module_that_fails_names_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no licence\\nhere')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = problems({"model._target_": "broken_module.Net"})["model._target_"]
    assert "broken_module cannot be imported: RuntimeError: no licence here" in text
    assert "broken_module.py:1" in text


def test_a_module_that_exits_names_its_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exiting_module.py").write_text("import sys\nsys.exit('bye')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "SystemExit: bye" in problems({"model._target_": "exiting_module.Net"})["model._target_"]


# ---- what is allowed ----


@pytest.mark.parametrize(
    "edits",
    [
        {"scheduler": None},
        {"scheduler": DROPPED, "logger": DROPPED, "callbacks": DROPPED, "checkpoint": DROPPED, "trainer": DROPPED},
        {"scheduler.warmup_steps": 1000},
        {"scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3}},
        {"callbacks.watcher": None},
        {"model": {"_target_": "config_targets.Anything", "whatever": [1, {"a": None}]}},
        {"model.rate": 1, "model.sizes": [3, 4], "model.options": {"a": 1}, "model.kind": "gelu"},
        {"model.inner": {"_target_": "torch.nn.Identity"}},
        {"model.inner": {"_target_": "builtins.dict", "any": 1}},
        {"model.depths": [1, 2, 3], "model.scale": 2},
        {"data.train": {"_target_": "config_targets.make_rows"}, "trainer.limit_train_batches": 3},
        {"data.collate": {"_target_": "config_targets.stack", "_partial_": True, "scale": 2.0}},
        {"data.train": {"_target_": "torch.utils.data.TensorDataset"}},
        {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0}},
        {"optimizer": {"_target_": "torch.optim.Muon", "lr": 0.1}},
        {"mode": "validate", "ckpt_path": "last"},
        {"mode": "predict"},
        {"timeout_s": 0.5, "trainer.gradient_clip_val": 0, "trainer.limit_val_batches": 0.5},
        {"checkpoint.monitor": "val/loss", "checkpoint.save_top_k": 3},
        {"checkpoint.save_top_k": -1},
        {"logger": {"kind": "wandb", "project": "x", "tags": ["a"]}},
        {"strategy": {}},
        {"cluster": {"nodes": "auto"}},
    ],
)
def test_allows(edits: dict[str, Any]) -> None:
    assert isinstance(loaded(edits), Config)


def test_the_config_keeps_what_was_given() -> None:
    plain = small_config()
    config = load_config(plain)
    assert config.resolved == plain
    plain["model"]["width"] = 8
    assert config.resolved["model"]["width"] == 4
    assert (config.mode, config.seed, config.global_batch, config.timeout_s) == ("fit", 0, 4, 30)
    assert config.strategy.micro_batches == 1
    assert len(config.cluster.devices) == 2
    assert config.data.of_mode("fit").arguments == {"num_rows": 8}
    assert config.data.of_mode("validate") is config.data.of_mode("predict") is config.data.validation
    assert config.data.shuffle
    tested = loaded({"mode": "test", "data.test": {"_target_": "config_targets.Rows", "num_rows": 3}}).data
    assert tested.of_mode("test") is tested.of_mode("predict") is tested.test
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_a_config_travels_to_another_process() -> None:
    config = loaded()
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert isinstance(again.model.build(), config_targets.Net)


def test_logger_options_are_those_that_are_set() -> None:
    logger = loaded({"logger": {"kind": "wandb", "project": "x", "name": None, "tags": ["a"]}}).logger
    assert logger.options == {"project": "x", "tags": ["a"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, 1), ({"val_check_interval": 0.5}, 1), ({"val_check_interval": 5}, None), ({"val_check_interval": None}, 1)],
)
def test_intervals_in_steps_go_over_epochs_and_fractions_do_not(given: dict[str, Any], expected: int | None) -> None:
    trainer = loaded({"trainer": {"max_steps": 5, **given}}).trainer
    assert trainer.check_val_every_n_epoch == expected
    kept = loaded({"trainer": {"max_steps": 5, "check_val_every_n_epoch": 2, **given}}).trainer
    assert kept.check_val_every_n_epoch == 2


# ---- building ----


def test_targets_are_built_with_nested_ones_inside() -> None:
    inner = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
    net = loaded({"model.inner": [inner, {"a": inner}], "model.options": {"b": 1}}).model.build()
    assert isinstance(net, config_targets.Net)
    assert isinstance(net.inner[0], torch.nn.Linear)
    assert net.inner[1]["a"].out_features == 3
    assert net.options == {"b": 1}


def test_what_is_built_keeps_no_piece_of_the_config() -> None:
    config = loaded({"model.options": {"b": 1}})
    config.model.build().options["b"] = 2
    assert config.model.arguments["options"] == {"b": 1}


def test_partial_targets_wait_for_the_rest() -> None:
    collate = loaded(
        {"data.collate": {"_target_": "config_targets.stack", "_partial_": True, "scale": 2.0}}
    ).data.collate
    assert collate is not None
    assert collate.build()([torch.ones(1)]).tolist() == [[2.0]]


def test_optimizer_and_schedule_are_made_over_named_parameters() -> None:
    config = loaded()
    optimizer = config.make_optimizer([("w", torch.nn.Parameter(torch.zeros(2)))])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert tuple(optimizer.param_groups[0]["betas"]) == (0.9, 0.95)
    schedule = config.make_scheduler(optimizer, 10)
    assert schedule.get_last_lr() == [pytest.approx(0.5e-3)]
    other = loaded({"scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3}})
    assert other.make_scheduler(optimizer, 10).step_size == 3


def test_what_a_constructor_raises_names_the_section_and_the_line() -> None:
    with pytest.raises(ConfigError) as caught:
        loaded({"model.width": 3}).model.build()
    (problem,) = caught.value.problems
    assert problem.path == "model"
    assert "config_targets.Net cannot be made: ValueError: width 3 is odd" in problem.message
    assert "config_targets.py:" in problem.message


def test_a_nested_target_that_is_wrong_when_built_names_itself() -> None:
    config = loaded(
        {"model": {"_target_": "config_targets.Anything", "x": {"_target_": "config_targets.Net", "width": 3}}}
    )
    with pytest.raises(ConfigError) as caught:
        config.model.build()
    assert caught.value.problems[0].path == "model.x"


def test_targets_made_in_python_are_checked_when_built() -> None:
    target = Target(path="model", target="config_targets.Anything", arguments={"x": {"_target_": 3}})
    with pytest.raises(ConfigError) as caught:
        target.build()
    assert caught.value.problems[0].path == "model.x._target_"


def test_warm_up_and_cosine() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_cosine(optimizer, num_steps=6, warmup_steps=2, final_fraction=0.5)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.92678, 0.75, 0.57322, 0.5, 0.5], abs=1e-5)


# ---- what is loaded ----


def test_the_config_itself_loads_no_torch_and_plans_load_no_lightning() -> None:
    script = (
        "import sys\n"
        "import whale_trainer.config\n"
        "assert not {'torch', 'pytorch_lightning', 'hydra', 'omegaconf'} & set(sys.modules)\n"
        "import yaml\n"
        "plain = yaml.safe_load(sys.stdin)\n"
        "whale_trainer.config.load_config(plain)\n"
        "assert not {'pytorch_lightning', 'wandb', 'hydra'} & set(sys.modules)\n"
    )
    plain = {
        "mode": "plan",
        "strategy": {},
        "cluster": {"nodes": "auto"},
        "model": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2},
        "data": {"train": {"_target_": "torch.utils.data.TensorDataset"}},
        "optimizer": {"_target_": "torch.optim.AdamW"},
        "callbacks": {"stop": {"_target_": "pytorch_lightning.callbacks.EarlyStopping", "monitor": "val/loss"}},
    }
    done = subprocess.run([sys.executable, "-c", script], input=str(plain), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
