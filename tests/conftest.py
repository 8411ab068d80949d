"""What tests share: one thread a process, and real ranks over Gloo."""

from __future__ import annotations

import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hang_watch import HangWatch

# One thread before any parallel operation: results are bit-reproducible, and forking is safe (no thread pool exists).
torch.set_num_threads(1)

RANK_TIMEOUT_S = 100.0
HANGS_AFTER_S = 240.0  # the slowest test takes a twentieth of this
WATCH = pytest.StashKey[HangWatch]()


def pytest_configure(config: pytest.Config) -> None:
    # In a script's background it is ignored, by all programs that are started from here too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[WATCH] = HangWatch(HANGS_AFTER_S)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[WATCH].begins(item.nodeid)


def pytest_enter_pdb(config: pytest.Config) -> None:
    config.stash[WATCH].stop()


def pytest_report_header() -> str:
    return (
        f"torch {torch.__version__}, {os.cpu_count()} cores, CUDA {'found' if torch.cuda.is_available() else 'absent'}"
    )


def _rank_main(
    rank: int,
    num_ranks: int,
    rendezvous: Path,
    pipe: multiprocessing.connection.Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # what is garbage in pytest's process is not to be collected here: it may wait for threads left there
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
        result = function(*args)
        buffer = io.BytesIO()
        torch.save(result, buffer)
        pipe.send((True, buffer.getvalue()))
        dist.barrier()
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    # Tearing a Gloo group down can wait for its threads for ever; this process has nothing left to do.
    os._exit(0)


class RankError(AssertionError):
    """A rank raised; the text is its exception and traceback."""


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """``run_ranks(num_ranks, function, *args)``: call it in that many Gloo processes; results in order."""
    counter = iter(range(1000))

    def run(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        rendezvous = tmp_path / f"rendezvous-{next(counter)}"
        context = multiprocessing.get_context("fork")
        ends = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(
                target=_rank_main, args=(rank, num_ranks, rendezvous, ends[rank][1], function, args), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + RANK_TIMEOUT_S
        results = []
        try:
            for rank, (receiving, _) in enumerate(ends):
                if not receiving.poll(max(0.0, deadline - time.monotonic())):
                    raise RankError(f"rank {rank} of {num_ranks} hangs")
                good, payload = receiving.recv()
                if not good:
                    raise RankError(f"rank {rank} of {num_ranks}: {payload}")
                results.append(torch.load(io.BytesIO(payload), weights_only=True))
        finally:
            for process in processes:
                process.join(2.0 if len(results) == num_ranks else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
        return results

    return run
