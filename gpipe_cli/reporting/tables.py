"""Result tables: a CSV that programs read and the Markdown page that people read, kept by many runs at once.

A `Table` says which columns there are, which of them identify a configuration, which rows of others stand beside
ours, and how a value is shown. `update` replaces the row of a configuration or adds one, under a lock on the
results directory, and gives both files their names only when they are complete.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.reporting.atomic import replace_text

Value = str | int | float | None
Row = Mapping[str, Value]

# How a row came to be, in the column `kind`. Numbers that a paper reports are never mixed up with ours.
MEASURED, SIMULATED, REPORTED = "measured", "simulated", "reported"
KIND = "kind"


@dataclass(frozen=True)
class Column:
    """A column: name in CSV (as in summary.json), heading in Markdown (None: CSV only), how a CSV text is shown."""

    name: str
    title: str | None = None
    show: Callable[[str], str] = str


@dataclass(frozen=True)
class Table:
    """A table: `<name>.csv` and `<name>.md`.

    `key`: columns that identify a configuration. `reported`: rows of the paper, generated anew each time.
    `order`: from a row's CSV texts to its place; rows that compare equal keep the order in which they were first added.
    """

    name: str
    title: str
    introduction: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    reported: tuple[Row, ...]
    order: Callable[[Mapping[str, str]], tuple[str | int, ...]]


def update(results_dir: Path, table: Table, row: Row) -> None:
    """Put our `row` into the table in `results_dir`, in place of an earlier one of the same configuration.

    `row` must hold the key columns and `kind`, "measured" or "simulated"; columns that it lacks stay empty.
    Raises ValueError for a row that breaks this, OSError when the files cannot be written; they are then as before.
    """
    names = [column.name for column in table.columns]
    wrong = sorted(row.keys() - set(names)) + [name for name in table.key if name not in row]
    if wrong or row.get(KIND) not in (MEASURED, SIMULATED):
        raise ValueError(f"not a row of the table {table.name}: {', '.join(wrong) or KIND}")
    results_dir.mkdir(parents=True, exist_ok=True)
    new = _texts(row, names)
    with _locked(results_dir):
        ours = [old for old in read(results_dir, table) if old.get(KIND) != REPORTED]
        place = next((i for i, old in enumerate(ours) if _same(old, new, table.key)), len(ours))
        ours[place : place + 1] = [new]
        rows = sorted([*(_texts(reported, names) for reported in table.reported), *ours], key=table.order)
        replace_text(results_dir / f"{table.name}.csv", _csv(rows, names))
        replace_text(results_dir / f"{table.name}.md", _markdown(table, rows))


def read(results_dir: Path, table: Table) -> list[dict[str, str]]:
    """All rows of the CSV, reported ones too, as texts by column; none where there is no file."""
    path = results_dir / f"{table.name}.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: text or "" for name, text in row.items() if name is not None} for row in csv.DictReader(file)]


def percent(text: str) -> str:
    """A fraction as a percentage with two decimals."""
    return f"{100 * float(text):.2f}"


def grouped(text: str) -> str:
    """A whole number with its thousands apart."""
    return f"{int(text):,}"


def rounded(text: str) -> str:
    """A number to four significant digits."""
    return f"{float(text):.4g}"


def code(text: str) -> str:
    """A command, in a font that shows it letter by letter."""
    return f"`{text}`"


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    # A lock on the directory itself leaves no lock file behind, and dies with its process.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _texts(row: Row, names: Iterable[str]) -> dict[str, str]:
    return {name: "" if row.get(name) is None else str(row[name]) for name in names}


def _same(one: Mapping[str, str], other: Mapping[str, str], key: Iterable[str]) -> bool:
    return all(one.get(name, "") == other.get(name, "") for name in key)


def _csv(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    # Columns of another version of gpipe stay, after ours.
    foreign = dict.fromkeys(name for row in rows for name in row if name not in names)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [*names, *foreign], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _markdown(table: Table, rows: Sequence[Mapping[str, str]]) -> str:
    shown = [column for column in table.columns if column.title is not None]
    lines = [f"# {table.title}", "", table.introduction, ""]
    lines.append("| " + " | ".join(str(column.title) for column in shown) + " |")
    lines.append("|" + "---|" * len(shown))
    for row in rows:
        cells = [_cell(column.show, row.get(column.name, "")) for column in shown]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(show: Callable[[str], str], text: str) -> str:
    if not text:
        return ""
    return " ".join(show(text).split()).replace("|", "\\|")
