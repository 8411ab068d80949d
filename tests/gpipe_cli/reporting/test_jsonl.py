"""metrics.jsonl: every row once, also after a kill in the middle of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpipe_cli.errors import ConfigError
from gpipe_cli.reporting.jsonl import MetricsWriter, read_rows


def write(path: Path, steps: range, resumed_from: int | None = None) -> None:
    with MetricsWriter(path, resumed_from=resumed_from) as metrics:
        for step in steps:
            metrics.write({"step": step, "loss": 1 / step})


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    assert read_rows(path) == []
    write(path, range(1, 4))
    assert read_rows(path) == [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]


def test_row_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    metrics.close()


def test_resume_drops_later_rows_and_the_half_written_one_and_keeps_the_rest_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with MetricsWriter(path, resumed_from=3) as metrics:
        metrics.write({"step": 3, "epoch": 1, "top1": 0.5})  # an evaluation after step 3
    kept = path.read_bytes()
    write(path, range(4, 6), resumed_from=3)
    with path.open("ab") as file:
        file.write(b'{"step": 6, "lo')
    write(path, range(4, 8), resumed_from=3)
    assert path.read_bytes().startswith(kept)
    rows = read_rows(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4, 5, 6, 7]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_row_without_its_end_of_line_is_not_joined_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    write(path, range(2, 3), resumed_from=2)
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_resume_in_a_directory_without_metrics_starts_them(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", range(5, 6), resumed_from=4)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [5]


def test_new_run_does_not_write_over_another(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3))
    with pytest.raises(ConfigError, match=r"run_dir=.*: already holds a run"):
        MetricsWriter(path)
    assert len(read_rows(path)) == 2


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write({"step": 1, "loss": float("nan"), "ranks": [1.0, float("inf")]})
        with pytest.raises(ValueError, match="step"):
            metrics.write({"loss": 1.0})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"step": 1, "loss": None, "ranks": [1.0, None]}
