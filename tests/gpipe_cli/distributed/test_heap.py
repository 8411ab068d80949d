"""Freed memory is kept."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from gpipe_cli.distributed.heap import keep_freed_memory

# Page faults of a step that takes and frees as much as the one before: blocks of 1 to 24 MiB.
PROGRAM = """
import resource, torch
from gpipe_cli.distributed.heap import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
def step():
    blocks = [torch.ones(2**18 * size) for size in range(1, 25)]
    while blocks:
        blocks.pop()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(keep: bool) -> int:
    program = [sys.executable, "-c", PROGRAM.format(keep=keep)]
    return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap can be told to keep what is freed")
def test_a_second_step_takes_no_memory_from_the_system() -> None:
    pages = sum(range(1, 25)) * 2**20 // 4096
    assert page_faults(keep=False) > pages // 2
    assert page_faults(keep=True) < pages // 20


def test_other_systems_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False
