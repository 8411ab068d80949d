"""What tests of whole runs share: `gpipe train` at its smallest, in this process or as a program of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.cli import main
from gpipe_cli.training import checkpoints

# What the launchers set, and what a machine's user may have set.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS")
LIMIT_S = 100.0

# AmoebaNet-D (2, 4), six layers, on 32 generated pictures: two steps an epoch.
TINY = (
    "model.layers=2", "model.filters=4", "model.split_cells=false",
    "dataset=synthetic", "dataset.size=32", "image_size=8", "batch_size=16",
    "epochs=1", "threads=1", "device=cpu", "log_every=1",
)  # fmt: skip
# The same without a model, for a user's network.
TINY_MODULE = (*TINY[3:], "model=module")

# A network without batch norm and dropout; the three layers in the middle have no parameters.
PLAIN_NETWORK = """
    from functools import partial
    from torch import nn

    def layers(num_classes, width=4):
        return [
            ("conv", partial(nn.Conv2d, 3, width, 3, padding=1)),
            ("relu", nn.ReLU),
            ("pool", partial(nn.AdaptiveAvgPool2d, 2)),
            ("flatten", nn.Flatten),
            ("linear", partial(nn.Linear, 4 * width, num_classes)),
        ]
"""


@dataclass(frozen=True)
class Ended:
    """A run of the command that has ended, in the folder where it was typed."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def run_dir(self) -> Path:
        """The folder of the run, where there is only one below the results."""
        (found,) = (self.folder / "results" / "runs").iterdir()
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows if "loss" in row]

    @property
    def steps(self) -> list[tuple[int, float, float]]:
        """(epoch, learning rate, loss) of every step."""
        return [(row["epoch"], row["lr"], row["loss"]) for row in self.rows if "loss" in row]

    @property
    def evaluations(self) -> list[tuple[int, float, float]]:
        return [(row["epoch"], row["top1"], row["eval_loss"]) for row in self.rows if "top1" in row]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def checkpoint(self) -> Path:
        found = checkpoints.find_latest(self.run_dir / "checkpoints")
        assert found is not None
        return found

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that the newest checkpoint holds: weights, running statistics, optimizer, average."""
        return checkpoints.load(self.checkpoint)

    @property
    def error(self) -> str:
        """The one line on stderr that says what is wrong; there must be no traceback."""
        assert "Traceback" not in self.stderr, self.stderr
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("gpipe: error: ")]
        assert self.stderr.splitlines()[-1] == line
        return line.removeprefix("gpipe: error: ")


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Gpipe:
    """Starts `gpipe train`. `tiny`, `tiny_module`: settings of the smallest runs, to be put before one's own."""

    tiny, tiny_module = TINY, TINY_MODULE
    same_tensors = staticmethod(same_tensors)

    def __init__(self) -> None:
        self._number = itertools.count()

    def network(self, folder: Path, source: str = PLAIN_NETWORK) -> str:
        """Write a user's module into `folder`; returns the setting that names its function `layers`."""
        name = f"users_network_{next(self._number)}"  # each its own: this process imports them all
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
        return f"model.factory={name}:layers"

    def train(self, folder: Path, *words: str, **environ: str) -> Ended:
        """`gpipe train` with these words typed in `folder`, in this process (ranks are forked from it)."""
        return self.run("train", folder, *words, **environ)

    def run(self, command: str, folder: Path, *words: str, **environ: str) -> Ended:
        """The same for any command."""
        folder.mkdir(parents=True, exist_ok=True)
        out, err = (folder.with_name(f"{folder.name}-{name}-{next(self._number)}") for name in ("out", "err"))
        path_before, here = list(sys.path), Path.cwd()
        with out.open("a") as stdout, err.open("a") as stderr, pytest.MonkeyPatch.context() as patch:
            for name in LAUNCHER_VARIABLES:
                patch.delenv(name, raising=False)
            for name, value in environ.items():
                patch.setenv(name, value)
            os.chdir(folder)
            try:
                with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                    exit_code = main([command, *words])
            finally:
                os.chdir(here)
                sys.path[:] = path_before
        return Ended(exit_code, out.read_text(), err.read_text(), folder)

    def start(self, folder: Path, *words: str, program: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
        """The same as a program with a process group of its own; `program`: what to start instead of `-m gpipe_cli`."""
        folder.mkdir(parents=True, exist_ok=True)
        clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        return subprocess.Popen(
            [sys.executable, *(program or ("-m", "gpipe_cli")), "train", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a signal to the group, as Ctrl-C sends it, spares pytest
            env={**clean, **environ},
        )

    def end(self, process: subprocess.Popen[str], folder: Path, limit_s: float = LIMIT_S) -> Ended:
        """Wait until the program and all that it started are gone: its output ends with the last who holds it."""
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            pytest.fail(f"processes were left after {limit_s} s; stdout: {stdout}; stderr: {stderr}")
        return Ended(process.returncode, stdout, stderr, folder)


@pytest.fixture(scope="session")
def gpipe() -> Gpipe:
    return Gpipe()
