"""Operating-system side of the launcher: signals, processes that die with their parent, and silence.

A worker is often stuck in native code, waiting for a tensor, where Python's signal handlers never run. Workers
therefore let deadly signals do what the system does with them: end the process at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

_DEADLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def reset_signals() -> None:
    """Give this process the system's own reaction to deadly signals, instead of Python's and the launcher's."""
    for number in _DEADLY:
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """As `reset_signals`, for a while; nothing happens in a thread, which may not set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _DEADLY}
    reset_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent(parent: int | None) -> None:
    """Have this process killed when `parent` ends, even by SIGKILL (None: whichever process is the parent).

    Linux does it by prctl(PR_SET_PDEATHSIG); elsewhere a thread looks every second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:  # it ended before the call
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collects the deadly signals that arrive in the meantime, instead of letting them interrupt anything.

    An exception out of a signal handler is no way to end the launcher: Python ignores one that is raised in a hook of
    fork(), where the launcher spends its start-up, and leaves locks behind.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in _DEADLY}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def announce(directory: Path) -> None:
    """Leave this process's number for `kill_announced`."""
    (directory / f"pid-{os.getpid()}").touch()


def kill_announced(directory: Path) -> None:
    """Kill the workers that have announced themselves; a number is not reused before the launcher has seen its end."""
    for path in directory.glob("pid-*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.name.removeprefix("pid-")), signal.SIGKILL)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Undo what the elastic launcher leaves in this process: variables, and workers if it was given up."""
    environ = dict(os.environ)
    others = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
            child.join(5)
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]


@contextlib.contextmanager
def garbage_stays_here() -> Iterator[None]:
    """Keep processes forked meanwhile from collecting what is garbage in this one.

    An earlier run's store may be among it. Its destructor waits for a thread of its own, which a forked process does
    not have, for ever (seen with torch 2.14: a run after one that had failed, in the same process).
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def quiet_launcher() -> Iterator[None]:
    """Keep the elastic launcher's own log lines off the terminal: we report failures, once.

    Its forking of a process with threads is also warned about (Python 3.12 and later). Those threads are the store's,
    which hold no lock that a worker takes.
    """
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
