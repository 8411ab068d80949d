"""Which rank failed first, and how to say it.

When one rank fails, its neighbours fail too, with "connection closed by peer". Every rank therefore leaves a record of
its own failure in a directory that the launcher made; from these and from the exit codes the launcher finds the cause.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.errors import GpipeError, RankFailedError

# What Gloo, NCCL and PyTorch's TCP store say when the other end is gone, or (the last three) never answers.
_PEER_FAILURE_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "connection refused",
    "socket closed",
    "failed to recv, got 0 bytes",
    "nccl communicator was aborted",
    "remote process exited or there was a network error",
    "ncclremoteerror",
    "application timeout caused pair closure",
    "timed out waiting",
    "connect timeout",
)


def is_peer_failure(exception: BaseException) -> bool:
    """Whether the exception only says that the connection to another rank is gone: that rank, not this one, has failed.

    torch.distributed raises these as RuntimeError; the same words in an OSError (a download, say) are this rank's own.
    """
    cause: BaseException | None = exception
    while cause is not None:
        if isinstance(cause, RuntimeError):
            text = str(cause).lower()
            if any(peer_text in text for peer_text in _PEER_FAILURE_TEXTS):
                return True
        cause = cause.__cause__
    return False


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed. `error` is set for what a user can cause, `traceback` (text) for a bug."""

    rank: int
    time_s: float
    message: str
    error: GpipeError | None
    traceback: str
    is_secondary: bool

    @staticmethod
    def of(rank: int, exception: BaseException) -> Failure:
        """The record of an exception that ends this rank."""
        return Failure(
            rank=rank,
            time_s=time.time(),
            message=describe(exception),
            error=exception if isinstance(exception, GpipeError) else None,
            traceback="".join(traceback.format_exception(exception)),
            is_secondary=is_peer_failure(exception),
        )

    def write(self, directory: Path) -> None:
        """Leave the record for the launcher; whole or not at all, since this process may be killed at any moment."""
        unfinished = directory / f".rank-{self.rank}"
        unfinished.write_bytes(pickle.dumps(self))
        os.replace(unfinished, directory / f"rank-{self.rank}")

    @staticmethod
    def read_all(directory: Path) -> list[Failure]:
        """All records that the ranks of this run have left, the earliest first."""
        # Our own children wrote these files into a directory only this user can enter: unpickling them is safe.
        failures = [pickle.loads(path.read_bytes()) for path in directory.glob("rank-*")]
        return sorted(failures, key=lambda failure: failure.time_s)


def describe(exception: BaseException) -> str:
    """One line: the class and the first line of what it says; of a GpipeError, just what it says."""
    if isinstance(exception, GpipeError):
        return str(exception)
    lines = str(exception).strip().splitlines()
    return f"{type(exception).__name__}: {lines[0]}" if lines else type(exception).__name__


def first_cause(failures: list[Failure], exit_codes: Mapping[int, int]) -> tuple[GpipeError, str]:
    """The error to raise for a failed run, and the traceback to show before it ("" if none helps).

    `failures` in order of time; `exit_codes` of the ranks that ended by themselves, as multiprocessing counts them
    (-9: killed by signal 9).
    """
    own = [failure for failure in failures if not failure.is_secondary]
    for rank, exit_code in exit_codes.items():
        # A rank that a signal killed left no record, and whatever others recorded came after. Except for an abort:
        # that is how NCCL's watchdog ends a rank whose neighbour is gone.
        if exit_code < 0 and not (own and -exit_code == signal.SIGABRT):
            return RankFailedError(rank, _killed_by(-exit_code)), ""
    if own:
        cause = own[0]
        if cause.error is not None:
            return cause.error, ""
        return RankFailedError(cause.rank, cause.message), cause.traceback
    for rank, exit_code in exit_codes.items():
        if all(failure.rank != rank for failure in failures):
            return RankFailedError(rank, f"ended with exit code {exit_code} and without a message"), ""
    if failures:
        cause = failures[0]
        return RankFailedError(cause.rank, f"lost the connection to another rank ({cause.message})"), ""
    return RankFailedError(0, "ended without a message"), ""


def _killed_by(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    hint = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"killed by signal {number} ({name}){hint}"
