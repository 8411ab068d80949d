"""The data sets that the paper transfers to, besides CIFAR: annotation files that list pictures, read by torchvision.

torchvision's classes know the layouts and the archives; whether a data set is whole they only tell by its folders. Here
every picture that the annotations list must be there. Pictures are then read as any other file (picture_files.py).
Their lists are attributes that torchvision calls private: the tests read the layouts from small archives.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpipe_cli.data.info import DataInfo
from gpipe_cli.data.install import Archive, data_root, exclusive, install, without_deprecations
from gpipe_cli.data.picture_files import PictureFiles
from gpipe_cli.errors import ConfigError

_KAGGLE_CARS = "https://www.kaggle.com/datasets/jessicali9530/stanford-cars-dataset"
_CARS_DEVKIT = "https://github.com/pytorch/vision/issues/7545"


@dataclass(frozen=True)
class Layout:
    """How a data set lies below dataset.path, and its torchvision class.

    folder: its own folder there. splits: torchvision's names of "train" and "eval". lists: the file with the pictures
    of each, and shared: other files that both need. sizes: pictures of each as published. listed: from an object of the
    class to paths and labels. archives: from the class to what `folder` is unpacked from, none where no host has them.
    """

    class_name: str
    folder: str
    splits: dict[str, str]
    lists: dict[str, str]
    sizes: dict[str, int]
    listed: Callable[[Any], tuple[Sequence[Any], Sequence[Any]]]
    archives: Callable[[Any], tuple[Archive, ...]]
    shared: tuple[str, ...] = ()


LAYOUTS = {
    "oxford_pets": Layout(
        class_name="OxfordIIITPet",
        folder="oxford-iiit-pet",
        splits={"train": "trainval", "eval": "test"},
        lists={"train": "annotations/trainval.txt", "eval": "annotations/test.txt"},
        sizes={"train": 3_680, "eval": 3_669},  # the paper prints 3,369
        listed=lambda pets: (pets._images, pets._labels),
        archives=lambda cls: tuple(Archive(url, md5, "oxford-iiit-pet") for url, md5 in cls._RESOURCES),
    ),
    "food101": Layout(
        class_name="Food101",
        folder="food-101",
        splits={"train": "train", "eval": "test"},
        lists={"train": "meta/train.json", "eval": "meta/test.json"},
        sizes={"train": 75_750, "eval": 25_250},
        listed=lambda food: (food._image_files, food._labels),
        archives=lambda cls: (Archive(cls._URL, cls._MD5),),
    ),
    "fgvc_aircraft": Layout(
        class_name="FGVCAircraft",
        folder="fgvc-aircraft-2013b",
        splits={"train": "trainval", "eval": "test"},
        lists={"train": "data/images_variant_trainval.txt", "eval": "data/images_variant_test.txt"},
        sizes={"train": 6_667, "eval": 3_333},
        listed=lambda aircraft: (aircraft._image_files, aircraft._labels),
        archives=lambda cls: (Archive(cls._URL, None),),
        shared=("data/variants.txt",),
    ),
    "stanford_cars": Layout(
        class_name="StanfordCars",
        folder="stanford_cars",
        splits={"train": "train", "eval": "test"},
        lists={"train": "devkit/cars_train_annos.mat", "eval": "cars_test_annos_withlabels.mat"},
        sizes={"train": 8_144, "eval": 8_041},
        listed=lambda cars: ([path for path, _ in cars._samples], [label for _, label in cars._samples]),
        archives=lambda _: (),
        shared=("devkit/cars_meta.mat",),
    ),
}


def transfer_info(name: str, path: str | None, download: bool) -> DataInfo:
    """Install the data set below `path` if it is not there, check that it is whole, and describe it.

    Raises ConfigError, one line with the file and the remedy, for whatever is missing or damaged. A folder that is
    there is never replaced, it may hold what somebody put there. Warns of counts other than the published ones.
    """
    root = data_root(name, path)
    layout = LAYOUTS[name]
    if name == "stanford_cars" and importlib.util.find_spec("scipy") is None:
        problem = "reads the .mat files of Stanford Cars with SciPy, which is not installed"
        raise ConfigError("dataset", name, f"{problem}: pip install 'gpipe-cli[cars]'")
    if not (root / layout.folder).is_dir():
        _install(name, root, download)
    sets = {split: _read(name, root, split) for split in layout.splits}
    for split, pictures in sets.items():
        _check_whole(name, root, split, pictures)
        if len(pictures) != layout.sizes[split]:
            counts = f"lists {len(pictures):,} pictures, as published it has {layout.sizes[split]:,}"
            logging.getLogger("gpipe").warning("%s: %s", root / layout.folder / layout.lists[split], counts)
    if sets["eval"].classes != sets["train"].classes:  # labels would not mean the same
        file, other = layout.lists["eval"], layout.lists["train"]
        raise _incomplete(name, root, file, f"has other classes than {other}")
    return DataInfo(name, len(sets["train"]), len(sets["eval"]), sets["train"].classes)


def open_transfer(name: str, path: str | None, split: str) -> PictureFiles:
    """One split of a prepared data set. Raises ConfigError when its list cannot be read."""
    pictures = _read(name, data_root(name, path), split)
    return PictureFiles(pictures.paths, pictures.labels, pictures.classes)


@dataclass(frozen=True)
class _Listed:
    """What a list says: paths and labels of its pictures, names of the labels."""

    paths: list[str]
    labels: list[int]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)


def _read(name: str, root: Path, split: str) -> _Listed:
    layout = LAYOUTS[name]
    for file in (*layout.shared, layout.lists[split]):
        if not (root / layout.folder / file).is_file():
            raise _incomplete(name, root, file, "is missing")
    try:
        with without_deprecations():
            dataset = _torchvision_class(name)(root, split=layout.splits[split])
    except Exception as error:  # parsers raise ValueError, KeyError, OSError, zlib.error, ... for damaged lists
        raise _incomplete(name, root, layout.lists[split], f"cannot be read ({_why(error)})") from None
    paths, labels = layout.listed(dataset)
    listed = _Listed([str(path) for path in paths], [int(label) for label in labels], tuple(dataset.classes))
    if not listed.paths:
        raise _incomplete(name, root, layout.lists[split], "lists no pictures")
    if wrong := set(listed.labels) - set(range(len(listed.classes))):
        problem = f"has label {min(wrong) + 1} but names {len(listed.classes)} classes"
        raise _incomplete(name, root, layout.lists[split], problem)
    return listed


def _check_whole(name: str, root: Path, split: str, pictures: _Listed) -> None:
    layout = LAYOUTS[name]
    folders = {os.path.dirname(path) for path in pictures.paths}
    there = {os.path.join(folder, file) for folder in folders if os.path.isdir(folder) for file in os.listdir(folder)}
    missing = [path for path in pictures.paths if path not in there]
    if missing:
        file = os.path.relpath(missing[0], root / layout.folder)
        counts = f"{len(missing):,} of {len(pictures):,} pictures missing"
        raise _incomplete(name, root, file, f"is listed in {layout.lists[split]} but not there ({counts})")


def _incomplete(name: str, root: Path, file: str, problem: str) -> ConfigError:
    """`file` is relative to the data set's folder."""
    layout = LAYOUTS[name]
    folder = root / layout.folder
    archives = layout.archives(_torchvision_class(name))
    names = " and ".join(archive.name for archive in archives)
    remedy = f"remove {folder} and fetch it anew (dataset.download=true), or unpack {names} again"
    return ConfigError("dataset.path", root, f"{layout.folder}/{file} {problem}; {remedy if archives else _by_hand()}")


