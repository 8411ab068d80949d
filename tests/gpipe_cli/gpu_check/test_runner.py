"""A part that hangs, crashes or loses its device costs its own row, and time that is over is said to be over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.gpu_check.place import Place
from gpipe_cli.gpu_check.record import MEASURED, Check, CheckFailed, NotMeasured, Part, Row
from gpipe_cli.gpu_check.runner import Runner
from gpipe_cli.gpu_check.sizes import TINY


def fine(place: Place) -> dict[str, str]:
    place.kept["counter"] = place.kept.get("counter", 0) + 1
    return {"process": str(os.getpid()), "counter": str(place.kept["counter"])}


def wrong(place: Place) -> dict[str, str]:
    raise CheckFailed("2 instead of 3")


def impossible(place: Place) -> dict[str, str]:
    raise NotMeasured("the GPU is too small")


def out_of_memory(place: Place) -> dict[str, str]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


def lost_device(place: Place) -> dict[str, str]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def crash(place: Place) -> dict[str, str]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang(place: Place) -> dict[str, str]:
    # A program of its own, as the compilers that torch.compile starts; it ends by itself should nobody end it.
    subprocess.run([sys.executable, "-c", "import signal; signal.alarm(90); signal.pause()"])
    raise AssertionError


def is_alive(group: int) -> bool:
    """Whether a process of the group does anything still; those that only wait to be collected do not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def part(*checks: Any, limit_s: float = 60.0) -> Part:
    return Part(
        name="part", title="A part", introduction="It is.", columns=("process", "counter"), good=MEASURED,
        limit_s=limit_s, checks=tuple(Check(f"{index} {run.__name__}", run) for index, run in enumerate(checks)),
    )  # fmt: skip


def run(*parts: Part) -> list[list[Row]]:
    shown: list[Row] = []
    runner = Runner("cpu", TINY, lambda _, row: shown.append(row), start_method="fork")
    sections = runner.run(parts)
    assert shown == [row for section in sections for row in section.rows]
    assert runner.facts is not None
    assert runner.facts.device == "CPU"
    return [list(section.rows) for section in sections]


def test_rows_of_a_part_come_from_one_process_and_know_what_was_kept() -> None:
    ((first, second), (third,)) = run(part(fine, fine), part(fine))
    assert first.cells["process"] == second.cells["process"] != third.cells["process"]
    assert (first.cells["counter"], second.cells["counter"], third.cells["counter"]) == ("1", "2", "1")
    assert int(first.cells["process"]) != os.getpid()


def test_a_row_that_fails_says_why_and_the_rest_goes_on() -> None:
    [rows] = run(part(wrong, fine, impossible, out_of_memory, fine))
    assert [row.verdict for row in rows] == [
        "failed: 2 instead of 3",
        "measured",
        "not measured: the GPU is too small",
        "failed: out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "measured",
    ]
    assert rows[1].cells["process"] == rows[4].cells["process"]


def test_after_a_crash_or_an_error_of_the_device_a_new_process_goes_on() -> None:
    [rows] = run(part(fine, crash, fine, lost_device, fine))
    assert [row.verdict for row in rows] == [
        "measured",
        "failed: the process ended with exit code -9",
        "measured",
        "failed: RuntimeError: CUDA error: an illegal memory access was encountered",
        "measured",
    ]
    assert len({row.cells["process"] for row in rows if row.cells}) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_part_ends_with_its_time_and_so_do_the_processes_that_it_started() -> None:
    began = time.monotonic()
    (hung, after) = run(part(fine, hang, fine, limit_s=2.5), part(fine))
    assert time.monotonic() - began < 30
    assert [row.verdict for row in hung] == [
        "measured",
        "not measured: did not end within the time of this part",
        "not measured: no time was left",
    ]
    assert [row.outcome for row in after] == [MEASURED]
    group = int(hung[0].cells["process"])
    while is_alive(group):  # a signal takes its time to arrive
        assert time.monotonic() - began < 60


def test_time_that_a_part_does_not_need_is_left_to_the_next() -> None:
    def left(place: Place) -> dict[str, str]:
        return {"counter": str(place.left_s)}

    (_, (row,)) = run(part(fine, limit_s=100.0), part(left, limit_s=10.0))
    assert 80 < float(row.cells["counter"]) < 110
