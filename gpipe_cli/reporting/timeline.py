"""What every rank did when: a picture like the paper's Figure 2, and a trace for Perfetto (https://ui.perfetto.dev).

Events may be measured (`StepResult.trace.events` of every rank) or simulated; the drawing is the same. Measured ones of
several processes share a clock where time.perf_counter does, as on Linux (CLOCK_MONOTONIC, counted from the machine's
start), and so on one machine only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.atomic import replace_file, replace_text

if TYPE_CHECKING:
    from gpipe_cli.pipeline.schedule import Event

Timeline = Sequence[Sequence["Event"]]  # per rank

_DPI = 130
# By the kind's letter: what it is called, its colour, and the nearest name of a colour that Chrome's viewer knows.
_KINDS = {
    "F": ("forward", "#9ecae1", "thread_state_runnable"),
    "R": ("re-materialize", "#fdd49e", "thread_state_iowait"),
    "B": ("backward", "#74c476", "thread_state_running"),
    "W": ("gradients of weights", "#bcbddc", "thread_state_sleeping"),
}
_WIDTH_INCHES = 12.0
_CHARACTERS_PER_INCH = 16.0  # of the numbers in the boxes: a narrower box stays empty


def span_s(ranks: Timeline) -> tuple[float, float]:
    """Start of the first event and end of the last one, in seconds. Raises ValueError when there is no event."""
    events = [event for rank in ranks for event in rank]
    if not events:
        raise ValueError("a timeline needs at least one event")
    return min(event.start_s for event in events), max(event.end_s for event in events)


def idle_fraction(ranks: Timeline) -> float:
    """The share of all ranks' time between the first event and the last one in which they did nothing."""
    began, ended = span_s(ranks)
    if ended <= began:
        return 0.0
    busy = sum(event.end_s - event.start_s for rank in ranks for event in rank)
    return 1.0 - busy / ((ended - began) * len(ranks))


def draw_timeline(path: Path, ranks: Timeline, title: str) -> None:
    """Draw a PNG: a row a rank, the first one at the bottom as in the paper; a box an operation with its micro-batch.

    The number is that of the micro-batch; where a rank hosts several stages, stage and micro-batch. White is idle time.
    Raises ValueError without events, OSError when the picture cannot be written.
    """
    # The figure and its canvas directly: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    began, ended = span_s(ranks)
    scale, unit = _scale(ended - began)
    figure = Figure(figsize=(_WIDTH_INCHES, 1.5 + 0.55 * len(ranks)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for row, events in enumerate(ranks):
        several = len({event.operation.stage for event in events}) > 1
        for event in events:
            _box(axes, row, event, began, ended, scale, several)
    axes.set_xlim(0, (ended - began) * scale)
    axes.set_ylim(-0.5, len(ranks) - 0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {row}" for row in range(len(ranks))])
    axes.set_xlabel(f"time, {unit}")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = {event.operation.kind.value for rank in ranks for event in rank}
    handles = [
        Patch(facecolor=color, edgecolor="black", label=name) for k, (name, color, _) in _KINDS.items() if k in kinds
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    axes.set_title(f"{title}; {100 * idle_fraction(ranks):.1f} % idle", fontsize=10)
    replace_file(path, lambda temporary: canvas.print_figure(temporary, format="png", dpi=_DPI))


def write_trace(path: Path, ranks: Timeline, title: str) -> None:
    """Write the same as JSON in Chrome's trace format, which Perfetto reads: a track a rank, times in microseconds.

    Raises ValueError without events, OSError when the file cannot be written.
    """
    began, _ = span_s(ranks)
    records: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for rank, events in enumerate(ranks):
        records.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        for event in events:
            operation = event.operation
            name, _, chrome_color = _KINDS[operation.kind.value]
            records.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "name": str(operation),
                    "cat": name,
                    "cname": chrome_color,
                    "ts": 1e6 * (event.start_s - began),
                    "dur": 1e6 * (event.end_s - event.start_s),
                    "args": {"kind": name, "stage": operation.stage, "micro_batch": operation.micro_batch},
                }
            )
    replace_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": records}) + "\n")


def _scale(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 10 else (1e3, "ms") if seconds >= 0.01 else (1e6, "us")


def _box(axes: Any, row: int, event: Event, began: float, ended: float, scale: float, several: bool) -> None:
    operation = event.operation
    left, width = (event.start_s - began) * scale, (event.end_s - event.start_s) * scale
    color = _KINDS[operation.kind.value][1]
    axes.barh(row, width, left=left, height=0.8, color=color, edgecolor="black", linewidth=0.5)
    text = f"{operation.stage}.{operation.micro_batch}" if several else str(operation.micro_batch)
    inches = width / ((ended - began) * scale) * (_WIDTH_INCHES - 1.0)
    if inches * _CHARACTERS_PER_INCH >= len(text):
        axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=7, clip_on=True)
