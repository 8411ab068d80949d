"""Labels of samples that are evaluated are those that the network was trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from gpipe_cli.compose import load
from gpipe_cli.config import DatasetConfig
from gpipe_cli.data.known_classes import open_known
from gpipe_cli.errors import ConfigError

KNOWN = ("a", "b", "c")


def folder(root: Path, *classes: str) -> None:
    """A picture for each "split/class"."""
    for number, name in enumerate(classes):
        path = root / name / f"{number}.png"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(path)


def dataset(*words: str) -> DatasetConfig:
    config: DatasetConfig = load("train", ["model.filters=4", "image_size=8", *words]).dataset
    return config


def labels(root: Path, split: str = "eval", classes: tuple[str, ...] = KNOWN, *words: str) -> list[int]:
    config = dataset("dataset=folder", f"dataset.path={root}", *words)
    info, samples = open_known(config, split, classes, 0)  # type: ignore[arg-type]
    assert info.classes == classes
    assert (info.num_eval if split == "eval" else info.num_train) == len(samples)  # type: ignore[arg-type]
    return [samples[index][1] for index in range(len(samples))]  # type: ignore[arg-type]


def test_the_data_of_the_training_have_their_labels(tmp_path: Path) -> None:
    folder(tmp_path, "train/a", "train/b", "train/c", "val/b", "val/c")
    assert labels(tmp_path) == [1, 2]
    assert labels(tmp_path, "train") == [0, 1, 2]


def test_a_training_split_of_other_classes_changes_no_label(tmp_path: Path) -> None:
    folder(tmp_path, "train/c", "train/x", "val/c")
    assert labels(tmp_path) == [2]


def test_a_training_split_that_is_not_there_is_not_needed(tmp_path: Path) -> None:
    folder(tmp_path, "test/b", "test/c")
    assert labels(tmp_path) == [1, 2]


def test_an_unknown_class_is_one_line(tmp_path: Path) -> None:
    folder(tmp_path, "train/a", "train/d", "val/a", "val/d")
    with pytest.raises(ConfigError, match=r"^dataset.path=.*: d is not among the classes .*, which are a, b, c; leave"):
        labels(tmp_path)


def test_a_split_without_pictures_of_the_classes_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "val" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no pictures in folders of the classes a, b, c"):
        labels(tmp_path)


def test_a_missing_split_is_one_line(tmp_path: Path) -> None:
    folder(tmp_path, "train/a")
    with pytest.raises(ConfigError, match="no folder val/ or valid/ or validation/ or test/"):
        labels(tmp_path)


def test_classes_that_the_run_left_out_are_left_out(tmp_path: Path) -> None:
    folder(tmp_path, "train/b", "train/c", "train/d", "val/b", "val/c", "val/d")
    assert labels(tmp_path, "eval", ("c", "b"), "dataset.classes=[c,b]") == [1, 0]
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    assert labels(tmp_path, "eval", ("c", "b"), "dataset.classes=[c,b]") == [0, 1]  # sorted by label


def test_classes_in_another_order_keep_their_numbers() -> None:
    known = ("7", "3", "1")
    info, samples = open_known(dataset("dataset=digits", "dataset.classes=[1,7]"), "eval", known, 0)
    assert info.classes == known
    seen = {samples[index][1] for index in range(len(samples))}  # type: ignore[arg-type]
    assert seen == {0, 2}


def test_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^dataset=digits: 0, 1, 2, 4, 5, … \(9 in all\) are not among the classes"):
        open_known(dataset("dataset=digits"), "eval", ("3", "x"), 0)
