"""Progress: one bar on a terminal, plain lines elsewhere, nothing when asked."""

from __future__ import annotations

import io
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
        clock.now = 20.5  # too soon for another line
        progress.update(21, loss=0.5)
        clock.now = 21.5
        progress.update(22)  # the last numbers stay
        progress.message("epoch 1  top-1 97.50 %")
        clock.now = 22.0
        progress.update(100, loss=0.25)
    assert stream.getvalue().splitlines() == [
        "step 20/100  loss 0.5123  1,234 images/s  2:40 left",
        "step 22/100  loss 0.5000  1,234 images/s  2:20 left",
        "epoch 1  top-1 97.50 %",
        "step 100/100  loss 0.2500  1,234 images/s  0:00 left",
    ]


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
    assert "loss 0.2500, 201 images/s" in text
    assert any(line.strip("\r ") == "epoch 1  top-1 97.50 %" for line in text.replace("\r", "\n").splitlines())


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
