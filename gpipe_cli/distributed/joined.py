"""Ranks that torchrun, Slurm or a user has started: this process is one of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from gpipe_cli.distributed import processes
from gpipe_cli.distributed.devices import RankPlan
from gpipe_cli.distributed.failures import Failure
from gpipe_cli.distributed.ranks import SECONDARY_WAIT_S, P, R, RankContext, prepare_rank, run_in_group
from gpipe_cli.distributed.rendezvous import JoinedWorld, open_store
from gpipe_cli.errors import ConfigError, RankFailedError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# Only a whole machine can vanish without closing its connections; where there may be several the wait ends some day.
JOINED_OPERATION_LIMIT = timedelta(hours=2)
_FAILURE_KEY = "gpipe/first failure"


def run_joined(worker: Callable[[RankContext, P], R], payload: P, plan: RankPlan, world: JoinedWorld) -> R:
    """This rank's own result; see `launch`. Raises ConfigError where the number of ranks is not the plan's."""
    if world.world_size != plan.num_ranks:
        raise ConfigError("WORLD_SIZE", world.world_size, _world_size_problem(plan, world))
    if world.world_size == 1:
        return worker(prepare_rank(plan, rank=0, world_size=1, local_rank=world.local_rank), payload)
    with processes.default_signals():
        if world.started_by == "torchrun":
            processes.die_with_parent(os.getppid())
        store = open_store(world, JOINED_OPERATION_LIMIT)
        try:
            return run_in_group(worker, payload, plan, world, store, JOINED_OPERATION_LIMIT)
        except Exception as error:
            failure = Failure.of(world.rank, error)
            if failure.is_secondary:
                time.sleep(SECONDARY_WAIT_S)
                raise RankFailedError(*_first_failure(store, failure)) from error
            if not _tell_others(store, failure):
                time.sleep(SECONDARY_WAIT_S)  # one voice is enough: torchrun ends this rank meanwhile
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
