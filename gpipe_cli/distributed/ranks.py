"""One rank of a run: its place, its device, its process group; the same whoever has started it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from gpipe_cli.distributed.devices import RankPlan
from gpipe_cli.distributed.rendezvous import JoinedWorld

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

P = TypeVar("P")
R = TypeVar("R")

# How long a rank that lost its neighbour stays quiet, for the launcher to end it after it has seen the first cause.
SECONDARY_WAIT_S = 5.0
_run_numbers = itertools.count()  # the same in every rank


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


def prepare_rank(plan: RankPlan, *, rank: int, world_size: int, local_rank: int) -> RankContext:
    """Give this process its threads and its device."""
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


def run_in_group(
    worker: Callable[[RankContext, P], R],
    payload: P,
    plan: RankPlan,
    world: JoinedWorld,
    store: Store,
    limit: timedelta,
) -> R:
    """What `worker(context, payload)` returns, called while the default process group of all ranks exists.

    `limit`: how long the group's operations wait for another rank. Raises what `worker` raises.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    context = prepare_rank(plan, rank=world.rank, world_size=world.world_size, local_rank=world.local_rank)
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
