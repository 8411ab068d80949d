"""What the user sees while a run works: one bar on a terminal, plain lines elsewhere, nothing when asked.

It is given numbers and never asks a device for one, so that showing progress does not slow the steps down.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

_LINE_EVERY_S = 5.0  # plain lines come no faster, so that the log of a run stays readable


class Progress:
    """Progress over `num_steps` optimizer steps, `done` of which an earlier run has made.

    `mode`: "bar", "plain", "none", or "auto", which is a bar where `stream` is a terminal and plain lines elsewhere.
    """

    def __init__(
        self,
        mode: str,
        num_steps: int,
        *,
        done: int = 0,
        unit: str = "images",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._num_steps, self._first, self._unit, self._clock = num_steps, done, unit, clock
        self._mode = ("bar" if self._stream.isatty() else "plain") if mode == "auto" else mode
        self._bar = self._open_bar() if self._mode == "bar" else None
        self._loss: float | None = None
        self._samples_per_s: float | None = None
        self._began = clock()
        self._last_line = float("-inf")

    def update(self, step: int, loss: float | None = None, samples_per_s: float | None = None) -> None:
        """Show that `step` steps are done. A loss or speed stays on show until a newer one is given."""
        self._loss = self._loss if loss is None else loss
        self._samples_per_s = self._samples_per_s if samples_per_s is None else samples_per_s
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._numbers()), refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._mode == "plain":
            now = self._clock()
            if now - self._last_line >= _LINE_EVERY_S or step >= self._num_steps:
                self._last_line = now
                self._print(self._line(step, now))

    def message(self, text: str, *, to: TextIO | None = None) -> None:
        """Print a line (an evaluation, a note) without tearing the bar. Mode "none" prints nothing.

        A result, for which another stream is given (`to`), is printed in every mode.
        """
        if self._bar is not None:
            self._bar.write(text, file=self._stream if to is None else to)
        elif to is not None:
            print(text, file=to, flush=True)
        elif self._mode == "plain":
            self._print(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _open_bar(self) -> Any:
        from tqdm import tqdm

        class Bar(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # no watching thread: loader processes are forked from this one

        return Bar(
            total=self._num_steps,
            initial=self._first,
            file=self._stream,
            **_size(self._stream),
            bar_format="{percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt} [{elapsed}, {remaining} left]{postfix}",
        )

    def _line(self, step: int, now: float) -> str:
        parts = [f"step {step}/{self._num_steps}", *self._numbers()]
        if step > self._first:
            left_s = (now - self._began) / (step - self._first) * (self._num_steps - step)
            parts.append(f"{duration(left_s)} left")
        return "  ".join(parts)

    def _numbers(self) -> list[str]:
        speed = [] if self._samples_per_s is None else [f"{self._samples_per_s:,.4g} {self._unit}/s"]
        return speed if self._loss is None else [f"loss {self._loss:.4f}", *speed]

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _size(stream: TextIO) -> dict[str, Any]:
    """tqdm's settings of the bar's size: a terminal that tells none (some containers) would show nothing at all."""
    try:
        told = os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # no real terminal: tqdm asks the environment
        told = True
    return {"dynamic_ncols": True} if told else {"ncols": 80, "nrows": 24}


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
