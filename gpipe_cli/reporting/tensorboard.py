"""The rows of `metrics.jsonl` as TensorBoard scalars, for those who asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigError


def writer_class() -> Any:
    """TensorBoard's writer. Raises ConfigError where the package is missing."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        problem = "needs the package tensorboard: pip install 'gpipe-cli[tensorboard]'"
        raise ConfigError("tensorboard", True, problem) from error
    return SummaryWriter


class TensorBoard:
    """Writes event files into `run_dir/tensorboard`. Raises ConfigError where the tensorboard package is missing."""

    def __init__(self, run_dir: Path) -> None:
        self._writer: Any = writer_class()(str(run_dir / "tensorboard"))

    def write(self, row: Mapping[str, Any]) -> None:
        """Add every number of a metrics row at the row's `step`."""
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()
