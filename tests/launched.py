"""A command for the tests of the launcher: `python launched.py <entry> <num_ranks> [key=value ...]`.

Its ranks train nothing; they meet in collectives and fail in the way that `entry` names. Also runs under torchrun.
`start` and `Command` are the tests' side: they start such a command and look for processes that it left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENTRIES: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Settings:
    """What the launcher reads of a config, and what the entries need."""

    timeout_s: float = 60.0
    steps: int = 20
    failing: int = 1
    start_method: str = ""
    runs: int = 1
    model: Any = None


@dataclass
class Command:
    """A running command; `PROBE` in its environment marks all processes that come from it."""

    process: subprocess.Popen[str]
    probe: str
    started_at: float = field(default_factory=time.perf_counter)
    out: str = ""
    err: str = ""

    def end(self, timeout: float = 60.0) -> int:
        """Its exit code; the output is kept."""
        try:
            self.out, self.err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.process.returncode

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    def pids(self) -> list[int]:
        """Processes that come from this command and still run."""
        wanted = f"PROBE={self.probe}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it ended while we looked, or is not ours
                continue
        return found

    def leaves_nothing(self, within: float = 5.0) -> bool:
        deadline = time.perf_counter() + within
        while self.pids() and time.perf_counter() < deadline:
            time.sleep(0.1)
        return not self.pids()

    def wait_for(self, path: Path, timeout: float = 30.0) -> None:
        """Wait until the command has written `path`."""
        deadline = time.perf_counter() + timeout
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.perf_counter() < deadline, f"{path.name} was not written in {timeout} s"
            time.sleep(0.05)

    def kill(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=10)


def start(arguments: Sequence[str | Path], folder: Path, **environ: str) -> Command:
    """Start `python ARGUMENTS` in `folder`, in a session of its own."""
    probe = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PROBE": probe, "OMP_NUM_THREADS": "1", **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Command(process, probe)


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    ENTRIES[function.__name__] = function
    return function


def _meet(settings: Settings, info: Any, step: int) -> None:
    import torch
    import torch.distributed as dist

    value = torch.full((8,), float(info.rank), device=info.device)
    dist.all_reduce(value)
    assert value[0].item() == sum(range(info.world_size))


def _note(run_dir: Path, name: str, text: str = "") -> None:
    part = run_dir / f"{name}.part"
    part.write_text(text)
    part.replace(run_dir / name)


def _train(settings: Settings, run_dir: Path, info: Any, fail: Callable[[], Any] = lambda: None) -> None:
    """Meet in a collective each step; the failing rank does `fail` at step 3 while the others sit in the next one."""
    for step in range(settings.steps):
        _meet(settings, info, step)
        if step == 3 and info.rank == settings.failing:
            fail()
    _note(run_dir, f"done{info.rank}", f"{info.world_size} {info.local_rank} {info.device}")


@entry
def work(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    _train(settings, run_dir, info)


@entry
def raise_error(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    def fail() -> None:
        raise ValueError("probe-17")

    _train(settings, run_dir, info, fail)


@entry
def raise_after_cleanup(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    """The failing rank drops its connections and then lingers, so that its peers end before it does."""
    import torch.distributed as dist

    def fail() -> None:
        try:
            raise ValueError("probe-17")
        finally:
            dist.destroy_process_group()
            time.sleep(4)

    _train(settings, run_dir, info, fail)


@entry
def report_and_block(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    """The failing rank tells of its error and then blocks in clean-up, its connections open."""
    from whale_trainer.failure import report

    def fail() -> None:
        try:
            raise ValueError("probe-17")
        except ValueError as error:
            report(error)
            time.sleep(60)

    _train(settings, run_dir, info, fail)


@entry
def call_os_exit(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    _train(settings, run_dir, info, lambda: os._exit(3))


@entry
def die_by_sigkill(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    _train(settings, run_dir, info, lambda: os.kill(os.getpid(), signal.SIGKILL))


@entry
def call_sys_exit(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    _train(settings, run_dir, info, lambda: sys.exit(0))


@entry
def stall(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    """One rank never comes to the collective; the others' time runs out."""
    _train(settings, run_dir, info, lambda: time.sleep(60))


@entry
def refuse(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    from whale_trainer.errors import ConfigError, Problem

    raise ConfigError([Problem("trainer.accumulate_grad_batches", "probe-18")])


@entry
def wait_in_collective(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    """All ranks but the failing one wait in a collective, as does a child of theirs that would outlive them."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    _note(run_dir, f"ready{info.rank}")
    if info.rank != settings.failing:
        _meet(settings, info, 0)
    time.sleep(60)


@entry
def be_deaf(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    """The failing rank's main thread hears no signal, the others wait for it in a collective."""
    if info.rank == settings.failing:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    _note(run_dir, f"ready{info.rank}")
    if info.rank != settings.failing:
        _meet(settings, info, 0)
    time.sleep(60)


@entry
def use_model(settings: Settings, plan: Any, spec: Any, run_dir: Path, info: Any) -> None:
    _note(run_dir, f"done{info.rank}", str(settings.model(info.rank)))


def make_plan(num_ranks: int) -> Any:
    """One layer, replicated over devices of which two stand in each node."""
    from whale_trainer.planning.plan import Plan, PlannedDevice, Shard, Tile
    from whale_trainer.planning.shares import Interval

    return Plan(
        tiles=tuple(Tile(Interval(0, 1), Interval(r, r + 1), (Shard(r),)) for r in range(num_ranks)),
        layer_names=("only",),
        micro_batches=1,
        global_batch=num_ranks,
        schedule="gpipe",
        devices=tuple(PlannedDevice(r, "V100-SXM2-32GB", f"node{r // 2}", 1 << 30) for r in range(num_ranks)),
    )


def main() -> int:
    from whale_trainer.errors import ConfigError
    from whale_trainer.launch import join_torchrun, launch, release_torchrun, torchrun_rank

    if torchrun_rank():
        return join_torchrun()
    name, num_ranks, *assignments = sys.argv[1:]
    settings = Settings(**{k: type(getattr(Settings, k))(v) for k, v in (a.split("=") for a in assignments)})
    if name == "use_model":
        settings = Settings(start_method=settings.start_method, model=lambda rank: rank + 40)
    code = 1
    try:
        for _ in range(settings.runs):
            code = launch(
                settings,
                make_plan(int(num_ranks)),
                None,
                Path.cwd(),
                entry=ENTRIES[name],
                start_method=settings.start_method or None,
            )
        return code
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        code = 2
        return code
    finally:
        release_torchrun(code)


if __name__ == "__main__":
    sys.exit(main())
