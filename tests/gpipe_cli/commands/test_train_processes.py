"""Ranks that fail, runs that meet, and ranks that torchrun starts: what the user sees, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.training import checkpoints

# A layer that meets a misfortune at the third of the run's six steps, in training.
FAILING_NETWORK = """
    import os
    import signal
    from functools import partial
    from torch import nn

    class Misfortune(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind, self.fraction = kind, 0.0

        def set_progress(self, fraction):
            self.fraction = fraction

        def forward(self, x):
            if self.training and self.fraction >= 2 / 6:
                if self.kind == "raise":
                    raise KeyError("the layer's own mistake")
                if self.kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            return x

    def layers(num_classes, kind, place=2):
        all_layers = [
            ("conv", partial(nn.Conv2d, 3, 4, 3, padding=1)),
            ("pool", partial(nn.AdaptiveAvgPool2d, 2)),
            ("flatten", nn.Flatten),
            ("linear", partial(nn.Linear, 16, num_classes)),
        ]
        return [*all_layers[:place], ("misfortune", partial(Misfortune, kind)), *all_layers[place:]]
"""
SIX_STEPS = ("epochs=3", "checkpoint_every=0")
GONE_WITHIN_S = 30.0


def failing(gpipe: Any, folder: Path, kind: str, *words: str, program: tuple[str, ...] = ()) -> Any:
    """The program's end, at most half a minute after the first step."""
    factory = gpipe.network(folder, FAILING_NETWORK)
    settings = (*gpipe.tiny_module, factory, f"model.kwargs.kind={kind}", *SIX_STEPS, *words)
    process = gpipe.start(folder, *settings, program=program)
    began = until(process, "step 1/6")
    ended = gpipe.end(process, folder, limit_s=GONE_WITHIN_S)
    assert time.monotonic() - began < GONE_WITHIN_S
    return ended


def until(process: subprocess.Popen[str], text: str) -> float:
    """Read stderr up to a line with `text`; returns the time."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return time.monotonic()
    pytest.fail(f"the run ended before it said {text!r}: {''.join(seen)}")


@pytest.mark.parametrize("num_partitions", [2, 4])
def test_an_exception_in_one_rank_ends_all_with_its_cause_last(gpipe: Any, tmp_path: Path, num_partitions: int) -> None:
    balance = {2: "balance=[2,3]", 4: "balance=[1,1,2,1]"}[num_partitions]
    ended = failing(gpipe, tmp_path, "raise", f"partitions={num_partitions}", balance)
    assert ended.exit_code == 1
    rank = {2: 1, 4: 2}[num_partitions]
    assert ended.stderr.splitlines()[-1] == f'gpipe: error: rank {rank}: KeyError: "the layer\'s own mistake"'
    assert ended.stderr.count("Traceback") == 1
    assert "users_network_" in ended.stderr  # where the mistake is
    assert [row["step"] for row in ended.rows if "loss" in row] == [1, 2]


def test_a_killed_rank_ends_all(gpipe: Any, tmp_path: Path) -> None:
    ended = failing(gpipe, tmp_path, "kill", "partitions=2", "balance=[3,2]")
    assert ended.exit_code == 1
    assert ended.stderr.splitlines()[-1].startswith("gpipe: error: rank 0: killed by signal 9 (SIGKILL)")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", [("partitions=2", "workers=1"), ("workers=1",)], ids=["two ranks", "one"])
def test_ctrl_c_leaves_no_process(gpipe: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    process = gpipe.start(tmp_path, *gpipe.tiny, "epochs=1000", "eval_every=0", *words)
    until(process, "step 1/")
    os.killpg(process.pid, signal.SIGINT)
    ended = gpipe.end(process, tmp_path, limit_s=GONE_WITHIN_S)
    assert ended.exit_code == 130
    assert ended.stderr.splitlines()[-1] == "gpipe: interrupted"
    assert "Traceback" not in ended.stderr
    for checkpoint in ended.run_dir.glob("checkpoints/step-*"):  # whatever a save had got to
        checkpoints.check_whole(checkpoint)


def test_two_runs_at_once_give_what_each_gives_alone(gpipe: Any, tmp_path: Path) -> None:
    settings = [(*gpipe.tiny, "partitions=2", f"seed={seed}", f"run_dir=runs/{seed}") for seed in (1, 2)]
    together = [gpipe.start(tmp_path, *words) for words in settings]
    assert [gpipe.end(process, tmp_path).exit_code for process in together] == [0, 0]
    table = (tmp_path / "results" / "accuracy.csv").read_text()
    assert table.count("measured") == 2
    for seed, words in zip((1, 2), settings, strict=True):
        alone = gpipe.train(tmp_path / "alone", *words)
        assert alone.exit_code == 0, alone.stderr
        rows = [rows_without_times(folder / "runs" / str(seed)) for folder in (tmp_path, tmp_path / "alone")]
        assert rows[0] == rows[1]


def rows_without_times(run_dir: Path) -> list[str]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [line.partition(', "samples_per_s"')[0] for line in lines]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "gpipe_cli")


def test_ranks_of_torchrun_share_one_run(gpipe: Any, tmp_path: Path) -> None:
    # torchrun reads the host's name; threads are gpipe's own setting.
    process = gpipe.start(tmp_path, *gpipe.tiny, "partitions=4", program=TORCHRUN, OMP_NUM_THREADS="1")
    ended = gpipe.end(process, tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert len(ended.losses) == 2
    assert [path.name for path in (tmp_path / "results" / "runs").iterdir()] == [ended.run_dir.name]
    assert len(list(tmp_path.rglob("config.yaml"))) == 1
    for line in ("6,870 parameters", "run in results/runs/", "epoch 1: top-1"):
        assert ended.stderr.count(line) == 1
    assert [line.split()[0] for line in ended.stdout.splitlines()][-2:] == ["table", "run"]
    assert ended.summary["world_size"] == 4
    alone = gpipe.train(tmp_path / "alone", *gpipe.tiny)
    assert ended.steps == alone.steps
    assert gpipe.same_tensors(ended.tensors, alone.tensors)


def test_an_exception_under_torchrun_ends_all_and_is_told(gpipe: Any, tmp_path: Path) -> None:
    ended = failing(gpipe, tmp_path, "raise", "partitions=4", "balance=[1,1,2,1]", program=TORCHRUN)
    assert ended.exit_code == 1
    assert ended.stderr.count('gpipe: error: rank 2: KeyError: "the layer\'s own mistake"') >= 1
    assert "Connection closed" not in ended.stderr


def test_a_refusal_under_torchrun_is_said_once(gpipe: Any, tmp_path: Path) -> None:
    process = gpipe.start(tmp_path, *gpipe.tiny, "partitions=4", "batch_size=64", program=TORCHRUN)
    ended = gpipe.end(process, tmp_path)
    assert ended.exit_code != 0
    assert ended.stderr.count("gpipe: error: ") == 1
    assert "gpipe: error: batch_size=64: synthetic has only 32 training samples" in ended.stderr
    assert list(tmp_path.iterdir()) == []
