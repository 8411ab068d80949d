"""Samples for a network that already knows its classes: the labels are the network's, whatever the data hold.

Training numbers the classes of its training split. Data that are evaluated later may lack some of them, or lack the
training split altogether, and must not be numbered anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from gpipe_cli.config import DatasetConfig
from gpipe_cli.data.datasets import Split, open_split, prepare
from gpipe_cli.data.folder import ClassFolder, class_names, split_folder
from gpipe_cli.data.info import DataInfo, some_names
from gpipe_cli.errors import ConfigError

_CLASS_FOLDERS = ("folder", "birdsnap", "imagenet")


def open_known(
    config: DatasetConfig, split: Split, classes: tuple[str, ...], seed: int
) -> tuple[DataInfo, Dataset[Any]]:
    """The samples of one split, as open_split, with their place in `classes` as labels; and their facts.

    One rank calls this. Of class folders only those of the split must be there, and no more than `classes`; then the
    facts count no samples of the other split. Raises ConfigError, one line, for a class that is not among `classes`,
    and otherwise as prepare.
    """
    try:
        info = prepare(config, seed)
    except ConfigError:
        if config.name not in _CLASS_FOLDERS or config.path is None or config.samples_per_class is not None:
            raise
        info = None
    if info is not None and info.classes == classes:
        return info, open_split(config, split, seed)
    if config.name in _CLASS_FOLDERS:
        return _open_folder(config, split, classes)
    assert info is not None
    _refuse_unknown("dataset", config.name, info.classes, classes)
    labels = tuple(classes.index(name) for name in info.classes)
    return DataInfo(info.name, info.num_train, info.num_eval, classes), _Relabelled(
        open_split(config, split, seed), labels
    )


def _open_folder(config: DatasetConfig, split: Split, classes: tuple[str, ...]) -> tuple[DataInfo, Dataset[Any]]:
    root = split_folder(str(config.path), split, train_split=config.train_split, eval_split=config.eval_split)
    if config.classes is None:  # else the run has left others out, too
        _refuse_unknown("dataset.path", root, class_names(root), classes)
    dataset = ClassFolder(root, classes)
    if len(dataset) == 0:
        raise ConfigError("dataset.path", root, f"no pictures in folders of the classes {some_names(classes)}")
    num_train, num_eval = (len(dataset), 0) if split == "train" else (0, len(dataset))
    return DataInfo(config.name, num_train, num_eval, classes), dataset


def _refuse_unknown(key: str, value: str | Path, found: tuple[str, ...], classes: tuple[str, ...]) -> None:
    if unknown := sorted(set(found) - set(classes)):
        are = "is" if len(unknown) == 1 else "are"
        problem = (
            f"{some_names(unknown)} {are} not among the classes that the network knows, which are {some_names(classes)}"
        )
        raise ConfigError(key, value, f"{problem}; leave other classes out")


class _Relabelled(Dataset[Any]):
    """The same samples, label i called labels[i]."""

    def __init__(self, dataset: Dataset[Any], labels: tuple[int, ...]) -> None:
        self.dataset, self.labels = dataset, labels

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture, label = self.dataset[index]
        return picture, self.labels[label]
