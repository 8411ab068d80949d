"""Runs a function in every rank and returns what rank 0 returned.

Three ways: joining the ranks that torchrun or Slurm has started, a plain call if one rank is enough, or local processes
through torch's elastic launcher. The elastic launcher watches its workers, so a rank that dies is noticed by its death
and ends the run within a second; timeouts of the communication library are only a last resort (see OPERATION_LIMIT).
"""

from __future__ import annotations

import itertools
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
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gpipe_cli.distributed import processes
from gpipe_cli.distributed.devices import RankPlan
from gpipe_cli.distributed.failures import Failure, first_cause
from gpipe_cli.distributed.rendezvous import JoinedWorld, find_joined_world, open_store, requested_port, use_loopback
from gpipe_cli.errors import ConfigError, RankFailedError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

P = TypeVar("P")
R = TypeVar("R")

# A receive may rightly wait for very long: one rank downloads or scans a data set while the others wait. Nothing is
# lost by patience, because a dead rank is noticed by its death. Only a whole machine can vanish without closing its
# connections, so where there are several the wait ends some day.
OPERATION_LIMIT = timedelta(hours=24)
JOINED_OPERATION_LIMIT = timedelta(hours=2)
# How long a rank that lost its neighbour stays quiet, for the launcher to end it after it has seen the first cause.
_SECONDARY_WAIT_S = 5.0
_MONITOR_INTERVAL_S = 0.05
# How long the end of an interrupted run is waited for; workers that still exist are then killed and left to the system.
_INTERRUPT_LIMIT_S = 8.0
# A number, no name. Looking up a name takes a lock of the C library, which fork() copies as it is: a rank forked while
# the store's thread looks up another that has just connected would wait for it for ever (seen with glibc 2.36).
_THIS_MACHINE = "127.0.0.1"
_run_numbers = itertools.count()  # the same in every rank
_FAILURE_KEY = "gpipe/first failure"


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """This process's place in the run; `device` is "cpu" or "cuda:<index>"."""

    rank: int
    world_size: int
    local_rank: int
    device: str
    num_threads: int

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0


def launch(worker: Callable[[RankContext, P], R], payload: P, plan: RankPlan) -> R:
    """Calls `worker(context, payload)` once in every rank and returns rank 0's result.

    Under torchrun or Slurm this process is one of the ranks, and its own result is returned. With more than one rank
    the default process group exists during the call. Unless there is one rank only, `worker` must be a module-level
    function, `payload` and the result must be picklable.

    Raises the GpipeError of the rank that failed first; RankFailedError if it failed by a bug (its traceback has then
    been printed to stderr) or was killed; KeyboardInterrupt after Ctrl-C; SystemExit(128 + n) after another deadly
    signal n. No process is left then.
    """
    world = find_joined_world(os.environ)
    if world is not None:
        return _run_joined(worker, payload, plan, world)
    if plan.num_ranks == 1:
        return worker(_prepare_rank(plan, rank=0, world_size=1, local_rank=0), payload)
    return _run_local(worker, payload, plan)


def _prepare_rank(plan: RankPlan, *, rank: int, world_size: int, local_rank: int) -> RankContext:
    import torch

    torch.set_num_threads(plan.num_threads)
    device = "cpu"
    if plan.device_type == "cuda":
        # Slurm may show each task its own GPU only, as number 0.
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    return RankContext(
        rank=rank, world_size=world_size, local_rank=local_rank, device=device, num_threads=plan.num_threads
    )


def _run_in_group(
    worker: Callable[[RankContext, P], R],
    payload: P,
    plan: RankPlan,
    world: JoinedWorld,
    store: Store,
    limit: timedelta,
) -> R:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    context = _prepare_rank(plan, rank=world.rank, world_size=world.world_size, local_rank=world.local_rank)
    if not dist.is_initialized():  # a joined process keeps its group from run to run of a sweep
        dist.init_process_group(
            plan.backend,
            store=PrefixStore(f"run {next(_run_numbers)}", store),  # a used store holds the addresses of old groups
            rank=world.rank,
            world_size=world.world_size,
            timeout=limit,
            device_id=torch.device(context.device) if plan.backend == "nccl" else None,
        )
    result = worker(context, payload)
    # Only at a good end, as a barrier waits for all ranks.
    dist.barrier()
    if plan.backend == "nccl":
        dist.destroy_process_group()
    # Gloo's groups end with the process: their destructor waits for threads that may be waiting for the interpreter,
    # which it holds (seen with torch 2.6: one run in twenty never ended).
    return result


