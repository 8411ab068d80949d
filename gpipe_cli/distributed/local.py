"""Ranks that are started here, on this machine, through torch's elastic launcher.

It watches its workers, so a rank that dies is noticed by its death and ends the run within a second; timeouts of the
communication library are only a last resort (see OPERATION_LIMIT).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from traceback import clear_frames
from typing import Any, NoReturn

from gpipe_cli.distributed import processes
from gpipe_cli.distributed.devices import RankPlan
from gpipe_cli.distributed.failures import Failure, first_cause
from gpipe_cli.distributed.ranks import SECONDARY_WAIT_S, P, R, RankContext, run_in_group
from gpipe_cli.distributed.rendezvous import find_joined_world, open_store, requested_port, use_loopback

# A receive may rightly wait for very long: one rank downloads or scans a data set while the others wait. Nothing is
# lost by patience, because a dead rank is noticed by its death.
OPERATION_LIMIT = timedelta(hours=24)
_MONITOR_INTERVAL_S = 0.05
# How long the end of an interrupted run is waited for; workers that still exist are then killed and left to the system.
_INTERRUPT_LIMIT_S = 8.0
# A number, no name. Looking up a name takes a lock of the C library, which fork() copies as it is: a rank forked while
# the store's thread looks up another that has just connected would wait for it for ever (seen with glibc 2.36).
_THIS_MACHINE = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class _Job:
    worker: Callable[[RankContext, Any], Any]
    payload: Any
    plan: RankPlan
    notes: Path  # directory where the workers leave their process numbers and failures
    parent: int | None  # process to die with, None if a forkserver is in between (it ends with the launcher, by itself)


def run_local(worker: Callable[[RankContext, P], R], payload: P, plan: RankPlan) -> R:
    """Rank 0's result; see `launch`."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    port = requested_port(os.environ)
    if plan.start_method == "forkserver":
        multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])
    sys.stdout.flush()  # or every fork would write the buffered text once more
    sys.stderr.flush()
    with (
        processes.caught_signals() as received,
        processes.restored(),
        processes.garbage_stays_here(),
        processes.quiet_launcher(),
        tempfile.TemporaryDirectory(prefix="gpipe-") as scratch,
    ):
        notes = Path(scratch, "notes")
        notes.mkdir()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=plan.num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{_THIS_MACHINE}:{port or 0}",
            local_addr=_THIS_MACHINE,  # else the machine's own name is looked up
            max_restarts=0,
            monitor_interval=_MONITOR_INTERVAL_S,
            start_method=plan.start_method,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(scratch, "elastic"))),
        )
        parent = None if plan.start_method == "forkserver" else os.getpid()
        job = _Job(worker=worker, payload=payload, plan=plan, notes=notes, parent=parent)
        outcome = _supervised(lambda: elastic_launch(config, _local_rank)(job), received, notes)
        if received:
            _end_progress_line()
            raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])
        if isinstance(outcome, ChildFailedError):
            exit_codes = {rank: failure.exitcode for rank, failure in outcome.failures.items()}
            cause, traceback = first_cause(Failure.read_all(notes), exit_codes)
            _end_progress_line()
            print(traceback, end="", file=sys.stderr, flush=True)
            raise cause
    if isinstance(outcome, BaseException):
        raise outcome
    result: R = pickle.loads(outcome[0])
    return result


def _supervised(run: Callable[[], dict[int, Any]], received: list[int], notes: Path) -> dict[int, Any] | BaseException:
    """What `run` returns or raises. Once a signal is received, all workers are killed, which makes it end.

    In a thread of its own, the elastic launcher leaves the handling of signals to us.
    """
    outcome: list[dict[int, Any] | BaseException] = []

    def collect() -> None:
        try:
            outcome.append(run())
        except BaseException as error:
            # The frames hold the stores of this run, with their threads and ports: they end here, not some day.
            clear_frames(error.__traceback__)
            outcome.append(error)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    patience_s = _INTERRUPT_LIMIT_S
    while thread.is_alive() and patience_s > 0:
        thread.join(_MONITOR_INTERVAL_S)
        if received:
            processes.kill_announced(notes)
            patience_s -= _MONITOR_INTERVAL_S
    return outcome[0] if outcome else TimeoutError("the launcher did not end")


def _end_progress_line() -> None:
    """A rank that was ended may have left a progress bar on the terminal's last line."""
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _local_rank(job: _Job) -> bytes | None:
    """What every local process runs; the pickled result from rank 0."""
    processes.reset_signals()
    processes.die_with_parent(job.parent)
    processes.announce(job.notes)
    use_loopback(os.environ)
    world = find_joined_world(os.environ)  # the elastic launcher sets torchrun's variables
    assert world is not None
    try:
        store = open_store(world, OPERATION_LIMIT)
        result = run_in_group(job.worker, job.payload, job.plan, world, store, OPERATION_LIMIT)
        return pickle.dumps(result) if world.rank == 0 else None
    except SystemExit as error:
        _leave(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        failure = Failure.of(world.rank, error)
        failure.write(job.notes)
        if failure.is_secondary:
            time.sleep(SECONDARY_WAIT_S)
        _leave(1)


def _leave(exit_code: int) -> NoReturn:
    """End this process now; the ordinary way would wait for threads and connections that may be stuck."""
    for child in multiprocessing.active_children():  # data-loading processes
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
