"""The speed-up over the number of partitions, a line for each number of micro-batches, as the paper reports it.

Ours on the left; on the right the paper's Table 2 and, for AmoebaNet, torchgpipe's benchmark of the same network, each
over its own K = 2, M = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpipe_cli.reporting.atomic import replace_file
from gpipe_cli.reporting.paper import TABLE2, TORCHGPIPE, PaperSpeed

_DPI = 120
_PANELS_A_ROW = 4


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A measured (or predicted) throughput; `curve` tells what else may differ, such as re-materialization."""

    curve: str
    partitions: int
    micro_batches: int
    samples_per_s: float


def plot_speedup(path: Path, speeds: Sequence[Speed], title: str, architecture: str = "amoebanet") -> bool:
    """Draw a PNG; False, and no file, when there are not two numbers of partitions to compare. Raises OSError.

    Every curve counts from its own slowest corner: the fewest partitions with the fewest micro-batches is 1. What is
    reported is the `architecture`'s: amoebanet or transformer.
    """
    curves = list(dict.fromkeys(speed.curve for speed in speeds))
    if len({speed.partitions for speed in speeds}) < 2:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [*((f"measured: {curve}", _ours(speeds, curve)) for curve in curves)]
    panels += [("reported: GPipe paper, Table 2, TPUs", _reported(TABLE2, architecture))]
    if architecture == "amoebanet":
        panels += [("reported: torchgpipe, Tesla P40", _reported(TORCHGPIPE, architecture))]
    num_columns = min(len(panels), _PANELS_A_ROW)
    num_rows = math.ceil(len(panels) / num_columns)
    figure = Figure(figsize=(3.6 * num_columns, 3.8 * num_rows), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for number, (name, lines) in enumerate(panels):
        axes = figure.add_subplot(num_rows, num_columns, number + 1)
        _draw(axes, name, lines)
        if number % num_columns == 0:
            axes.set_ylabel("speed-up (fewest K, fewest M = 1)")
    figure.suptitle(title, fontsize=10)
    replace_file(path, lambda temporary: canvas.print_figure(temporary, format="png", dpi=_DPI))
    return True


Lines = Mapping[int, Sequence[tuple[int, float]]]  # micro-batches -> (partitions, speed-up)


def _ours(speeds: Sequence[Speed], curve: str) -> Lines:
    own = sorted((s for s in speeds if s.curve == curve), key=lambda s: (s.micro_batches, s.partitions))
    least = min(own, key=lambda s: (s.partitions, s.micro_batches)).samples_per_s
    return _by_micro_batches((s.micro_batches, s.partitions, s.samples_per_s / least) for s in own)


def _reported(rows: Sequence[PaperSpeed], architecture: str) -> Lines:
    return _by_micro_batches(
        (row.micro_batches, row.accelerators, row.relative) for row in rows if row.architecture == architecture
    )


def _by_micro_batches(points: Iterable[tuple[int, int, float]]) -> Lines:
    lines: dict[int, list[tuple[int, float]]] = {}
    for micro_batches, partitions, value in points:
        lines.setdefault(micro_batches, []).append((partitions, value))
    return lines


def _draw(axes: Any, name: str, lines: Lines) -> None:
    for micro_batches, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=f"M = {micro_batches}")
    partitions = sorted({k for points in lines.values() for k, _ in points})
    axes.set_xticks(partitions, [str(k) for k in partitions])
    axes.set_xlabel("partitions K")
    axes.set_ylim(bottom=0)
    axes.set_title(name, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
