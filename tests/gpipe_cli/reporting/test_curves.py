"""The picture of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpipe_cli.reporting.curves import plot_curves
from gpipe_cli.reporting.jsonl import MetricsWriter


def test_curves_are_drawn_from_the_metrics(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        for step in range(1, 60):
            metrics.write({"step": step, "loss": 1 / step})
        metrics.write({"step": 59, "epoch": 1, "eval_loss": 0.5, "top1": 0.9, "top5": None})
    path = plot_curves(tmp_path, "amoebanet on digits")
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_run_without_numbers_has_no_picture(tmp_path: Path) -> None:
    assert plot_curves(tmp_path, "nothing") is None
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_and_torch_are_imported_only_when_used() -> None:
    modules = "accuracy, atomic, curves, environment, jsonl, paper, progress, summary, tables, tensorboard"
    program = (
        f"import sys\nfrom gpipe_cli.reporting import {modules}\n"
        "sys.exit(', '.join({'matplotlib', 'torch', 'tqdm', 'timm'} & sys.modules.keys()) or 0)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
