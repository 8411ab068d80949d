"""A process beside pytest's that notices a test which hangs, in whatever code, and ends the run.

The last thing it prints is the test's name, after the stacks of pytest's process and of all that were forked from it.
pytest's own `faulthandler_timeout` knows nothing of those, and its long stack is all that a log's end may keep.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

_DUMPED_WITHIN_S = 2.0
_OF_PYTEST = ("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen runpy>")


class HangWatch:
    """Ends pytest's process, which makes this, when a test takes more than `limit_s`. Linux only; else does nothing."""

    def __init__(self, limit_s: float) -> None:
        self._pipe: int | None = None
        if sys.platform != "linux":
            return
        # Inherited by every process that is forked: on the signal each appends its stacks, even out of native code.
        self._stacks = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (as long as this process)
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        names, self._pipe = os.pipe()
        pytest_process = os.getpid()
        if os.fork() == 0:
            os.close(self._pipe)
            _watch(names, pytest_process, limit_s, self._stacks.fileno())
        os.close(names)

    def begins(self, test: str) -> None:
        if self._pipe is not None:
            os.write(self._pipe, f"{test}\n".encode())

    def stop(self) -> None:
        """Watch no longer: somebody looks at a test in a debugger."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


def _watch(names: int, pytest_process: int, limit_s: float, stacks: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, whose end is noticed
    test, began = None, time.monotonic()
    try:
        while os.getppid() == pytest_process:
            if select.select([names], [], [], 1.0)[0]:
                read = os.read(names, 65536).decode()
                if not read:
                    break
                test, began = read.splitlines()[-1], time.monotonic()
            elif test is not None and time.monotonic() - began > limit_s:
                _report(test, limit_s, pytest_process, stacks)
                break
    except BaseException:
        _say(traceback.format_exc())
    finally:
        os._exit(0)


def _report(test: str, limit_s: float, pytest_process: int, stacks: int) -> None:
    family, forked = _family(pytest_process), _command(pytest_process)
    for process in family:
        command = _command(process)
        if command == forked:
            _say(f"process {process}, forked from pytest's:" if process != pytest_process else "pytest's process:")
            with contextlib.suppress(ProcessLookupError):
                _say(_stacks_of(process, stacks))
        else:
            _say(f"process {process}: {command}")
    for process in reversed(family):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    _say(f"HANGS: {test} (more than {limit_s:.0f} s; the stacks are above)")


def _stacks_of(process: int, stacks: int) -> str:
    before = os.fstat(stacks).st_size
    os.kill(process, signal.SIGUSR1)
    deadline, size = time.monotonic() + _DUMPED_WITHIN_S, -1
    while time.monotonic() < deadline and (size <= before or size != os.fstat(stacks).st_size):
        size = os.fstat(stacks).st_size
        time.sleep(0.1)  # until nothing is added any more
    lines = os.pread(stacks, 1_000_000, before).decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not any(part in line for part in _OF_PYTEST))


def _family(first: int) -> list[int]:
    """The process and its descendants, without the one that asks."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = [first]
    for process in family:  # which grows meanwhile
        family += [child for child, parent in parents.items() if parent == process and child != os.getpid()]
    return family


def _command(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").strip()
    return "ended"


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())
