"""The command: compose, check, describe, plan, then show the plan or launch it; or measure this machine.

`mode=calibrate` writes `profile.yaml` and `cluster.yaml` into the run folder. `cluster.profile=PATH` (or a list of
paths, from several machines) plans with the measured times, `cluster=PATH.yaml` with a cluster file of one's own.

The only modules that know Hydra are this one and `hydra_errors`. A config is composed and checked before `hydra.main`
is entered, so that every mistake is told in our form and ends with exit code 2; Hydra stays for sweeps, `--help`,
`--cfg`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

import whale_trainer.conf
from whale_trainer.cluster import Cluster
from whale_trainer.config import Config, load_config
from whale_trainer.errors import CheckpointError, ConfigError, PlanError, Problem
from whale_trainer.hydra_errors import HYDRA_ERRORS, as_config_error
from whale_trainer.model_spec import ModelSpec
from whale_trainer.overrides import is_flag, prepare
from whale_trainer.planning.answer import Answer
from whale_trainer.planning.plan import Plan

CONF = Path(whale_trainer.conf.__path__[0]).resolve()

REFUSED = 2


@dataclass(frozen=True)
class Planned:
    """Everything that is known before a process starts."""

    config: Config
    answer: Answer
    spec: ModelSpec
    cluster: Cluster
    devices: tuple[str, ...] = ()
    note: str = ""

    @property
    def plan(self) -> Plan:
        return replace(self.answer.plan, model=self.spec)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run the command; 0 done, 2 refused before the start, 1 failed while running, 130 or 143 interrupted."""
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        from whale_trainer.launch import join_torchrun, torchrun_rank

        if torchrun_rank():
            return join_torchrun()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # modules of the user's beside the place where the command was given
    code = 1
    try:
        code = _run(prepare(argv, config_groups()))
    finally:
        if os.environ.get("TORCHELASTIC_RUN_ID"):
            from whale_trainer.launch import release_torchrun

            release_torchrun(code)
    return code


