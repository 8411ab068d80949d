"""CIFAR-10 and CIFAR-100 through torchvision's classes: every file verified, fetched once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Dataset

from gpipe_cli.data.info import DataInfo
from gpipe_cli.data.install import Archive, data_root, exclusive, install, is_whole, without_deprecations
from gpipe_cli.errors import ConfigError


class Cifar(Dataset[tuple[Image.Image, int]]):
    """One split: items (RGB picture of 32x32, label); `classes` names the labels."""

    def __init__(self, pictures: Any) -> None:
        self._pictures = pictures
        self.labels: list[int] = pictures.targets
        self.classes: tuple[str, ...] = tuple(pictures.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        picture, label = self._pictures[index]
        return picture, label


def cifar_info(name: str, path: str | None, download: bool) -> DataInfo:
    """Install the data set below `path` if it is not there, and describe it.

    Nothing is fetched when the folder, or torchvision's archive beside it, is whole. Raises ConfigError when the data
    are missing or damaged and `download` is false, or the download fails.
    """
    root = data_root(name, path)
    cls = _torchvision_class(name)
    archive = Archive(cls.url, cls.tgz_md5)
    damaged = _damaged_file(cls, root)
    if damaged is not None:
        if not (download or archive.is_whole(root)):
            raise ConfigError("dataset.path", path, _what_is_missing(archive, root, damaged))
        with exclusive(root):
            if _damaged_file(cls, root) is not None:  # else another run has installed it while this one waited
                # finds the archive whole, so it only unpacks
                install(root, cls.base_folder, (archive,), lambda aside: cls(aside, download=True))
    train_set, eval_set = open_cifar(name, path, "train"), open_cifar(name, path, "eval")
    return DataInfo(name, len(train_set), len(eval_set), train_set.classes)


def open_cifar(name: str, path: str | None, split: str) -> Cifar:
    """One split of an installed CIFAR. Raises ConfigError when it is not there, or damaged."""
    try:
        with without_deprecations():
            return Cifar(_torchvision_class(name)(data_root(name, path), train=split == "train"))
    except RuntimeError as error:  # torchvision's "not found or corrupted"
        raise ConfigError("dataset.path", path, f"{name} cannot be read: {error}") from None


def _torchvision_class(name: str) -> Any:
    from torchvision.datasets import CIFAR10, CIFAR100  # seconds to import, for these data sets only

    return {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]


def _damaged_file(cls: Any, root: Path) -> str | None:
    """The first file of an installed CIFAR that is missing or fails its checksum, or None when all are whole."""
    files = [*cls.train_list, *cls.test_list, (cls.meta["filename"], cls.meta["md5"])]
    for name, md5 in files:
        if not is_whole(root / cls.base_folder / name, md5):
            return f"{cls.base_folder}/{name}"
    return None


def _what_is_missing(archive: Archive, root: Path, damaged: str) -> str:
    what = f"{damaged} fails its MD5 check" if (root / damaged).exists() else f"no {damaged} there"
    if (root / archive.name).exists():
        what += f", and {archive.name} fails its MD5 check"
    return f"{what}; use dataset.download=true, or put {archive.name} from {archive.url} there"
