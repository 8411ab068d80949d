"""Class folders: labels by the training mapping, and one line for every tree that cannot be used."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from gpipe_cli.data.datasets import open_split, prepare
from gpipe_cli.data.folder import ClassFolder
from gpipe_cli.data.images import as_tensor
from gpipe_cli.errors import ConfigError

SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"


def labels(dataset: ClassFolder) -> list[str]:
    return [f"{Path(path).parent.name}={label}" for path, label in zip(dataset.paths, dataset.labels, strict=True)]


def refused(config: object) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(config, 0)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_held_out_split_without_a_class_keeps_the_training_labels(settings: Callable, write_tree: Callable) -> None:
    config = settings("folder", path=write_tree({"train/a": 2, "train/b": 1, "train/c": 1, "val/b": 1, "val/c": 2}))
    info = prepare(config, 0)
    assert (info.num_train, info.num_eval, info.classes) == (4, 3, ("a", "b", "c"))
    assert labels(open_split(config, "train", 0)) == ["a=0", "a=0", "b=1", "c=2"]
    assert labels(open_split(config, "eval", 0)) == ["b=1", "c=2", "c=2"]


@pytest.mark.parametrize("classes", [None, ("c", "b", "a"), ("b", "c")])
def test_colours_learned_in_training_are_right_on_a_held_out_split_that_lacks_a_class(
    settings: Callable, tmp_path: Path, classes: tuple[str, ...] | None
) -> None:
    """timm#957, ultralytics#13936: labels numbered anew for the held-out folder score 0 instead of 1."""
    colours = {"a": "red", "b": "lime", "c": "blue"}
    for split, names in (("train", "abc"), ("val", "bc")):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), colours[name]).save(tmp_path / split / name / "0.png")
    config = settings("folder", path=tmp_path, classes=classes)
    learned = {as_tensor(picture)[:, 0, 0].argmax().item(): label for picture, label in open_split(config, "train", 0)}
    held_out = list(open_split(config, "eval", 0))
    assert [learned[as_tensor(picture)[:, 0, 0].argmax().item()] for picture, _ in held_out] == [
        label for _, label in held_out
    ]
    assert prepare(config, 0).classes == (classes or ("a", "b", "c"))


def test_empty_class_folder_in_the_held_out_split_is_a_lacking_class(settings: Callable, write_tree: Callable) -> None:
    config = settings("folder", path=write_tree({"train/a": 1, "train/b": 1, "val/a": 0, "val/b": 1}))
    assert prepare(config, 0).num_eval == 1


def test_class_unknown_to_training_is_refused_by_name(settings: Callable, write_tree: Callable) -> None:
    root = write_tree({"train/a": 1, "train/b": 1, "val/b": 1, "val/d": 1})
    message = refused(settings("folder", path=root))
    assert "class d is not in the training split" in message
    assert "a, b" in message


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_held_out_folder_is_found_by_its_usual_names(settings: Callable, write_tree: Callable, name: str) -> None:
    config = settings("folder", path=write_tree({"train/a": 1, f"{name}/a": 3}))
    assert prepare(config, 0).num_eval == 3
    assert len(open_split(config, "eval", 0)) == 3


def test_named_folders_are_used_and_missing_ones_listed(settings: Callable, write_tree: Callable) -> None:
    root = write_tree({"fit/a": 2, "held/a": 1})
    assert prepare(settings("folder", path=root, train_split="fit", eval_split="held"), 0).num_train == 2
    assert "dataset.eval_split=auto: no folder val/ or valid/" in refused(
        settings("folder", path=root, train_split="fit")
    )
    message = refused(settings("folder", path=root, eval_split="held"))
    assert "dataset.train_split=train" in message
    assert "there is fit, held" in message


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"train": 0, "val/a": 1}, "no class folders with pictures"),
        ({"train": 2, "val/a": 1}, "pictures lie outside class folders"),
        ({"train/a": 1, "train/b": 0, "val/a": 1}, "no pictures in the class folders b"),
        ({"train/a": 1, "val": 0}, "no class folders with pictures"),
        ({"train/a": 1, "val/a": 0}, "no pictures"),
    ],
)
def test_trees_without_pictures_are_refused(
    settings: Callable, write_tree: Callable, tree: dict[str, int], problem: str
) -> None:
    assert problem in refused(settings("folder", path=write_tree(tree)))


def test_missing_path_is_refused(settings: Callable, tmp_path: Path) -> None:
    assert "dataset.path=null" in refused(settings("folder"))
    assert "no such folder" in refused(settings("folder", path=tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    assert "a file, not a folder" in refused(settings("folder", path=tmp_path / "file"))


def test_hidden_folders_and_other_files_are_no_data(settings: Callable, write_tree: Callable) -> None:
    root = write_tree({"train/a": 1, "train/.ipynb_checkpoints": 1, "val/a": 1})
    (root / "train/a/notes.txt").write_text("no picture")
    (root / "train/a/._0000.png").write_bytes(b"macOS leftovers")
    os.rename(root / "train/a/0000.png", root / "train/a/UPPER.PNG")
    (root / "train/a/nested").mkdir()
    Image.new("L", (8, 8)).save(root / "train/a/nested/deep.png")
    info = prepare(settings("folder", path=root), 0)
    assert (info.num_train, info.classes) == (2, ("a",))


def test_real_photographs_are_read_without_a_warning(settings: Callable, tmp_path: Path) -> None:
    archive = SHARED_DATA / "imagenet-samples.tar"
    if not archive.exists():
        pytest.skip("needs the sample photographs, which are no part of the project")
    with tarfile.open(archive) as tar:
        # Python 3.10 and 3.11 have filters since their patch releases of 2023.
        tar.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    config = settings("folder", path=tmp_path, train_split=".", eval_split=".")
    info = prepare(config, 0)
    assert (info.num_train, info.num_classes) == (40, 40)
    for picture, _ in open_split(config, "train", 0):
        assert as_tensor(picture).shape[0] == 3
