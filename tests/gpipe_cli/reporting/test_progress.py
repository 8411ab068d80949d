"""Progress: one bar on a terminal, plain lines elsewhere, nothing when asked."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading

import pytest

from gpipe_cli.reporting.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_tell_loss_speed_and_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("auto", 100, done=10, stream=stream, clock=clock) as progress:
        clock.now = 20.0
        progress.update(20, loss=0.51234, samples_per_s=1234.5)
        clock.now = 24.5  # too soon for another line
        progress.update(21, loss=0.5)
        clock.now = 25.0
        progress.update(22)  # the last numbers stay
        progress.message("epoch 1  top-1 97.50 %")
        clock.now = 26.0
        progress.update(100, loss=0.25)
    assert stream.getvalue().splitlines() == [
        "step 20/100  loss 0.5123  1,234 images/s  2:40 left",
        "step 22/100  loss 0.5000  1,234 images/s  2:42 left",
        "epoch 1  top-1 97.50 %",
        "step 100/100  loss 0.2500  1,234 images/s  0:00 left",
    ]


def test_plain_lines_come_every_five_seconds_whatever_the_steps_take() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("plain", 1000, stream=stream, clock=clock) as progress:
        for step in range(1, 1001):
            clock.now = step * 0.0401  # forty seconds in all
            progress.update(step)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 9  # the first, seven or eight in between, the last
    assert lines[0].startswith("step 1/1000")
    assert lines[-1].startswith("step 1000/1000")


def test_bar_shows_the_same_and_leaves_messages_whole() -> None:
    stream = Terminal()
    threads = threading.active_count()
    with Progress("auto", 100, stream=stream) as progress:
        progress.update(50, loss=0.5, samples_per_s=200.0)
        progress.update(51)
        progress.message("epoch 1  top-1 97.50 %")
        progress.update(100, loss=0.25, samples_per_s=201.0)
        assert threading.active_count() == threads  # a watching thread would be forked into the loader's workers
    text = stream.getvalue()
    assert "step 100/100" in text
    assert "left], loss 0.2500, 201 images/s" in text
    assert any(line.strip("\r ") == "epoch 1  top-1 97.50 %" for line in text.replace("\r", "\n").splitlines())


def test_a_terminal_that_tells_no_size_gets_a_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    main_end, terminal = os.openpty()  # of no columns and rows, until somebody sets them
    with open(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)  # as a program sees it
        with Progress("auto", 10) as progress:
            progress.update(10, loss=0.25)
        monkeypatch.undo()
    os.set_blocking(main_end, False)
    shown = ""
    with contextlib.suppress(OSError):  # at the end
        while chunk := os.read(main_end, 10_000).decode():
            shown += chunk
    os.close(main_end)
    assert "100% |" in shown
    assert "step 10/10" in shown


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_none_says_nothing(stream: io.StringIO) -> None:
    with Progress("none", 10, stream=stream) as progress:
        progress.update(10, loss=1.0)
        progress.message("text")
    assert stream.getvalue() == ""


def test_resumed_and_empty_runs_do_not_divide_by_zero() -> None:
    stream = io.StringIO()
    with Progress("plain", 0, stream=stream) as progress:
        progress.update(0)
    with Progress("plain", 5, done=5, stream=stream) as progress:
        progress.update(5)
    assert stream.getvalue().splitlines() == ["step 0/0", "step 5/5"]


def test_durations_are_read_at_a_glance() -> None:
    assert [duration(seconds) for seconds in (-1, 5, 65, 3723.4)] == ["0:00", "0:05", "1:05", "1:02:03"]
