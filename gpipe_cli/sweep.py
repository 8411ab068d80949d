"""`-m`: the jobs of a sweep, one after another, each in a process of its own.

A process each because a rank forks (start-up in half a second), which is safe only while its parent has not computed
with torch: a job that ran in this process would spoil it for the next.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gpipe_cli.catalogue import text_keys
from gpipe_cli.errors import ConfigError
from gpipe_cli.overrides import expand_sweep

_SECONDS_TO_STOP = 10  # a job that Ctrl-C has reached cleans up within this


def sweep_jobs(words: Sequence[str], command: str = "train") -> list[list[str]]:
    """The words of every job. Raises ConfigError for a sweep without single values."""
    return expand_sweep(words, text_keys(command))


def check_sweep(configs: Sequence[Any]) -> None:
    """Raises ConfigError when two jobs would write into one folder."""
    folders = [folder for config in configs if (folder := getattr(config, "run_dir", None)) is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            problem = (
                f"{folders.count(folder)} jobs of the sweep would write into it; leave it out, each run gets its own"
            )
            raise ConfigError("run_dir", folder, problem)


def run_sweep(command: str, jobs: Sequence[Sequence[str]]) -> int:
    """Runs `gpipe <command>` for every job; a failed one does not stop the rest. Returns the first exit code not 0."""
    exit_code = 0
    for number, words in enumerate(jobs, start=1):
        print(f"gpipe: job {number} of {len(jobs)}: {shlex.join(words)}", file=sys.stderr, flush=True)
        code = _run_job([sys.executable, "-m", "gpipe_cli", command, *words])
        exit_code = exit_code or code
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            return code
    return exit_code


def _run_job(arguments: Sequence[str]) -> int:
    with subprocess.Popen(arguments) as job:
        on_terminate = signal.signal(signal.SIGTERM, lambda *_: job.terminate())
        try:
            code = job.wait()
        except KeyboardInterrupt:  # a terminal has sent it to the job too
            try:
                job.wait(_SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                job.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, on_terminate)
    return code if code >= 0 else 128 - code
