"""Some classes of a data set, and so many training samples of each: what transfer from few samples is tried on.

Samples are chosen by their labels alone, no picture is loaded. The held-out split keeps all samples of the classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from gpipe_cli.config import DatasetConfig
from gpipe_cli.data.info import DataInfo, some_names
from gpipe_cli.data.seeding import derive_seed
from gpipe_cli.errors import ConfigError


class Labelled(Protocol):
    """A split: items (picture, label), the labels of all samples, and the names of labels 0, 1, ..."""

    labels: list[int]
    classes: tuple[str, ...]

    def __getitem__(self, index: int) -> Any: ...


class Subset(Dataset[tuple[Any, int]]):
    """Samples `indices` of a split, in that order. `classes` are its labels, which are renumbered in their order."""

    def __init__(self, split: Labelled, indices: list[int], classes: tuple[int, ...]) -> None:
        number = {label: new for new, label in enumerate(classes)}
        self._split, self.indices = split, indices
        self.labels = [number[split.labels[index]] for index in indices]
        self.classes = tuple(split.classes[label] for label in classes)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture, _ = self._split[self.indices[index]]
        return picture, self.labels[index]


def is_restricted(config: DatasetConfig) -> bool:
    """Whether only a part of the data set is asked for."""
    return config.classes is not None or config.samples_per_class is not None


def restricted_info(config: DatasetConfig, train: Subset, evaluation: Subset) -> DataInfo:
    """Facts of the chosen part. Raises ConfigError when nothing is held out of it."""
    if not len(evaluation):
        problem = "the held-out split has no samples of these classes; choose one that it has"
        raise ConfigError("dataset.classes", config.classes, problem)
    return DataInfo(config.name, len(train), len(evaluation), train.classes)


def restrict(config: DatasetConfig, whole: Labelled, split: str, seed: int) -> Subset:
    """The part of a split that `dataset.classes` and `dataset.samples_per_class` name, in the order of the whole.

    Which training samples of a class are taken depends on the seed and the class, not on the other classes. Raises
    ConfigError for classes that do not exist, or have too few training samples.
    """
    classes = _chosen(config, whole.classes)
    by_class: dict[int, list[int]] = {label: [] for label in classes}
    for index, label in enumerate(whole.labels):
        if label in by_class:
            by_class[label].append(index)
    if split == "train":
        by_class = {label: _drawn(config, whole.classes[label], by_class[label], seed) for label in classes}
    return Subset(whole, sorted(index for indices in by_class.values() for index in indices), classes)


def _chosen(config: DatasetConfig, names: tuple[str, ...]) -> tuple[int, ...]:
    """Labels that `dataset.classes` names, all of them when it is null. A word that is a name is not a number."""
    if config.classes is None:
        return tuple(range(len(names)))

    def refuse(problem: str) -> ConfigError:
        return ConfigError("dataset.classes", config.classes, problem)

    labels: list[int] = []
    for word in config.classes:
        if word in names:
            label = names.index(word)
        elif word.isascii() and word.isdecimal() and int(word) < len(names):
            label = int(word)
        else:
            near = [] if word.lstrip("-").isdecimal() else difflib.get_close_matches(word, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {some_names(names)}, or 0 to {len(names) - 1}"
            raise refuse(f"no class {word} in {config.name}; {hint}")
        if label in labels:
            raise refuse(f"class {_named(label, names)} is there twice; name each class once")
        labels.append(label)
    if len(labels) < 2:
        raise refuse("expected two classes or more, there is nothing to tell apart in one")
    return tuple(labels)


def _drawn(config: DatasetConfig, name: str, indices: list[int], seed: int) -> list[int]:
    """`samples_per_class` of a class's training samples, or all of them."""
    wanted = config.samples_per_class
    if len(indices) < (wanted or 1):
        key, value = ("samples_per_class", wanted) if wanted else ("classes", config.classes)
        remedy = f"only {len(indices)} training samples; use that or less" if indices else "no training samples"
        raise ConfigError(f"dataset.{key}", value, f"class {name} has {remedy}")
    if wanted is None:
        return indices
    generator = torch.Generator().manual_seed(derive_seed("samples per class", seed, name))
    return [indices[place] for place in torch.randperm(len(indices), generator=generator)[:wanted].tolist()]


def _named(label: int, names: Sequence[str]) -> str:
    return names[label] if names[label] == str(label) else f"{names[label]} (number {label})"
