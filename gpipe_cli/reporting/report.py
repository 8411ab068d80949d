"""What the first rank says and writes while a run goes on: progress, metrics, TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gpipe_cli.reporting.jsonl import MetricsWriter
from gpipe_cli.reporting.progress import Progress
from gpipe_cli.reporting.run_directory import one_line_if_not_written
from gpipe_cli.reporting.tensorboard import TensorBoard


class Evaluated(Protocol):
    """What an evaluation found, as a row and as words."""

    def metrics(self) -> Mapping[str, float]: ...

    def sentence(self) -> str: ...


class RunReport:
    """Sends each number to everything that shows or keeps it. `resumed_from`: steps done by an earlier run, or None.

    Raises TrainingError, one line with the file, when the disk refuses.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        progress: str,
        num_steps: int,
        resumed_from: int | None,
        tensorboard: bool,
        unit: str = "images",
    ) -> None:
        self._path = run_dir / "metrics.jsonl"
        with one_line_if_not_written(self._path):
            self._tensorboard = TensorBoard(run_dir) if tensorboard else None
            self._metrics = MetricsWriter(self._path, resumed_from=resumed_from)
        self._progress = Progress(progress, num_steps, done=resumed_from or 0, unit=unit)
        self._rate = "tokens_per_s" if unit == "tokens" else "samples_per_s"

    def step(self, step: int, row: Mapping[str, Any] | None = None) -> None:
        """A step is done; `row` when its numbers are to be kept."""
        if row is None:
            self._progress.update(step)
            return
        self._write(row)
        self._progress.update(step, row["loss"], row[self._rate])

    def evaluation(self, step: int, epoch: int, result: Evaluated) -> None:
        """The held-out split was evaluated after `step` steps."""
        self._write({"step": step, "epoch": epoch, **result.metrics()})
        self._progress.message(f"{_when(epoch)}: {result.sentence()}")

    def message(self, text: str) -> None:
        """A line for the user."""
        self._progress.message(text)

    def close(self) -> None:
        self._progress.close()
        with one_line_if_not_written(self._path):
            self._metrics.close()
            if self._tensorboard is not None:
                self._tensorboard.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        with one_line_if_not_written(self._path):
            self._metrics.write(row)
            if self._tensorboard is not None:
                self._tensorboard.write(row)


def _when(epoch: int) -> str:
    return f"epoch {epoch + 1}" if epoch >= 0 else "before training"
