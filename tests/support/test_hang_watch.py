"""A test that hangs ends the run, and the end of the log says which test, and where every process stood."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

CONFTEST = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from hang_watch import HangWatch

    def pytest_configure(config):
        global watch
        watch = HangWatch(limit_s=1.0)

    def pytest_runtest_logstart(nodeid, location):
        watch.begins(nodeid)
"""
TESTS = """
    import ctypes, os, subprocess, sys

    def test_before():
        pass

    def test_that_hangs():
        if os.fork() == 0:
            the_child_hangs()
        other = subprocess.Popen([sys.executable, "-c", "import signal; signal.alarm(60); signal.pause()  # other"])
        lock_twice(ctypes.PyDLL(None))  # native code, which holds the interpreter

    def the_child_hangs():
        lock_twice(ctypes.CDLL(None))

    def lock_twice(library):
        mutex = ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_hang_in_native_code_ends_the_run_with_its_name_last(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    (tmp_path / "test_it.py").write_text(textwrap.dedent(TESTS))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert time.monotonic() - began < 30
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("HANGS: test_it.py::test_that_hangs (more than 1 s")
    assert any("in test_that_hangs" in line for line in lines)
    assert any("in the_child_hangs" in line for line in lines)
    assert any(line.endswith("# other") for line in lines)
    assert "_pytest" not in done.stderr
