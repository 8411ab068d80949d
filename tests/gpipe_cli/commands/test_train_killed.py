"""Runs killed with `kill -9`, all processes at once, at random moments: no good checkpoint is lost, none is half."""

from __future__ import annotations

import gc
import os
import random
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.training import checkpoints, loop

NUM_KILLS = 20
EPOCHS_TO_LIVE = 2.0  # a session lives at most this long in training, and saves once an epoch
LIMIT_S = 100.0
# Whatever draws random numbers or keeps state: dropout, running statistics, augmentation, momentum, average.
NETWORK = """
    from functools import partial
    from torch import nn

    def layers(num_classes):
        return [
            ("conv", partial(nn.Conv2d, 3, 8, 3, padding=1)),
            ("norm", partial(nn.BatchNorm2d, 8)),
            ("relu", nn.ReLU),
            ("pool", partial(nn.AdaptiveAvgPool2d, 2)),
            ("flatten", nn.Flatten),
            ("dropout", partial(nn.Dropout, 0.2)),
            ("linear", partial(nn.Linear, 32, num_classes)),
        ]
"""
SETTINGS = (
    f"epochs={int(NUM_KILLS * EPOCHS_TO_LIVE)}", "dataset.size=32", "dataset.augment=light", "micro_batches=2",
    "optimizer=rmsprop", "optimizer.lr=0.01", "ema_decay=0.9", "keep_checkpoints=2",
)  # fmt: skip


def live(gpipe: Any, folder: Path, words: tuple[str, ...], limit_s: float) -> int | None:
    """The command in a session of its own, which is killed `limit_s` seconds after it began to train.

    Returns its exit code, None if it was killed. All its processes are gone then.
    """
    reading, writing = os.pipe()
    leader = os.fork()
    if leader == 0:
        gc.freeze()  # what is garbage in pytest's process may wait for threads that are not here
        os.close(reading)
        os.setsid()
        run = loop.Trainer.run

        def announced(trainer: loop.Trainer) -> loop.Outcome:
            os.write(writing, b"!")
            return run(trainer)

        loop.Trainer.run = announced  # type: ignore[method-assign]
        exit_code = 99
        try:
            exit_code = gpipe.train(folder, *words).exit_code
        finally:
            os._exit(exit_code)
    os.close(writing)
    deadline = time.monotonic() + LIMIT_S
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not os.read(reading, 1):  # every process that could write has ended
            break
        deadline = min(deadline, time.monotonic() + limit_s)
    else:
        os.killpg(leader, signal.SIGKILL)
        while os.read(reading, 1):
            pass
    os.close(reading)
    _, status = os.waitpid(leader, 0)
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def newest_step(folder: Path) -> int:
    """The newest step in a folder of checkpoints, 0 where there is none. All that look like checkpoints are read."""
    steps = [0]
    for path in folder.iterdir() if folder.exists() else ():
        if not path.name.startswith(".tmp-"):
            checkpoints.load(path)
            steps.append(checkpoints.load_facts(path)["step"])
    return max(steps)


def rows(run_dir: Path) -> list[str]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [line.partition(', "samples_per_s"')[0] for line in lines]


@pytest.mark.slow
def test_killed_twenty_times_a_run_is_the_run_that_was_never_killed(gpipe: Any, tmp_path: Path) -> None:
    settings = (*gpipe.tiny_module, gpipe.network(tmp_path, NETWORK), *SETTINGS)
    began = time.monotonic()
    whole, fired = tmp_path / "whole", tmp_path / "fired"
    assert gpipe.train(tmp_path, *settings, "run_dir=whole").exit_code == 0
    epoch_s = (time.monotonic() - began) / (NUM_KILLS * EPOCHS_TO_LIVE)
    moments = random.Random(0)
    newest = 0
    for _ in range(NUM_KILLS):
        if newest == 0:  # killed before its first checkpoint: nothing to go on from
            shutil.rmtree(fired, ignore_errors=True)
        words = ("resume=fired",) if newest else (*settings, "run_dir=fired")
        # The partitions and the loader's processes may change with every resume.
        words = (*words, f"partitions={moments.choice([1, 1, 2])}", f"workers={moments.choice([0, 0, 1])}")
        exit_code = live(gpipe, tmp_path, words, moments.uniform(0, EPOCHS_TO_LIVE * epoch_s))
        assert exit_code is None
        before, newest = newest, newest_step(fired / "checkpoints")
        assert newest >= before
        if newest == 0:  # the machine has more to do now than when the epochs were timed
            epoch_s *= 1.5
        assert newest_step(fired / "best") >= 1 or newest == 0
    assert newest > 0
    ended = gpipe.train(tmp_path, "resume=fired", "partitions=2", "workers=0")
    assert ended.exit_code == 0, ended.stderr
    assert rows(fired) == rows(whole)
    for name in ("checkpoints", "best"):
        left = sorted(path.name for path in (fired / name).iterdir())
        assert left == sorted(path.name for path in (whole / name).iterdir())
        for checkpoint in left:
            found, expected = (checkpoints.load(run_dir / name / checkpoint) for run_dir in (fired, whole))
            assert gpipe.same_tensors(found, expected)
