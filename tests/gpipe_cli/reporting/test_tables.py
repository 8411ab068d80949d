"""Tables: a row a configuration, none lost, ours beside the reported ones."""

from __future__ import annotations

import csv
import multiprocessing
from pathlib import Path

import pytest

from gpipe_cli.reporting.tables import KIND, MEASURED, REPORTED, Column, Table, code, grouped, percent, read, update

TABLE = Table(
    name="speed",
    title="Speed",
    introduction="As measured.",
    columns=(
        Column("model", "model"),
        Column("partitions", "K", grouped),
        Column("share", "share %", percent),
        Column("hidden"),
        Column(KIND, "kind"),
        Column("command_line", "command", code),
    ),
    key=("model", "partitions"),
    reported=({"model": "b", "share": 0.5, KIND: REPORTED},),
    order=lambda row: (row["model"], row[KIND] != REPORTED),
)


def add(directory: Path, model: str, partitions: int, share: float | None = 0.25, kind: str = MEASURED) -> None:
    update(directory, TABLE, {"model": model, "partitions": partitions, "share": share, "hidden": 1, KIND: kind})


def shown(directory: Path) -> list[tuple[str, str, str]]:
    return [(row["model"], row["partitions"], row["share"]) for row in read(directory, TABLE)]


def test_rows_of_a_configuration_replace_each_other(tmp_path: Path) -> None:
    assert read(tmp_path, TABLE) == []
    add(tmp_path, "b", 1)
    add(tmp_path, "b", 2)
    add(tmp_path, "a", 1)
    add(tmp_path, "b", 1, share=0.75)
    assert shown(tmp_path) == [("a", "1", "0.25"), ("b", "", "0.5"), ("b", "1", "0.75"), ("b", "2", "0.25")]


def test_fractions_in_csv_are_percent_in_markdown(tmp_path: Path) -> None:
    row = {"model": "a|b", "partitions": 4000, "share": 0.123456, KIND: MEASURED, "command_line": "gpipe train\nx=1"}
    update(tmp_path, TABLE, row)
    with (tmp_path / "speed.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["share"] == "0.123456"
    lines = (tmp_path / "speed.md").read_text().splitlines()
    assert lines[:5] == ["# Speed", "", "As measured.", "", "| model | K | share % | kind | command |"]
    assert lines[6] == "| a\\|b | 4,000 | 12.35 | measured | `gpipe train x=1` |"


def test_values_that_do_not_apply_are_empty(tmp_path: Path) -> None:
    add(tmp_path, "a", 1, share=None)
    assert shown(tmp_path)[0] == ("a", "1", "")
    assert "| a | 1 |  | measured |  |" in (tmp_path / "speed.md").read_text()


def test_columns_of_another_version_stay(tmp_path: Path) -> None:
    (tmp_path / "speed.csv").write_text("model,partitions,kind,later\na,1,measured,42\n")
    add(tmp_path, "a", 2)
    rows = read(tmp_path, TABLE)
    assert [row["later"] for row in rows] == ["42", "", ""]


@pytest.mark.parametrize(
    "row",
    [
        {"model": "a", "partitions": 1},
        {"model": "a", "partitions": 1, KIND: "guessed"},
        {"model": "a", "partitions": 1, KIND: REPORTED},
        {"model": "a", KIND: MEASURED},
        {"model": "a", "partitions": 1, KIND: MEASURED, "shaer": 1},
    ],
)
def test_row_that_is_not_of_the_table_is_a_bug(row: dict[str, str | int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a row of the table speed"):
        update(tmp_path, TABLE, row)


def _add_many(directory: Path, model: str) -> None:
    for partitions in range(20):
        add(directory, model, partitions)


def test_runs_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    models = ("a", "b", "c", "d")
    processes = [context.Process(target=_add_many, args=(tmp_path, model)) for model in models]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    ours = [row for row in read(tmp_path, TABLE) if row[KIND] == MEASURED]
    assert {(row["model"], row["partitions"]) for row in ours} == {(m, str(k)) for m in models for k in range(20)}
    assert len(ours) == 80
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed.csv", "speed.md"]
