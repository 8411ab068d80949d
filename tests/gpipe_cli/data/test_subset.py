"""Some classes, and so many training samples of each: what is chosen, how it is numbered, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gpipe_cli.data.datasets import open_split, prepare
from gpipe_cli.data.digits import Digits
from gpipe_cli.data.loaders import SkippedPictures, eval_loader, train_loader


def test_only_the_chosen_classes_are_left_numbered_in_their_order(settings: Callable) -> None:
    config = settings("digits", classes=("7", "2", "9"))
    info = prepare(config, 0)
    assert info.classes == ("7", "2", "9")
    for split, number in (("train", info.num_train), ("eval", info.num_eval)):
        whole, part = Digits(split), open_split(config, split, 0)
        expected = [(image, (7, 2, 9).index(label)) for image, label in whole if label in (7, 2, 9)]
        assert len(part) == number == len(expected)
        for (image, label), (expected_image, expected_label) in zip(part, expected, strict=True):
            assert image.equal(expected_image)
            assert label == expected_label
    assert prepare(settings("digits"), 0).num_train == len(Digits("train"))


def test_so_many_training_samples_of_each_class_and_all_held_out_ones(settings: Callable) -> None:
    config = settings("digits", classes=("5", "6", "7", "8", "9"), samples_per_class=10)
    info = prepare(config, 0)
    assert (info.num_train, info.num_classes) == (50, 5)
    assert Counter(label for _, label in open_split(config, "train", 0)) == dict.fromkeys(range(5), 10)
    assert info.num_eval == sum(label >= 5 for label in Digits("eval").labels)
    assert prepare(settings("digits", samples_per_class=1), 0).num_train == 10


def test_the_seed_chooses_the_samples_and_the_other_classes_do_not(settings: Callable) -> None:
    def chosen(seed: int, *classes: str) -> set[int]:
        """Places of the sevens in the whole split."""
        part = open_split(settings("digits", classes=classes, samples_per_class=10), "train", seed)
        return {index for index, label in zip(part.indices, part.labels, strict=True) if part.classes[label] == "7"}

    assert chosen(0, "7", "1") == chosen(0, "7", "1") == chosen(0, "3", "7", "4")
    draws = [chosen(seed, "7", "1") for seed in range(5)]
    assert len({frozenset(draw) for draw in draws}) == 5
    assert all(len(draw) == 10 for draw in draws)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ("1", "ten")}, "dataset.classes=['1',ten]: no class ten in digits; choose from 0, 1, 2, 3, 4, …"),
        ({"classes": ("1", "77")}, "no class 77 in digits; choose from 0, 1, 2, 3, 4, … (10 in all), or 0 to 9"),
        ({"classes": ("1", "-1")}, "no class -1 in digits"),
        ({"classes": ("1", "2", "1")}, "class 1 is there twice; name each class once"),
        ({"classes": ("1", "01")}, "class 1 is there twice"),
        ({"classes": ("1",)}, "dataset.classes=['1']: expected two classes or more"),
    ],
)
def test_classes_that_cannot_be_chosen_are_refused(
    settings: Callable, refused: Callable, changes: dict[str, object], message: str
) -> None:
    assert message in refused(settings("digits", **changes))


def test_more_samples_than_a_class_has_are_refused(settings: Callable, refused: Callable) -> None:
    smallest = min(Counter(Digits("train").labels).values())
    assert prepare(settings("digits", samples_per_class=smallest), 0).num_train == 10 * smallest
    message = refused(settings("digits", samples_per_class=smallest + 1))
    assert message.startswith(f"dataset.samples_per_class={smallest + 1}: class ")
    assert f" has only {smallest} training samples; use that or less" in message


def test_generated_pictures_have_no_subset(settings: Callable, refused: Callable) -> None:
    message = refused(settings("synthetic", classes=("0", "1")))
    assert message.startswith("dataset.classes=['0','1']: dataset=synthetic does not use it")


def test_folders_are_named_or_numbered_and_a_name_wins(
    settings: Callable, write_tree: Callable, refused: Callable
) -> None:
    root = write_tree({f"{split}/{name}": 2 for split in ("train", "val") for name in ("cat", "dog", "0")})

    def classes(*words: str) -> tuple[str, ...]:
        return prepare(settings("folder", path=root, classes=words), 0).classes

    assert classes("dog", "cat") == ("dog", "cat")
    assert classes("2", "1") == ("dog", "cat")
    assert classes("1", "0") == ("cat", "0")  # sorted: 0, cat, dog
    assert "no class dgo in folder; did you mean dog?" in refused(settings("folder", path=root, classes=("cat", "dgo")))


def test_held_out_split_that_lacks_classes_keeps_the_chosen_numbers(
    settings: Callable, write_tree: Callable, refused: Callable
) -> None:
    root = write_tree({"train/a": 3, "train/b": 3, "train/c": 3, "train/d": 3, "val/b": 1, "val/c": 2})
    config = settings("folder", path=root, classes=("d", "c", "a"), samples_per_class=2)
    info = prepare(config, 0)
    assert (info.num_train, info.num_eval, info.classes) == (6, 2, ("d", "c", "a"))
    assert [label for _, label in open_split(config, "eval", 0)] == [1, 1]
    assert "the held-out split has no samples of these classes" in refused(
        settings("folder", path=root, classes=("a", "d"))
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_are_loaded_only_when_asked_for_and_unreadable_ones_left_out(
    settings: Callable, write_tree: Callable, workers: int
) -> None:
    root: Path = write_tree({"train/a": 4, "train/b": 4, "train/c": 4, "val/a": 2, "val/b": 2, "val/c": 2})
    for file in (*root.glob("*/b/*.png"), root / "train/a/0001.png", root / "val/c/0000.png"):
        file.write_bytes(b"no picture")
    config = settings("folder", path=root, classes=("c", "a"), corrupt="skip")
    info = prepare(config, 0)
    lines: list[str] = []
    arguments = {"image_size": 8, "workers": workers, "seed": 0, "skipped": SkippedPictures(lines.append)}
    trained = list(train_loader(config, info, batch_size=4, epoch=0, **arguments))
    evaluated = list(eval_loader(config, info, batch_size=3, **arguments))
    assert sum(len(labels) for _, labels in trained) == 7
    assert [labels.tolist() for _, labels in evaluated] == [[1, 1], [0]]
    named = [line for line in lines if line.startswith("left out")]
    assert len(named) == 2
    assert not any("/b/" in line for line in named)
