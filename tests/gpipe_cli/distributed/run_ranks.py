"""A small program for the launch tests: `run_ranks.py <case> [key=value ...]` behaves as gpipe's command line does.

Every case is a worker that meets one situation. Ranks announce themselves on stdout, so that a test knows when to act.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from gpipe_cli.distributed.devices import plan_ranks
from gpipe_cli.distributed.launch import RankContext, launch
from gpipe_cli.errors import ConfigError, GpipeError, TrainingError


def receive_forever() -> NoReturn:
    """Wait in native code for a tensor that never comes, as the neighbours of a failed rank do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.recv(torch.empty(1), src=(rank + 1) % size)
    raise AssertionError("nobody sends")


def announce(context: RankContext) -> None:
    dist.barrier()
    sys.stdout.write(f"rank {context.rank} is ready\n")  # in one piece, unlike print
    sys.stdout.flush()
    dist.barrier()


def sums(context: RankContext, _: str) -> str:
    total = torch.full((1,), float(context.rank))
    if context.world_size > 1:
        assert dist.get_backend() == "gloo"
        dist.all_reduce(total)
    assert torch.get_num_threads() == context.num_threads
    place = f"rank {context.rank} of {context.world_size} ({context.device})"
    return f"{place}: sum {total.item():.0f}, main {context.is_main}"


def big(context: RankContext, _: str) -> str:
    return "x" * 10_000_000 if context.is_main else "not this one"


def address(context: RankContext, _: str) -> str:
    return os.environ["MASTER_ADDR"]


def collects(context: RankContext, _: str) -> str:
    gc.collect()
    return f"rank {context.rank} has collected"


class Garbage:
    """What a run that failed may leave. A store in its place would wait for its thread, which the ranks do not have."""

    def __init__(self) -> None:
        gc.disable()  # it is to be there still when the ranks are forked
        self.itself, self.home = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.home:
            os.write(1, b"collected by a rank\n")


def bug(context: RankContext, _: str) -> None:
    announce(context)
    if context.rank == 1:
        raise KeyError("the bug of rank 1")
    receive_forever()


def user_error(context: RankContext, _: str) -> None:
    announce(context)
    if context.rank == context.world_size - 1:
        raise ConfigError("dataset.path", "/nowhere", "no such directory")
    receive_forever()


def early_error(context: RankContext, _: str) -> None:
    """Before the first communication, while the other rank computes."""
    if context.rank == 1:
        raise TrainingError("the loss of step 3 is not a number")
    receive_forever()


def killed(context: RankContext, _: str) -> None:
    announce(context)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    receive_forever()


def leaves(context: RankContext, _: str) -> None:
    announce(context)
    if context.rank == 1:
        os._exit(3)
    receive_forever()


def waits(context: RankContext, _: str) -> None:
    announce(context)
    receive_forever()


def computes(context: RankContext, _: str) -> None:
    announce(context)
    while True:
        time.sleep(60)


def unpicklable(context: RankContext, _: str) -> object:
    return (lambda: None) if context.is_main else None


def main() -> int:
    case, *options = sys.argv[1:]
    given = dict(option.split("=") for option in options)
    start_method = given.pop("start_method", None)
    times = int(given.pop("times", "1"))
    lists_threads = given.pop("lists_threads", None)
    numbers = {key: int(value) for key, value in given.items()}
    try:
        plan = plan_ranks(
            partitions=numbers.get("partitions", 2),
            replicas=1,
            device="cpu",
            ranks=numbers.get("ranks"),
            threads=numbers.get("threads"),
        )
        if start_method:
            plan = dataclasses.replace(plan, start_method=start_method)
        if lists_threads:
            gc.disable()
        if case == "collects":
            Garbage()
        for _ in range(times):
            result = launch(globals()[case], "payload", plan)
    except GpipeError as error:
        print(f"gpipe: error: {error}", file=sys.stderr)
        if lists_threads:  # those of libraries too
            sys.stdout.write("".join(path.read_text() for path in Path("/proc/self/task").glob("*/comm")))
        return error.exit_code
    except KeyboardInterrupt:
        print("gpipe: interrupted", file=sys.stderr)
        return 130
    sys.stdout.write(f"{result}\n" if len(str(result)) < 1000 else f"{len(result)} characters\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