# --- ranks started by torchrun or Slurm ---


def _run_joined(worker: Callable[[RankContext, P], R], payload: P, plan: RankPlan, world: JoinedWorld) -> R:
    if world.world_size != plan.num_ranks:
        raise ConfigError("WORLD_SIZE", world.world_size, _world_size_problem(plan, world))
    if world.world_size == 1:
        return worker(_prepare_rank(plan, rank=0, world_size=1, local_rank=world.local_rank), payload)
    with processes.default_signals():
        if world.started_by == "torchrun":
            processes.die_with_parent(os.getppid())
        store = open_store(world, JOINED_OPERATION_LIMIT)
        try:
            return _run_in_group(worker, payload, plan, world, store, JOINED_OPERATION_LIMIT)
        except Exception as error:
            failure = Failure.of(world.rank, error)
            if failure.is_secondary:
                time.sleep(_SECONDARY_WAIT_S)
                raise RankFailedError(*_first_failure(store, failure)) from error
            if not _tell_others(store, failure):
                time.sleep(_SECONDARY_WAIT_S)  # one voice is enough: torchrun ends this rank meanwhile
            if failure.error is not None:
                raise
            print(failure.traceback, end="", file=sys.stderr, flush=True)
            raise RankFailedError(failure.rank, failure.message) from error


def _world_size_problem(plan: RankPlan, world: JoinedWorld) -> str:
    count = "1 process" if world.world_size == 1 else f"{world.world_size} processes"
    start = {
        "torchrun": f"torchrun --nproc-per-node={plan.num_ranks} (on one machine)",
        "srun": f"srun --ntasks={plan.num_ranks}",
    }.get(world.started_by, f"WORLD_SIZE={plan.num_ranks}, or unset RANK and WORLD_SIZE to let gpipe start its own")
    fewer = f", or ranks={world.world_size}" if world.world_size < plan.num_ranks else ""
    return f"{world.started_by} started {count}, but this run needs {plan.num_ranks}; type {start}{fewer}"


def _tell_others(store: Store, failure: Failure) -> bool:
    """Leave word of a failure unless another rank was first; False if that one has failed by the same cause."""
    own = f"{failure.rank} {failure.message}"
    try:
        first = store.compare_set(_FAILURE_KEY, "", own).decode()
    except Exception:  # the store is lost with rank 0; the others then report what they saw themselves
        return True
    return first == own or first.partition(" ")[2] != failure.message


def _first_failure(store: Store, own: Failure) -> tuple[int, str]:
    """Rank and message of the failure that was first in all the world, as far as this rank can know."""
    try:
        if store.check([_FAILURE_KEY]):
            rank, message = store.get(_FAILURE_KEY).decode().split(" ", 1)
            return int(rank), message
    except Exception:  # the store went down with the rank that failed
        pass
    return own.rank, f"lost the connection to another rank ({own.message})"


# --- ranks started here ---


@dataclass(frozen=True, kw_only=True)
class _Job:
    worker: Callable[[RankContext, Any], Any]
    payload: Any
    plan: RankPlan
    notes: Path  # directory where the workers leave their process numbers and failures
    parent: int | None  # process to die with, None if a forkserver is in between (it ends with the launcher, by itself)


def _run_local(worker: Callable[[RankContext, P], R], payload: P, plan: RankPlan) -> R:
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
        result = _run_in_group(job.worker, job.payload, job.plan, world, store, OPERATION_LIMIT)
        return pickle.dumps(result) if world.rank == 0 else None
    except SystemExit as error:
        _leave(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        failure = Failure.of(world.rank, error)
        failure.write(job.notes)
        if failure.is_secondary:
            time.sleep(_SECONDARY_WAIT_S)
        _leave(1)


def _leave(exit_code: int) -> NoReturn:
    """End this process now; the ordinary way would wait for threads and connections that may be stuck."""
    for child in multiprocessing.active_children():  # data-loading processes
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
