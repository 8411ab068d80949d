"""Runs the parts, each in a process of its own: one that hangs, crashes or loses the device takes no other with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gpipe_cli.gpu_check.record import FAILED, NOT_MEASURED, Part, Row, Section
from gpipe_cli.gpu_check.sizes import Sizes
from gpipe_cli.gpu_check.worker import DONE, Began, Facts, Orders, work

# A process that reports nothing for so long after the deadline of its part is ended.
GRACE_S = 1.0


@dataclass(frozen=True)
class Told:
    """What a process sent before it ended: rows in order, the number of a check that had begun but sent no row."""

    rows: list[Row]
    unfinished: int | None
    facts: Facts | None
    ending: str | None  # None: it ended by itself, in order


class Runner:
    """`show` is called with every row as it comes. `start_method`: None for one that is safe beside CUDA."""

    def __init__(
        self, device: str, sizes: Sizes, show: Callable[[Part, Row], None], start_method: str | None = None
    ) -> None:
        # Torch is imported once, by a server that never touches the GPU; every process is forked from that.
        method = start_method or ("forkserver" if sys.platform != "win32" else "spawn")
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(["gpipe_cli.gpu_check.parts"])
        self._device, self._sizes, self._show = device, sizes, show
        self.facts: Facts | None = None

    def run(self, parts: Sequence[Part]) -> list[Section]:
        """All parts in order. Time that a part does not need is left to those after it."""
        began = time.monotonic()
        deadline = began
        sections = []
        for part in parts:
            deadline += part.limit_s
            part_began = time.monotonic()
            rows = self._run_part(part, deadline)
            sections.append(Section(part, rows, time.monotonic() - part_began))
        return sections

    def _run_part(self, part: Part, deadline: float) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < len(part.checks):
            told = self._listen(part, len(rows), deadline)
            self.facts = self.facts or told.facts
            rows += told.rows
            if time.monotonic() >= deadline - GRACE_S and len(rows) < len(part.checks):
                rows += self._not_measured(part, len(rows), told.unfinished)
            elif told.ending is not None:
                number = len(rows)  # the one that had begun, or the first, if it never got so far
                rows.append(self._shown(part, Row(part.checks[number].label, FAILED, {}, told.ending)))
        return rows

    def _not_measured(self, part: Part, first: int, unfinished: int | None) -> list[Row]:
        rows = []
        for number in range(first, len(part.checks)):
            reason = "did not end within the time of this part" if number == unfinished else "no time was left"
            rows.append(self._shown(part, Row(part.checks[number].label, NOT_MEASURED, {}, reason)))
        return rows

    def _listen(self, part: Part, first: int, deadline: float) -> Told:
        ours, theirs = self._context.Pipe(duplex=False)
        orders = Orders(part=part, first=first, device=self._device, sizes=self._sizes, deadline=deadline)
        process = self._context.Process(target=work, args=(theirs, orders))
        process.start()
        theirs.close()
        try:
            return self._collect(ours, process, part, deadline)
        finally:
            ours.close()
            _end(process)

    def _collect(self, connection: Connection, process: Any, part: Part, deadline: float) -> Told:
        rows: list[Row] = []
        unfinished, facts = None, None
        while connection.poll(max(0.0, deadline - time.monotonic())):
            try:
                message = connection.recv()
            except EOFError:
                process.join()
                ending = None if process.exitcode == 0 else f"the process ended with exit code {process.exitcode}"
                return Told(rows, unfinished, facts, ending)
            if message == DONE:
                break
            if isinstance(message, Facts):
                facts = message
            elif isinstance(message, Began):
                unfinished = message.number
            else:
                rows.append(self._shown(part, message))
                unfinished = None
        return Told(rows, unfinished, facts, None)

    def _shown(self, part: Part, row: Row) -> Row:
        self._show(part, row)
        return row


def _end(process: Any) -> None:
    """End a process with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()  # it had not yet made a group of its own
    process.join()
