"""The table on the screen: a line for each configuration, as it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_cli.benchmark.rows import shown_layout

if TYPE_CHECKING:
    from gpipe_cli.benchmark.grid import Case
    from gpipe_cli.benchmark.results import Comparison, Result


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    is_word: bool = False  # words stand at the left of their columns, numbers at the right


class ScreenTable:
    """Lays out the lines for these configurations: what is the same in all of them has no column."""

    def __init__(self, cases: Sequence[Case]) -> None:
        baselines = {case.baseline for case in cases}
        names = [case.name or case.baseline or "gpipe" for case in cases]
        columns = [
            _Column("by", max(map(len, names)), True),
            _Column("K", 3),
            _Column("M", 4),
            _Column("remat", max(5, *(_remat_width(case) for case in cases)), True),
            _Column("schedule", max(8, *(len(case.schedule) for case in cases)), True),
            _Column("sizes", 7, True),
            _Column("layout", 20 if "torch" in baselines else 13, True),
            _Column("samples/s", 9),
            _Column("tokens/s", 9),
            _Column("step, ms", 22),
            _Column("bubble, %", 9),
            _Column("memory, MB", 11),
            *(_Column(f"x {name}", 8) for name in ("single", "naive", "torch")),
            _Column("speed-up", 8),
        ]
        unused = {f"x {name}" for name in ("single", "naive", "torch") if name not in baselines}
        if len({case.schedule for case in cases if case.baseline is None}) == 1:
            unused.add("schedule")
        if not any(case.taper for case in cases):
            unused.add("sizes")
        unused.add("tokens/s" if cases[0].seq_len is None else "layout")
        self._shown = [(index, column) for index, column in enumerate(columns) if column.title not in unused]
        self._titles = [column.title for column in columns]

    @property
    def header(self) -> str:
        """The head of the table."""
        return self._line(self._titles)

    def row(self, result: Result, comparison: Comparison) -> str:
        """The line of a configuration that was measured."""
        case, spread, bubbles = result.case, result.spread, result.bubble_per_rank
        single = case.baseline == "single"
        ratios = (comparison.single, comparison.naive, comparison.torch, comparison.speedup)
        return self._line(
            [
                case.baseline or case.name or "gpipe",
                str(case.partitions),
                str(case.micro_batches),
                "" if single else _remat(result),
                "" if single else case.schedule,
                "tapered" if case.taper else "",
                "" if result.ready is None else shown_layout(case, result.ready.layout) or "",
                f"{result.samples_per_s:.4g}",
                "" if result.tokens_per_s is None else f"{result.tokens_per_s:.0f}",
                f"{1e3 * spread.median_s:.4g} ({1e3 * spread.low_s:.4g}-{1e3 * spread.high_s:.4g})",
                "" if bubbles is None or single else "+".join(f"{100 * share:.0f}" for share in bubbles),
                "+".join(_megabytes(count) for count in _shown_bytes(result)),
                *("" if value is None else f"{value:.2f}" for value in ratios),
            ]
        )

    def _line(self, cells: Sequence[str]) -> str:
        parts = [
            cells[index].ljust(column.width) if column.is_word else cells[index].rjust(column.width)
            for index, column in self._shown
        ]
        return " ".join(parts).rstrip()


def _remat_width(case: Case) -> int:
    kept = 0 if case.kept is None else 1 + case.partitions * (1 + len(str(case.micro_batches))) - 1
    return len(case.remat) + kept


def _remat(result: Result) -> str:
    """What is recomputed; with auto also how many micro-batches each stage need not recompute."""
    kept = result.ready.kept if result.ready is not None else None
    return result.case.remat if kept is None else f"{result.case.remat} {'+'.join(map(str, kept))}"


def _shown_bytes(result: Result) -> list[int]:
    """Peak memory of each rank: what a GPU allocated; on a CPU the activations, where they could be counted."""
    if result.end is None or result.ready is None:
        return []
    if result.ready.device == "cuda":
        return result.end.peak_memory_bytes
    return [count for count in result.end.activation_bytes if count is not None]


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g}" if count < 1e9 else f"{count / 1e6:.0f}"
