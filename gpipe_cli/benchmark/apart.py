"""A function in a process of its own: whatever it computes, the caller stays fit to be forked from.

A process that has run a parallel torch operation, or touched CUDA, cannot be forked safely any more.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

from gpipe_cli.distributed import processes
from gpipe_cli.errors import GpipeError, RankFailedError

P = ParamSpec("P")
T = TypeVar("T")


def context() -> Any:
    """How processes are started: by fork on Linux, where it takes milliseconds; the parent must be clean."""
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)` computed by a child. Raises its GpipeError; RankFailedError when it fails otherwise.

    The function must be of module level, its arguments and result picklable.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    flush()
    child = context().Process(target=_compute, args=(os.getpid(), theirs, function, args, kwargs))
    child.start()
    theirs.close()
    try:
        error, result = ours.recv()
    except EOFError:
        child.join()
        raise RankFailedError(0, f"ended with exit code {child.exitcode} and without a message") from None
    except BaseException:
        child.kill()
        raise
    finally:
        ours.close()
    child.join()
    if error is not None:
        raise error
    value: T = result
    return value


def flush() -> None:
    """Before a fork, or the child would write the buffered text once more."""
    sys.stdout.flush()
    sys.stderr.flush()


def _compute(parent: int, connection: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    processes.reset_signals()
    processes.die_with_parent(parent)
    try:
        connection.send((None, function(*args, **kwargs)))
    except GpipeError as error:
        connection.send((error, None))
