"""Any tree of class folders: <root>/train/<class>/…/<picture> and <root>/val/<class>/…/<picture>.

The training split's folder names, sorted, are labels 0, 1, …, for both splits: a held-out split that lacks a class
keeps the numbers of the others, and one with a class of its own is refused. ImageNet in its usual unpacked form is read
by this module too.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpipe_cli.data.info import DataInfo, some_names
from gpipe_cli.data.picture_files import PictureFiles
from gpipe_cli.errors import ConfigError

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
EVAL_FOLDERS = ("val", "valid", "validation", "test")  # in this order, for eval_split=auto


class ClassFolder(PictureFiles):
    """Pictures of one split, sorted by class and path. `root` holds a folder for each of `classes`, or lacks some."""

    def __init__(self, root: Path, classes: tuple[str, ...]) -> None:
        paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            found = picture_paths(root / name)
            paths += found
            labels += [label] * len(found)
        super().__init__(paths, labels, classes)
        self.root = root


def folder_info(name: str, train_root: Path, eval_root: Path) -> DataInfo:
    """Scan both splits. Raises ConfigError, naming the folder, when the tree cannot be trained on."""
    classes = class_names(train_root)
    if not classes:
        raise ConfigError("dataset.path", train_root, _no_classes(train_root))
    num_by_class = {label: len(picture_paths(train_root / label)) for label in classes}
    if empty := [label for label, number in num_by_class.items() if number == 0]:
        problem = f"no pictures in the class folders {some_names(empty)}; pictures end in {' '.join(PICTURE_SUFFIXES)}"
        raise ConfigError("dataset.path", train_root, problem)
    eval_classes = class_names(eval_root)
    if unknown := sorted(set(eval_classes) - set(classes)):
        problem = f"class {some_names(unknown)} is not in the training split, whose classes are {some_names(classes)}"
        raise ConfigError("dataset.path", eval_root, f"{problem}; remove the folder or train on that class too")
    num_eval = sum(len(picture_paths(eval_root / label)) for label in eval_classes)
    if num_eval == 0:
        raise ConfigError("dataset.path", eval_root, _no_classes(eval_root) if not eval_classes else "no pictures")
    return DataInfo(name, sum(num_by_class.values()), num_eval, classes)


def split_folder(path: str, split: str, *, train_split: str, eval_split: str) -> Path:
    """Folder of a split. Raises ConfigError when it is missing, saying which folders are there."""
    root = Path(path).expanduser()
    if not root.is_dir():
        problem = "a file, not a folder" if root.exists() else "no such folder"
        raise ConfigError("dataset.path", path, f"{problem}; name the one that holds {train_split}/")
    key, name = ("dataset.train_split", train_split) if split == "train" else ("dataset.eval_split", eval_split)
    candidates = EVAL_FOLDERS if split == "eval" and name == "auto" else (name,)
    for candidate in candidates:
        if (root / candidate).is_dir():
            return root / candidate
    there = class_names(root)
    problem = f"no folder {' or '.join(f'{candidate}/' for candidate in candidates)} in {root}"
    raise ConfigError(
        key, name, f"{problem}; there is {some_names(there)}" if there else f"{problem}, it has no folders"
    )


def class_names(root: Path) -> tuple[str, ...]:
    """Sorted names of the folders in `root`; hidden ones (.ipynb_checkpoints) are no classes."""
    with os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def picture_paths(root: Path) -> list[str]:
    """Sorted paths of all pictures below `root`, by their suffix; none when `root` does not exist."""
    found = []
    for folder, _, names in os.walk(root, followlinks=True):
        pictures = [name for name in names if name.lower().endswith(PICTURE_SUFFIXES)]
        # Hidden files are no pictures: archives from macOS hold a "._name.jpg" beside each name.jpg.
        found += [os.path.join(folder, name) for name in pictures if not name.startswith(".")]
    return sorted(found)


def _no_classes(root: Path) -> str:
    loose = any(name.lower().endswith(PICTURE_SUFFIXES) for name in os.listdir(root))
    return "pictures lie outside class folders; move them to <class>/" if loose else "no class folders with pictures"
