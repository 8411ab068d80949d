"""`metrics.jsonl`: one JSON object a line, appended as training goes on, and cut back exactly when a run is resumed.

A row's `step` is the number of optimizer steps done when it was written. A row of a step and the row of the
evaluation after it have the same `step`; a checkpoint of that step is written after both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigError
from gpipe_cli.reporting.atomic import replace_file


class MetricsWriter:
    """Appends rows to a metrics file; each reaches the operating system before `write` returns.

    Args:
        path: the file. A new run must not find rows in it.
        resumed_from: optimizer steps of the checkpoint that the run goes on from, or None for a new run. Rows of
            later steps and a half written line are removed; the earlier ones stay byte for byte.

    Raises ConfigError when a new run would overwrite the rows of another one.
    """

    def __init__(self, path: Path, *, resumed_from: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_from is not None:
            _cut_back(path, resumed_from)
        elif path.exists() and path.stat().st_size > 0:
            raise ConfigError(
                "run_dir", path.parent, "already holds a run: choose another one, or set resume to go on with it"
            )
        self._file = path.open("ab")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row, which must have `step`. Numbers that JSON lacks (NaN, infinities) become null."""
        if "step" not in row:
            raise ValueError("a metrics row needs its step")
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics file, in order; none where there is no file."""
    return [row for _, row in _whole_lines(path)]


def _cut_back(path: Path, last_step: int) -> None:
    kept = b"".join(line for line, row in _whole_lines(path) if row["step"] <= last_step)
    if path.exists() and path.read_bytes() != kept:
        replace_file(path, lambda temporary: _write_bytes(temporary, kept))


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(_strict(row), allow_nan=False) + "\n").encode()


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
