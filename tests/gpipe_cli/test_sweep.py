"""`-m`: jobs one after another, and the exit code of the first that fails."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from gpipe_cli import sweep
from gpipe_cli.compose import load
from gpipe_cli.errors import ConfigError


def run_with_codes(monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> tuple[int, list[list[str]]]:
    """The sweep's exit code and the jobs that it started, when the jobs end with the given codes."""
    started: list[list[str]] = []

    def run_job(arguments: list[str]) -> int:
        started.append(arguments)
        return codes[len(started) - 1]

    monkeypatch.setattr(sweep, "_run_job", run_job)
    return sweep.run_sweep("train", [[f"seed={seed}"] for seed in range(len(codes))]), started


def test_jobs_run_in_order_as_commands_of_their_own(monkeypatch, capsys) -> None:
    code, started = run_with_codes(monkeypatch, [0, 0])
    assert code == 0
    assert [arguments[1:] for arguments in started] == [["-m", "gpipe_cli", "train", f"seed={seed}"] for seed in (0, 1)]
    assert capsys.readouterr().err == "gpipe: job 1 of 2: seed=0\ngpipe: job 2 of 2: seed=1\n"


def test_a_failed_job_does_not_stop_the_rest_and_gives_the_exit_code(monkeypatch) -> None:
    code, started = run_with_codes(monkeypatch, [0, 1, 2, 0])
    assert (code, len(started)) == (1, 4)


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupted_job_ends_the_sweep(monkeypatch, code: int) -> None:
    assert run_with_codes(monkeypatch, [0, code, 0]) == (code, [*run_with_codes(monkeypatch, [0, code])[1]])


def test_the_exit_code_of_a_job_is_passed_on() -> None:
    assert sweep._run_job([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_a_killed_job_has_the_shells_exit_code() -> None:
    assert sweep._run_job([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 137


def test_terminating_the_sweep_terminates_the_job() -> None:
    # The job asks its parent (this process) to terminate, then would go on for a minute.
    job = f"import os, time; os.kill({os.getpid()}, {int(signal.SIGTERM)}); time.sleep(60)"
    before = signal.getsignal(signal.SIGTERM)
    assert sweep._run_job([sys.executable, "-c", job]) == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_two_jobs_may_not_share_a_run_folder() -> None:
    jobs = sweep.sweep_jobs(["run_dir=here", "partitions=1,2"])
    with pytest.raises(ConfigError) as refusal:
        sweep.check_sweep([load("train", job) for job in jobs])
    assert str(refusal.value) == (
        "run_dir=here: 2 jobs of the sweep would write into it; leave it out, each run gets its own"
    )
