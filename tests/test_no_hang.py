"""A job whose rank raises, dies or stalls, or that gets a signal, ends soon, says so once, and leaves no process."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import Command, start

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

SCRIPT = Path(__file__).with_name("launched.py")
DEVICE = "V100-SXM2-32GB on node0"
PEER_NOISE = ("Connection", "gloo", "Traceback", "torchelastic", "SIGTERM", "ChildFailedError")
"""Nothing of this belongs on the screen of a user whose rank 1 failed."""

Run = Callable[..., Command]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start the launcher's command with an entry; whatever is left of it is killed after the test."""
    commands = []

    def go(entry: str, num_ranks: int, *settings: str, folder: Path = tmp_path, **environ: str) -> Command:
        commands.append(start([SCRIPT, entry, str(num_ranks), *settings], folder, **environ))
        return commands[-1]

    yield go
    for command in commands:
        command.kill()


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Run]:
    """Start an agent of torchrun with the launcher's command."""
    commands = []

    def go(options: str, *arguments: str) -> Command:
        commands.append(start(["-m", "torch.distributed.run", *options.split(), SCRIPT, *arguments], tmp_path))
        return commands[-1]

    yield go
    for command in commands:
        command.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def elastic_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("torchelastic_*"))


def test_a_job_that_does_well(run: Run, tmp_path: Path) -> None:
    folders = elastic_folders()
    command = run("work", 4)
    assert command.end() == 0, command.err
    assert (command.out, command.err) == ("", "")
    done = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert done == {f"done{rank}": f"4 {rank} cpu" for rank in range(4)}
    assert elastic_folders() == folders
    assert command.leaves_nothing()


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("raise_error", f"rank 1 ({DEVICE}) failed: ValueError: probe-17\n  at "),
        ("raise_after_cleanup", f"rank 1 ({DEVICE}) failed: ValueError: probe-17\n  at "),
        ("report_and_block", f"rank 1 ({DEVICE}) failed: ValueError: probe-17\n  at "),
        ("call_sys_exit", f"rank 1 ({DEVICE}) failed: SystemExit: 0\n  at "),
        ("call_os_exit", f"rank 1 ({DEVICE}) ended with exit code 3 and no exception"),
        ("die_by_sigkill", f"rank 1 ({DEVICE}) was killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_the_job(run: Run, tmp_path: Path, entry: str, found: str) -> None:
    command = run(entry, 3)
    assert command.end(30) == 1
    assert command.seconds < 20
    assert command.err.startswith(found)
    assert command.err.count("rank 1 (") == 1
    assert "rank 0 (" not in command.err
    assert not [word for word in PEER_NOISE if word in command.err]
    assert command.leaves_nothing()
    if "failed" in found:
        log = tmp_path / "rank1.err"
        assert f"The whole traceback is in {log}" in command.err
        assert "Traceback (most recent call last)" in log.read_text()


@pytest.mark.parametrize("failing", [0, 2])
def test_any_rank_may_be_the_one_that_fails(run: Run, failing: int) -> None:
    command = run("raise_error", 3, f"failing={failing}")
    assert command.end(30) == 1
    assert command.err.startswith(f"rank {failing} (V100-SXM2-32GB on node{failing // 2}) failed: ValueError: probe-17")
    assert command.err.count("failed:") == 1


def test_a_single_rank_may_fail(run: Run) -> None:
    command = run("raise_error", 1, "failing=0")
    assert command.end(30) == 1
    assert command.err.startswith(f"rank 0 ({DEVICE}) failed: ValueError: probe-17")


def test_a_rank_that_never_comes_ends_the_job_when_time_is_out(run: Run) -> None:
    command = run("stall", 2, "timeout_s=2")
    assert command.end(30) == 1
    assert command.seconds < 20
    assert command.err.startswith(f"rank 0 ({DEVICE}) failed: RuntimeError")
    assert "Timed out" in command.err
    assert "No other rank failed: one did not come within timeout_s" in command.err
    assert command.leaves_nothing()


def test_what_the_ranks_refuse_is_told_once_and_is_no_failure(run: Run) -> None:
    command = run("refuse", 3)
    assert command.end(30) == 2
    assert command.err == "ConfigError: 1 problem in the config\n  trainer.accumulate_grad_batches  probe-18\n"


def test_a_killed_launcher_takes_its_ranks_along(run: Run, tmp_path: Path) -> None:
    command = run("wait_in_collective", 3)
    for rank in range(3):
        command.wait_for(tmp_path / f"ready{rank}")
    ranks = [
        pid for pid in command.pids() if Path(f"/proc/{pid}/stat").read_text().split()[3] == str(command.process.pid)
    ]
    assert len(ranks) == 3
    command.process.kill()
    time.sleep(1)
    assert not set(ranks) & set(command.pids())


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("target", ["launcher", "group"])
def test_a_signal_ends_the_job(run: Run, tmp_path: Path, signum: signal.Signals, code: int, target: str) -> None:
    command = run("wait_in_collective", 3)
    for rank in range(3):
        command.wait_for(tmp_path / f"ready{rank}")
    sent_at = time.perf_counter()
    os.killpg(command.process.pid, signum) if target == "group" else os.kill(command.process.pid, signum)
    assert command.end(30) == code
    assert time.perf_counter() - sent_at < 15
    assert command.err == ""
    assert command.leaves_nothing()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_rank_that_hears_no_signal_gets_six_seconds_or_a_second_signal(
    run: Run, tmp_path: Path, signals: int
) -> None:
    command = run("be_deaf", 2)
    for rank in range(2):
        command.wait_for(tmp_path / f"ready{rank}")
    sent_at = time.perf_counter()
    for _ in range(signals):
        os.kill(command.process.pid, signal.SIGINT)
        time.sleep(0.5)
    assert command.end(30) == 130
    seconds = time.perf_counter() - sent_at
    assert seconds < 4 if signals == 2 else 5.5 < seconds < 15
    assert command.leaves_nothing()


def test_two_jobs_at_once_do_not_meet(run: Run, tmp_path: Path) -> None:
    commands = []
    with socket.socket() as listener:  # the port that torch takes by default
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", 29500))
        listener.listen()
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            commands.append(run("work", 2, folder=tmp_path / name))
        assert [c.end() for c in commands] == [0, 0], commands
    assert [(tmp_path / name / "done1").read_text() for name in ("a", "b")] == ["2 1 cpu"] * 2


def test_the_users_port_is_used_again_and_again(run: Run, tmp_path: Path) -> None:
    command = run("work", 2, "runs=2", MASTER_PORT=str(free_port()))
    assert command.end() == 0, command.err
    assert (tmp_path / "done1").read_text() == "2 1 cpu"


def test_a_port_in_use_is_refused_by_number(run: Run) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        command = run("work", 2, MASTER_PORT=port)
        assert command.end() == 2
    assert f"MASTER_PORT  port {port} is in use; unset MASTER_PORT" in command.err
    assert command.leaves_nothing()


@pytest.mark.parametrize("port", ["http", "70000"])
def test_what_is_no_port_is_refused(run: Run, port: str) -> None:
    command = run("work", 2, MASTER_PORT=port)
    assert command.end() == 2
    assert f"MASTER_PORT  '{port}' is not a port" in command.err


@pytest.mark.parametrize(
    "environ",
    [
        {
            "SLURM_JOB_ID": "1",
            "SLURM_NTASKS": "1",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "1"},
    ],
    ids=["slurm", "rank", "world size"],
)
def test_variables_left_over_in_the_shell_do_not_matter(run: Run, tmp_path: Path, environ: dict[str, str]) -> None:
    command = run("work", 2, **environ)
    assert command.end() == 0, command.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"done0": "2 0 cpu", "done1": "2 1 cpu"}


