"""The curves of a run: loss and accuracy over the steps, drawn from its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpipe_cli.reporting.atomic import replace_file
from gpipe_cli.reporting.jsonl import read_rows

_DPI = 120


def plot_curves(run_dir: Path, title: str) -> Path | None:
    """Draw `run_dir/curves.png` from `run_dir/metrics.jsonl`.

    The curves are `loss` (training), `eval_loss`, and `top1` and `top5`, of text `bits_per_byte`, over `step`. None,
    and no file, where there is nothing to draw. Raises OSError when the picture cannot be written.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    curves = {name: _points(rows, name) for name in ("loss", "eval_loss", "top1", "top5", "bits_per_byte")}
    if not any(curves.values()):
        return None
    # The figure and its canvas directly: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    losses, right = figure.subplots(1, 2)
    _draw(losses, [("training", curves["loss"]), ("held out", curves["eval_loss"])], "loss")
    if curves["bits_per_byte"]:
        _draw(right, [("held out", curves["bits_per_byte"])], "bits per byte of held-out text")
    else:
        accuracy = [("top-1", _in_percent(curves["top1"])), ("top-5", _in_percent(curves["top5"]))]
        _draw(right, accuracy, "accuracy on held-out data, %")
    figure.suptitle(title)
    path = run_dir / "curves.png"
    replace_file(path, lambda temporary: canvas.print_figure(temporary, format="png", dpi=_DPI))
    return path


def _points(rows: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]


def _in_percent(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, 100 * fraction) for step, fraction in points]


def _draw(axes: Any, curves: Sequence[tuple[str, list[tuple[int, float]]]], label: str) -> None:
    for name, points in curves:
        if points:
            axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else "")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
