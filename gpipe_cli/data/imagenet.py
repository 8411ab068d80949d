"""ImageNet-2012 from its archives to class folders, which are then read as any other (folder.py)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tarfile
from pathlib import Path

from gpipe_cli.data.folder import EVAL_FOLDERS
from gpipe_cli.data.install import data_root, exclusive, reason, without_deprecations
from gpipe_cli.errors import ConfigError


def prepare_imagenet(path: str | None) -> None:
    """Unpack ImageNet-2012 from its archives unless the class folders are there already.

    Raises ConfigError naming the archives that are missing, or damaged.
    """
    root = data_root("imagenet", path)
    folders = {"train": ("train",), "val": EVAL_FOLDERS}
    absent = [split for split, names in folders.items() if not any((root / name).is_dir() for name in names)]
    if absent and (missing := _missing_archives(root, absent)):
        problem = f"no class folders in {' and '.join(f'{split}/' for split in absent)}, and no {' and '.join(missing)}"
        remedy = "to unpack them from; get it from https://image-net.org (registration needed) and put it there"
        raise ConfigError("dataset.path", path, f"{problem} {remedy}")
    for split in absent:
        with exclusive(root):
            if not (root / split).is_dir():  # else another run has unpacked it while this one waited
                _unpack(root, split)


def _unpack(root: Path, split: str) -> None:
    from torchvision.datasets import imagenet

    reads_devkit = split == "val" and not (root / imagenet.META_FILE).exists()
    if reads_devkit and importlib.util.find_spec("scipy") is None:
        raise ConfigError("dataset.path", root, "unpacking val/ reads the devkit with SciPy: pip install scipy")
    aside = f".unpacking-{split}"
    shutil.rmtree(root / aside, ignore_errors=True)  # what an interrupted run has left
    try:
        with without_deprecations():
            if split == "train":
                imagenet.parse_train_archive(root, folder=aside)
            else:
                if reads_devkit:
                    imagenet.parse_devkit_archive(root)
                imagenet.parse_val_archive(root, folder=aside)
    except (OSError, RuntimeError, EOFError, tarfile.TarError) as error:
        shutil.rmtree(root / aside, ignore_errors=True)
        raise ConfigError("dataset.path", root, f"unpacking {split}/ failed: {reason(error)}") from None
    os.rename(root / aside, root / split)


def _missing_archives(root: Path, splits: list[str]) -> list[str]:
    from torchvision.datasets import imagenet

    needed = [imagenet.ARCHIVE_META[split][0] for split in splits]
    if "val" in splits and not (root / imagenet.META_FILE).exists():
        needed.append(imagenet.ARCHIVE_META["devkit"][0])  # says which picture is of which class
    return [name for name in needed if not (root / name).is_file()]