def _run(arguments: list[str]) -> int:
    start_dir = os.getcwd()
    if not any(is_flag(a) for a in arguments):
        try:
            load_config(plain_of(compose_config(arguments), start_dir))
        except ConfigError as error:
            return refuse(error)
    codes: list[int] = []

    def job(config: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        codes.append(run_job(config, folder, start_dir, list(HydraConfig.get().overrides.task)))

    sys.argv = [sys.argv[0], *arguments]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except HYDRA_ERRORS as error:
        return refuse(as_config_error(error))
    return codes[0] if len(codes) == 1 else int(any(codes))


def config_groups() -> tuple[str, ...]:
    """Names of the config groups."""
    return tuple(sorted(p.name for p in CONF.iterdir() if p.is_dir() and not p.name.startswith("_")))


def compose_config(arguments: Sequence[str]) -> DictConfig:
    """The composed config. Raises `ConfigError` for what Hydra refuses."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=list(arguments))
    except HYDRA_ERRORS as error:
        raise as_config_error(error) from error


def plain_of(config: DictConfig, start_dir: str) -> dict[str, Any]:
    """Plain, resolved data; paths of the user's are taken from the folder where the command was given."""
    try:
        with open_dict(config):
            for key in ("ckpt_path", "init_from", "data.path", "cluster.file", "cluster.profile"):
                value = OmegaConf.select(config, key, throw_on_missing=False)
                if isinstance(value, ListConfig):
                    OmegaConf.update(config, key, [_from(start_dir, item) for item in value])
                elif isinstance(value, str) and not (key == "ckpt_path" and value == "last"):
                    OmegaConf.update(config, key, _from(start_dir, value))
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except HYDRA_ERRORS as error:
        raise as_config_error(error) from error
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    return {str(key): value for key, value in plain.items()}


def _from(start_dir: str, path: Any) -> Any:
    """A path as seen from `start_dir`; anything else as it is, to be refused by the section it stands in."""
    return str(Path(start_dir, Path(path).expanduser())) if isinstance(path, str) else path


def run_job(config: DictConfig, folder: Path, start_dir: str, overrides: list[str]) -> int:
    """One job, in its run folder."""
    from whale_trainer.report.page import write_page
    from whale_trainer.report.trace_file import write_timeline

    try:
        checked = load_config(plain_of(config, start_dir))
        if checked.mode == "calibrate":
            return calibrate_job(checked, folder, overrides)
        if checked.mode == "export":
            return export_job(checked, folder)
        check_first_weights(checked)
        if checked.emulate and checked.profile is None:
            checked = with_emulated_profile(checked, folder)
        planned = make_plan_of(checked)
    except (ConfigError, PlanError) as error:
        with suppress(OSError):
            folder.rmdir()  # a refused command leaves nothing, if there was nothing before
        return refuse(error)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(planned.config.resolved, sort_keys=False))
    (folder / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    (folder / "plan.json").write_text(planned.plan.to_json(planned.spec))
    write_page(folder, planned.answer, planned.spec)
    write_timeline(folder, planned.answer.timeline, planned.plan)
    show(planned, folder)
    if planned.config.mode == "plan":
        from whale_trainer.report.summary import make_summary, write_summary

        write_summary(folder, make_summary(planned.plan, search_s=planned.answer.search_s, is_comparable=True))
        return 0
    return start(planned, folder)


def calibrate_job(config: Config, folder: Path, overrides: list[str]) -> int:
    """Measure this machine, print what was found and how to use it. Raises `ConfigError`, `PlanError`."""
    from rich.console import Console

    from whale_trainer.calibration import CLUSTER, PROFILE, calibrate, calibration_table
    from whale_trainer.describe import describe

    batch = example_batch(config)
    spec = describe(meta_model(config), batch)
    folder.mkdir(parents=True, exist_ok=True)
    found = calibrate(config, spec, batch, folder)
    if found.profile is None:
        return found.code
    (folder / "config.yaml").write_text(yaml.safe_dump(config.resolved, sort_keys=False))
    (folder / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    console = Console()
    console.print(calibration_table(found.profile))
    if found.note:
        console.print(found.note, highlight=False)
    place = os.path.relpath(folder, os.getcwd())
    how = f"plan with it: mode=plan cluster.profile={place}/{PROFILE}, and for this machine cluster={place}/{CLUSTER}"
    console.print(how, highlight=False, soft_wrap=True)
    return found.code


def with_emulated_profile(config: Config, folder: Path) -> Config:
    """The config with a profile of the emulated devices, which is measured now and written into the run folder."""
    from whale_trainer.calibration import PROFILE, calibrate
    from whale_trainer.describe import describe

    batch = example_batch(config)
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"measuring the model's layers on a core for the emulated devices; cluster.profile={folder}/{PROFILE} skips it"
    )
    found = calibrate(config, describe(meta_model(config), batch), batch, folder)
    if found.profile is None or found.code:
        raise PlanError(f"the emulated devices could not be calibrated (exit code {found.code}, reason above)")
    return config.model_copy(update={"profile": found.profile})


def check_first_weights(config: Config) -> None:
    """Raise `ConfigError` when `init_from` holds no weights of the model."""
    from whale_trainer.checkpoint import check_weights

    if config.init_from is None:
        return
    try:
        check_weights(config.init_from, meta_model(config))
    except CheckpointError as error:
        raise ConfigError([Problem("init_from", str(error))]) from error


def export_job(config: Config, folder: Path) -> int:
    """Write the checkpoint's weights as one file into the run folder. Raises `ConfigError` where there is none."""
    from whale_trainer.checkpoint import export_weights, newest_checkpoint, read_checkpoint

    assert config.ckpt_path is not None
    try:
        found = newest_checkpoint(folder) if config.ckpt_path == "last" else read_checkpoint(config.ckpt_path).path
    except CheckpointError as error:
        raise ConfigError([Problem("ckpt_path", str(error))]) from error
    if found is None:
        text = f"last: there is no whole checkpoint under {folder}; give the run's folder as hydra.run.dir"
        raise ConfigError([Problem("ckpt_path", text)])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    try:
        size = export_weights(found, file, meta_model(config))
    except CheckpointError as error:
        print(f"CheckpointError: {error}", file=sys.stderr)
        return 1
    print(f"{os.path.relpath(file, os.getcwd())}: the weights of {found.name}, {size / 1e6:,.1f} MB")
    return 0


def start(planned: Planned, folder: Path) -> int:
    """Launch the plan's ranks and wait for them."""
    from whale_trainer.launch import launch
    from whale_trainer.report.measured import joined, read_measured, typical
    from whale_trainer.report.page import write_page
    from whale_trainer.report.summary import settle_summary
    from whale_trainer.report.trace_file import write_timeline

    try:
        if planned.config.emulate:
            from whale_trainer.calibration import measure_paces

            batch = example_batch(planned.config)
            paces = measure_paces(planned.config, planned.plan, planned.spec, batch, planned.cluster, folder)
            paces.write(folder)
            print(paces.in_words)
        code = launch(planned.config, planned.plan, planned.spec, folder, devices=planned.devices)
    except (ConfigError, PlanError) as error:
        return refuse(error)
    settle_summary(folder, planned.plan, code, search_s=planned.answer.search_s)
    if steps := read_measured(folder):
        write_page(folder, planned.answer, planned.spec, measured=typical(steps))
        write_timeline(folder, planned.answer.timeline, planned.plan, measured=joined(steps))
    return code


def make_plan_of(config: Config) -> Planned:
    """Describe the model on the meta device and plan; builds no model in memory. Raises `ConfigError`, `PlanError`."""
    from whale_trainer.cluster import load_cluster
    from whale_trainer.describe import describe, optimizer_bytes
    from whale_trainer.devices import assign, found_cluster
    from whale_trainer.planning.planner import answer
    from whale_trainer.planning.simulation.profile import check_profile, with_measured_memory
    from whale_trainer.runtime.footprint import device_type_of, with_footprints

    cluster = load_cluster(found_cluster()) if config.cluster.is_auto else config.cluster
    precision = config.trainer.precision
    device_type = "cpu" if config.emulate else device_type_of(cluster)
    model, batch = meta_model(config), example_batch(config)
    spec = with_footprints(describe(model, batch), model, batch, precision=precision, device_type=device_type)
    if config.profile is not None:
        check_profile(config.profile, spec, precision)
        cluster = with_measured_memory(cluster, config.profile)
    found = answer(
        spec,
        cluster,
        config.strategy,
        global_batch=config.global_batch,
        precision=precision,
        optimizer=optimizer_bytes(config.make_optimizer, device_type=device_type),
        profile=config.profile,
    )
    if config.profile is not None:
        notes = (*found.plan.notes, *config.profile.notes_for(cluster, spec))
        found = replace(found, plan=replace(found.plan, notes=notes))
    if config.mode == "plan":
        return Planned(config, found, spec, cluster)
    devices, note = assign(found.plan, "cpu" if config.emulate else config.trainer.accelerator)
    return Planned(config, found, spec, cluster, tuple(devices), note)


def meta_model(config: Config) -> Any:
    """The config's model on the meta device."""
    from whale_trainer.describe import build_on_meta

    return build_on_meta(config.model.build)


def example_batch(config: Config) -> Any:
    """A batch of the first samples of the training data, as the loader would make it."""
    from torch.utils.data import default_collate

    dataset = config.data.train.build()
    try:
        samples = [dataset[i] for i in range(min(2, len(dataset)))]
        collate = default_collate if config.data.collate is None else config.data.collate.build()
        return collate(samples)
    except (ConfigError, PlanError):
        raise
    except Exception as error:
        message = f"its first samples cannot be made into a batch: {type(error).__name__}: {error}"
        raise ConfigError([Problem("data.train", message)]) from error


def show(planned: Planned, folder: Path) -> None:
    """Print the plan, where the ranks run, and the run folder."""
    from rich.console import Console

    from whale_trainer.report.paper import paper_line
    from whale_trainer.report.table import answer_table

    console = Console()
    console.print(answer_table(planned.answer, planned.spec))
    if planned.config.paper is not None:
        console.print(paper_line(planned.plan.predicted, planned.config.paper), highlight=False)
    if planned.note:
        console.print(planned.note, highlight=False)
    place = os.path.relpath(folder, os.getcwd())
    console.print(f"run folder: {place} (report.html shows the plan and its step)", highlight=False, soft_wrap=True)


def refuse(error: Exception) -> int:
    """Tell a refusal on standard error."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return REFUSED