def _by_hand() -> str:
    """Where Stanford Cars is, and how it must lie, now that nothing can fetch it."""
    pictures = f"cars_train/*.jpg, cars_test/*.jpg and cars_test_annos_withlabels.mat from {_KAGGLE_CARS}"
    devkit = f"devkit/cars_meta.mat and devkit/cars_train_annos.mat from car_devkit.tgz, linked in {_CARS_DEVKIT}"
    return f"put into stanford_cars/ {pictures}, {devkit} (its own host is gone)"


def _install(name: str, root: Path, download: bool) -> None:
    layout = LAYOUTS[name]
    cls = _torchvision_class(name)
    archives = layout.archives(cls)
    if not archives:
        raise ConfigError("dataset.path", root, f"no {layout.folder}/ there, and nothing can fetch it; {_by_hand()}")
    if not download:
        absent = [archive for archive in archives if not archive.is_whole(root)]
        if absent:
            state = {it: f"{it.name} fails its MD5 check" for it in absent if (root / it.name).exists()}
            whats = " and ".join(state.get(it, f"no {it.name}") for it in absent)
            remedy = f"use dataset.download=true, or put there {' and '.join(it.url for it in absent)}"
            raise ConfigError("dataset.path", root, f"no {layout.folder}/ there, {whats}; {remedy}")
    with exclusive(root):
        if not (root / layout.folder).is_dir():  # else another run has installed it while this one waited
            # finds the archives whole, so it only unpacks
            install(root, layout.folder, archives, lambda aside: cls(aside, download=True))


def _torchvision_class(name: str) -> Any:
    import torchvision.datasets  # seconds to import, for these data sets only

    return getattr(torchvision.datasets, LAYOUTS[name].class_name)


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"unknown class {error}"
    if isinstance(error, ValueError) and "unpack" in str(error):
        return "a line is cut short"
    return str(error) or type(error).__name__