def test_copies_started_by_srun_are_refused(run: Run) -> None:
    command = run("work", 2, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="8", SLURM_PROCID="0")
    assert command.end() == 2
    assert "srun started this command 8 times" in command.err
    assert "srun --ntasks=1" in command.err


def test_what_cannot_be_pickled_works_with_fork(run: Run, tmp_path: Path) -> None:
    command = run("use_model", 2)
    assert command.end() == 0, command.err
    assert [(tmp_path / f"done{r}").read_text() for r in range(2)] == ["40", "41"]


def test_what_cannot_be_pickled_is_refused_by_name_with_spawn(run: Run) -> None:
    command = run("use_model", 2, "start_method=spawn")
    assert command.end() == 2
    assert "cannot be sent to a spawned process" in command.err
    assert "lambda" in command.err


def test_spawned_ranks_work_too(run: Run, tmp_path: Path) -> None:
    command = run("work", 2, "start_method=spawn")
    assert command.end() == 0, command.err
    assert (tmp_path / "done1").read_text() == "2 1 cpu"


def test_torchrun_starts_the_ranks(torchrun: Run, tmp_path: Path) -> None:
    command = torchrun(f"--nproc-per-node 2 --master-port {free_port()}", "work", "2", "runs=2")
    assert command.end() == 0, command.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"done0": "2 0 cpu", "done1": "2 1 cpu"}
    assert command.leaves_nothing()


def test_torchrun_with_another_number_of_processes_is_refused(torchrun: Run) -> None:
    command = torchrun(f"--nproc-per-node 2 --master-port {free_port()}", "work", "3")
    assert command.end() == 1  # torchrun turns every code but 0 into 1
    assert command.err.count("the plan has 3 ranks, torchrun started 2 processes") == 1
    assert "--nproc-per-node, adding up to 3 over all nodes" in command.err
    assert command.leaves_nothing()


def test_under_torchrun_the_first_failure_is_told_once(torchrun: Run) -> None:
    command = torchrun(f"--nproc-per-node 2 --master-port {free_port()}", "raise_error", "2")
    assert command.end() == 1
    assert command.seconds < 30
    assert command.err.count(f"rank 1 ({DEVICE}) failed: ValueError: probe-17") == 1
    assert f"rank 0 ({DEVICE}) failed" not in command.err
    assert command.leaves_nothing()


def test_nodes_of_torchrun_may_hold_different_numbers_of_ranks(torchrun: Run, tmp_path: Path) -> None:
    common = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id 7"
    agents = [torchrun(f"{common} --nproc-per-node {number}", "work", "3") for number in (1, 2)]
    assert [agent.end() for agent in agents] == [0, 0], [agent.err for agent in agents]
    done = sorted(path.read_text() for path in tmp_path.iterdir())
    assert done == ["3 0 cpu", "3 0 cpu", "3 1 cpu"]
    assert all(agent.leaves_nothing() for agent in agents)
