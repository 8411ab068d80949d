"""Runs a function in every rank and returns what rank 0 returned.

Three ways: joining the ranks that torchrun or Slurm has started, a plain call if one rank is enough, or local processes
through torch's elastic launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gpipe_cli.distributed.devices import RankPlan
from gpipe_cli.distributed.joined import run_joined
from gpipe_cli.distributed.local import run_local
from gpipe_cli.distributed.ranks import P, R, RankContext, prepare_rank
from gpipe_cli.distributed.rendezvous import find_joined_world

__all__ = ["RankContext", "launch"]


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
        return run_joined(worker, payload, plan, world)
    if plan.num_ranks == 1:
        return worker(prepare_rank(plan, rank=0, world_size=1, local_rank=0), payload)
    return run_local(worker, payload, plan)
