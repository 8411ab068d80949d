"""Freed memory is kept."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from gpipe_cli.distributed.heap import keep_freed_memory

# Takes 200 MiB in blocks of 8 MiB twice and frees them; prints how many of them the process still has.
PROGRAM = """
import ctypes, resource
from gpipe_cli.distributed.heap import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
if {keep}:
    assert keep_freed_memory()
def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
def step():
    blocks = [libc.malloc(8 * 2**20) for _ in range(25)]
    for block in blocks:
        libc.memset(block, 1, 8 * 2**20)
    while blocks:
        libc.free(blocks.pop())
resident_mb()
before = resident_mb()
step()
step()
print(round(resident_mb() - before))
"""


def kept_mb(keep: bool) -> int:
    program = [sys.executable, "-c", PROGRAM.format(keep=keep)]
    return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap can be told to keep what is freed")
def test_freed_memory_stays_with_the_process_only_when_asked() -> None:
    assert kept_mb(keep=False) < 40
    assert 190 < kept_mb(keep=True) < 240  # both steps took the same


def test_other_systems_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False
