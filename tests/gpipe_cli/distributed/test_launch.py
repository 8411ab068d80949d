"""What a user sees of the launcher: results, first causes, exit codes, and that no process outlives the run.

Each test runs `run_ranks.py` as a program. Reading its output to the end doubles as the check for orphans: the pipe
closes only when every process that holds it is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("run_ranks.py")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS")


@dataclass(frozen=True)
class Ended:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        return self.stderr.splitlines()[-1]


def start(*command: str, **environ: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a signal to the group, as Ctrl-C sends it, spares pytest
        env={**clean, **environ},
    )


def end(process: subprocess.Popen[str], limit_s: float = 60) -> Ended:
    """Wait until the program and all that it started are gone."""
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(f"processes were left after {limit_s} s; stdout: {stdout}; stderr: {stderr}")
    return Ended(process.returncode, stdout, stderr)


def run(*arguments: str, **environ: str) -> Ended:
    return end(start(str(PROGRAM), *arguments, **environ))


def start_and_wait_until_ready(case: str, num_ranks: int) -> subprocess.Popen[str]:
    process = start(str(PROGRAM), case, f"partitions={num_ranks}")
    assert process.stdout is not None
    for _ in range(num_ranks):
        assert "ready" in process.stdout.readline()
    return process


@contextlib.contextmanager
def listener(port: int = 0) -> Iterator[int]:
    """Something on this machine that is not a store and never answers."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("partitions", [1, 4])
def test_the_result_of_rank_0_comes_back_and_nothing_else_is_printed(partitions: int) -> None:
    ended = run("sums", f"partitions={partitions}", "threads=1", "times=2")  # as in a sweep
    total = sum(range(partitions))
    assert ended == Ended(0, f"rank 0 of {partitions} (cpu): sum {total}, main True\n", "")


def test_fewer_ranks_than_partitions_can_be_asked_for() -> None:
    assert "rank 0 of 2 (cpu): sum 1" in run("sums", "partitions=4", "ranks=2").stdout


def test_what_an_earlier_run_left_behind_is_not_collected_by_the_ranks() -> None:
    assert run("collects").stdout == "rank 0 has collected\n"


def test_the_ranks_of_this_machine_find_each_other_without_looking_up_a_name() -> None:
    assert run("address").stdout == "127.0.0.1\n"


def test_a_result_larger_than_a_pipe_comes_back_whole() -> None:
    assert run("big").stdout == "10000000 characters\n"


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_bug_shows_its_traceback_once_and_its_cause_last(start_method: str) -> None:
    ended = run("bug", f"start_method={start_method}")
    assert ended.exit_code == 1
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert ended.last_line == "gpipe: error: rank 1: KeyError: 'the bug of rank 1'"
    assert "closed by peer" not in ended.stderr


def test_an_error_of_the_user_is_one_line_with_its_own_exit_code() -> None:
    ended = run("user_error", "partitions=4")
    assert (ended.exit_code, ended.stderr) == (2, "gpipe: error: dataset.path=/nowhere: no such directory\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the threads of a process")
def test_a_run_that_failed_leaves_no_thread_in_its_launcher() -> None:
    # The store's thread, waited for by whatever collects the garbage later, was a suspect when a test run hung.
    ended = run("early_error", "lists_threads=yes")
    assert ended.exit_code == 1
    assert len(ended.stdout.splitlines()) == 1


def test_an_error_before_the_first_communication_ends_the_run() -> None:
    ended = run("early_error")
    assert (ended.exit_code, ended.stderr) == (1, "gpipe: error: the loss of step 3 is not a number\n")


@pytest.mark.parametrize("partitions", [2, 4])
def test_a_killed_rank_is_named_with_its_signal(partitions: int) -> None:
    ended = run("killed", f"partitions={partitions}")
    assert ended.exit_code == 1
    assert ended.stderr.startswith("gpipe: error: rank 1: killed by signal 9 (SIGKILL)")
    assert len(ended.stderr.splitlines()) == 1


def test_a_rank_that_leaves_without_a_word_is_named() -> None:
    ended = run("leaves")
    assert (ended.exit_code, ended.stderr) == (
        1,
        "gpipe: error: rank 1: ended with exit code 3 and without a message\n",
    )


def test_a_result_that_cannot_be_sent_back_is_reported() -> None:
    ended = run("unpicklable")
    assert ended.exit_code == 1
    assert ended.last_line.startswith("gpipe: error: rank 0: AttributeError")


