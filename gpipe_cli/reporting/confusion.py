"""What became of every class: `per_class.csv`, `confusion.png` and a few lines for the screen, from exact counts.

The counts are a row per true class and a column per predicted class, and one more column for outputs that are not
numbers (training/confusion.py).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpipe_cli.reporting.atomic import replace_file, replace_text

Matrix = Sequence[Sequence[int]]

NOT_A_NUMBER = "(not a number)"
SHOWN_CLASSES = 20  # on the screen: all of them up to here, else the worst
_WORST = 10
_DPI = 120
_NAMED_CLASSES = 60  # more names than this along an axis cannot be read
_NUMBERED_CLASSES = 20  # more numbers than this in a row cannot be read


@dataclass(frozen=True, kw_only=True)
class ClassCounts:
    """A true class: its samples, those that were recognised, and what most of the others were taken for."""

    label: int
    name: str
    num_samples: int
    num_right: int
    confused_with: str | None
    num_confused: int

    @property
    def top1(self) -> float | None:
        """Share of its samples that were recognised, in [0, 1]; None where there are no samples."""
        return self.num_right / self.num_samples if self.num_samples else None


def class_counts(matrix: Matrix, classes: Sequence[str]) -> list[ClassCounts]:
    """A record per class, in the order of the labels. Raises ValueError when matrix and classes do not fit."""
    if len(matrix) != len(classes) or any(len(row) != len(classes) + 1 for row in matrix):
        raise ValueError(f"expected {len(classes)} rows of {len(classes) + 1} counts")
    columns = [*classes, NOT_A_NUMBER]
    counts = []
    for label, row in enumerate(matrix):
        wrong = [0 if column == label else number for column, number in enumerate(row)]
        most = max(wrong)
        counts.append(
            ClassCounts(
                label=label,
                name=classes[label],
                num_samples=sum(row),
                num_right=row[label],
                confused_with=columns[wrong.index(most)] if most else None,
                num_confused=most,
            )
        )
    return counts


def write_per_class(run_dir: Path, counts: Sequence[ClassCounts]) -> Path:
    """Write `run_dir/per_class.csv`: a line per class, accuracies as fractions. Raises OSError."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["label", "class", "num_samples", "num_right", "top1", "confused_with", "num_confused"])
    for one in counts:
        writer.writerow(
            [one.label, one.name, one.num_samples, one.num_right, one.top1, one.confused_with, one.num_confused]
        )
    path = run_dir / "per_class.csv"
    replace_text(path, buffer.getvalue())
    return path


def class_lines(counts: Sequence[ClassCounts]) -> list[str]:
    """A table for the screen: every class, or the worst ones where they are many. Accuracies in percent."""
    shown = list(counts)
    heading = "class"
    if len(shown) > SHOWN_CLASSES:
        present = [one for one in counts if one.num_samples]
        shown = sorted(present, key=lambda one: (one.top1 or 0.0, one.label))[:_WORST]
        heading = f"worst {len(shown)} of {len(present)} classes"
    width = min(32, max([len(heading), *(len(one.name) for one in shown)]))
    lines = [f"{heading:<{width}}   top-1 %     right  of samples  mostly taken for"]
    for one in shown:
        accuracy = "-" if one.top1 is None else f"{100 * one.top1:.2f}"
        mistake = "" if one.confused_with is None else f"{one.confused_with} ({one.num_confused})"
        numbers = f"{accuracy:>8}  {one.num_right:>8}  {one.num_samples:>10}"
        lines.append(f"{_shortened(one.name, width):<{width}}  {numbers}  {mistake}".rstrip())
    return lines


def plot_confusion(run_dir: Path, matrix: Matrix, classes: Sequence[str], title: str) -> Path:
    """Draw `run_dir/confusion.png`: of each true class (a row) the share taken for each class. Raises OSError."""
    import numpy as np

    # The figure and its canvas directly: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = np.asarray(matrix, dtype=np.int64)
    columns = list(classes)
    if counts[:, -1].any():
        columns.append(NOT_A_NUMBER)
    counts = counts[:, : len(columns)]
    totals = counts.sum(axis=1, keepdims=True)
    # A class without samples has no shares: its row stays empty.
    shares = np.where(totals > 0, 100 * counts / np.maximum(totals, 1), np.nan)
    side = min(14.0, max(5.0, 2.5 + 0.45 * len(columns)))
    figure = Figure(figsize=(side + 1.0, side), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="% of the true class", shrink=0.8)
    _name(axes.xaxis, columns, rotation=90)
    _name(axes.yaxis, classes, rotation=0)
    axes.set_xlabel("taken for")
    axes.set_ylabel("true class")
    axes.set_title(title, fontsize=10).set_parse_math(False)
    if len(columns) <= _NUMBERED_CLASSES:
        _write_counts(axes, counts, shares)
    path = run_dir / "confusion.png"
    replace_file(path, lambda temporary: canvas.print_figure(temporary, format="png", dpi=_DPI))
    return path


def _name(axis: Any, names: Sequence[str], *, rotation: int) -> None:
    if len(names) <= _NAMED_CLASSES:
        # A class may be called "$x$": a name is no formula.
        texts = [_shortened(name, 24) for name in names]
        for label in axis.set_ticks(range(len(names)), labels=texts, rotation=rotation, fontsize=7):
            label.label1.set_parse_math(False)
            label.label2.set_parse_math(False)


def _write_counts(axes: Any, counts: Any, shares: Any) -> None:
    for row, numbers in enumerate(counts):
        for column, number in enumerate(numbers):
            if number:
                color = "white" if shares[row, column] > 60 else "black"
                axes.text(column, row, str(number), ha="center", va="center", fontsize=7, color=color)


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
