"""Accuracy by class, as a file, a picture and a table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gpipe_cli.reporting.confusion import class_counts, class_lines, plot_confusion, write_per_class

# Three classes; nobody shows a sample of the second, and one output of the third is not a number.
MATRIX = [[3, 1, 0, 0], [0, 0, 0, 0], [2, 0, 5, 1]]
CLASSES = ("cat", "dog, wet", "$x$")


def test_every_class_has_its_exact_counts_in_the_file(tmp_path: Path) -> None:
    path = write_per_class(tmp_path, class_counts(MATRIX, CLASSES))
    assert path == tmp_path / "per_class.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == list(CLASSES)
    assert [(row["num_right"], row["num_samples"], row["top1"]) for row in rows] == [
        ("3", "4", "0.75"),
        ("0", "0", ""),
        ("5", "8", "0.625"),
    ]
    assert [(row["confused_with"], row["num_confused"]) for row in rows] == [("dog, wet", "1"), ("", "0"), ("cat", "2")]


def test_outputs_that_are_no_numbers_are_somebodys_mistakes() -> None:
    (one,) = class_counts([[1, 2]], ["only"])
    assert (one.top1, one.confused_with, one.num_confused) == (1 / 3, "(not a number)", 2)


def test_few_classes_are_all_on_the_screen() -> None:
    lines = class_lines(class_counts(MATRIX, CLASSES))
    assert [line.split()[0] for line in lines] == ["class", "cat", "dog,", "$x$"]
    assert lines[1].split()[1:] == ["75.00", "3", "4", "dog,", "wet", "(1)"]
    assert lines[2].split()[2:] == ["-", "0", "0"]


def test_of_many_classes_the_worst_are_on_the_screen() -> None:
    number = 30
    matrix = [[0] * (number + 1) for _ in range(number)]
    for label in range(number):
        matrix[label][label] = label  # of 29 samples, the rest taken for the first class; the last is always right
        matrix[label][0] += 29 - label
    matrix[5] = [0] * (number + 1)
    lines = class_lines(class_counts(matrix, [f"class{label}" for label in range(number)]))
    assert lines[0].startswith("worst 10 of 29 classes")
    assert [line.split()[0] for line in lines[1:]] == [f"class{label}" for label in (1, 2, 3, 4, 6, 7, 8, 9, 10, 11)]


@pytest.mark.parametrize("number", [1, 3, 100])
def test_the_picture_is_drawn_for_few_and_many_classes(tmp_path: Path, number: int) -> None:
    matrix = [[int(row == column) for column in range(number)] + [0] for row in range(number)]
    classes = CLASSES if number == 3 else [f"class{label}" for label in range(number)]
    path = plot_confusion(tmp_path, MATRIX if number == 3 else matrix, classes, "amoebanet on $digits")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["confusion.png"]


def test_counts_and_classes_must_fit() -> None:
    with pytest.raises(ValueError, match="expected 2 rows of 3 counts"):
        class_counts(MATRIX, ["cat", "dog"])