def test_ctrl_c_leaves_no_process() -> None:
    process = start_and_wait_until_ready("computes", 2)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes of the group
    assert end(process, limit_s=10) == Ended(130, "", "gpipe: interrupted\n")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_the_launcher_alone_ends_all_ranks(number: signal.Signals, exit_code: int) -> None:
    process = start_and_wait_until_ready("waits", 4)
    process.send_signal(number)
    ended = end(process, limit_s=10)
    assert ended.exit_code == exit_code
    assert "Traceback" not in ended.stderr


def test_two_runs_at_once_beside_a_taken_default_port() -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # whoever else holds it serves the test as well
            stack.enter_context(listener(29500))
        both = [start(str(PROGRAM), "sums") for _ in range(2)]
        for process in both:
            assert end(process) == Ended(0, "rank 0 of 2 (cpu): sum 1, main True\n", "")


def test_a_taken_master_port_is_named() -> None:
    with listener() as port:
        ended = run("sums", MASTER_PORT=str(port))
    assert ended.exit_code == 2
    assert ended.stderr.startswith(f"gpipe: error: MASTER_PORT={port}: this port is already in use")
    assert len(ended.stderr.splitlines()) == 1


def environment(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def free_port() -> int:
    with listener() as port:
        return port


def test_ranks_that_were_started_by_hand_join_in_any_order_and_run_a_sweep() -> None:
    port = free_port()
    later_first = [start(str(PROGRAM), "sums", "times=2", **environment(rank, port)) for rank in (1, 0)]
    outputs = [end(process).stdout for process in later_first]
    assert outputs == [
        "rank 1 of 2 (cpu): sum 1, main False\n",
        "rank 0 of 2 (cpu): sum 1, main True\n",
    ]


def test_slurm_tasks_join() -> None:
    port = str(free_port())
    tasks = [
        start(str(PROGRAM), "sums", SLURM_PROCID=str(rank), SLURM_NTASKS="2", MASTER_ADDR="localhost", MASTER_PORT=port)
        for rank in range(2)
    ]
    assert "rank 0 of 2" in end(tasks[0]).stdout
    assert "rank 1 of 2" in end(tasks[1]).stdout


def test_a_taken_master_port_is_named_by_joined_ranks_in_under_20_s() -> None:
    with listener() as port:
        begin = time.monotonic()
        both = [start(str(PROGRAM), "sums", **environment(rank, port)) for rank in range(2)]
        ended = [end(process, limit_s=20) for process in both]
        assert time.monotonic() - begin < 20
    for rank in ended:
        assert rank.exit_code == 2
        assert f"MASTER_PORT={port}" in rank.last_line
        assert "Traceback" not in rank.stderr


def test_a_joined_neighbour_repeats_the_first_cause() -> None:
    """Nobody ends it, as torchrun would; the store, which rank 0 serves, is gone if rank 0 fails, but not here."""
    port = free_port()
    both = [start(str(PROGRAM), "bug", **environment(rank, port)) for rank in range(2)]
    neighbour, failed = (end(process) for process in both)
    assert failed.stderr.count("Traceback") == 1
    for rank in (neighbour, failed):
        assert rank.exit_code == 1
        assert rank.last_line == "gpipe: error: rank 1: KeyError: 'the bug of rank 1'"


def torchrun(*arguments: str, num_ranks: int = 2) -> Ended:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    return end(start(*launcher, str(PROGRAM), *arguments))


def test_torchrun_is_joined() -> None:
    lines = torchrun("sums").stdout.splitlines()
    assert sorted(lines) == ["rank 0 of 2 (cpu): sum 1, main True", "rank 1 of 2 (cpu): sum 1, main False"]


def test_a_world_of_the_wrong_size_is_refused_with_both_numbers() -> None:
    as_torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none"}
    ended = run("sums", "partitions=3", MASTER_PORT=str(free_port()), **as_torchrun)
    assert (ended.exit_code, ended.stderr) == (
        2,
        "gpipe: error: WORLD_SIZE=2: torchrun started 2 processes, but this run needs 3; "
        "type torchrun --nproc-per-node=3 (on one machine), or ranks=2\n",
    )


def test_under_torchrun_the_first_cause_is_the_last_thing_we_print() -> None:
    ended = torchrun("bug")
    assert ended.exit_code != 0
    ours = [line for line in ended.stderr.splitlines() if line.startswith("gpipe: ")]
    assert ours == ["gpipe: error: rank 1: KeyError: 'the bug of rank 1'"]
    assert "closed by peer" not in ended.stderr


def test_under_torchrun_a_killed_rank_takes_the_others_along() -> None:
    ended = torchrun("killed")
    assert ended.exit_code != 0
    assert "gpipe: " not in ended.stderr  # torchrun itself names the rank and its signal
    assert "SIGKILL" in ended.stderr
