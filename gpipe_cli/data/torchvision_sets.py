"""CIFAR-10, CIFAR-100 and ImageNet through torchvision's classes, installed whole or not at all.

torchvision verifies (MD5), unpacks and reads. Here that happens aside, in a hidden folder beside the final place, and a
rename ends it: an interruption leaves no half data set that looks whole. A lock makes a second run wait, not download
again. ImageNet's unpacked class folders are then read as any other folder.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tarfile
import tempfile
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from gpipe_cli.data.folder import EVAL_FOLDERS
from gpipe_cli.data.info import DataInfo
from gpipe_cli.errors import ConfigError

_STALLED_AFTER_S = 60.0  # a server that sends nothing for so long has failed


def cifar_info(name: str, path: str | None, download: bool) -> DataInfo:
    """Install the data set below `path` if it is not there, and describe it.

    Nothing is fetched when the folder, or torchvision's archive beside it, is whole. Raises ConfigError when the data
    are missing or damaged and `download` is false, or the download fails.
    """
    root = _root(name, path)
    cls = _cifar_class(name)
    damaged = _damaged_file(cls, root)
    if damaged is not None:
        archive_is_whole = _is_whole(root / cls.filename, cls.tgz_md5)
        if not (download or archive_is_whole):
            raise ConfigError("dataset.path", path, _what_is_missing(cls, root, damaged))
        with _exclusive(root):
            if _damaged_file(cls, root) is not None:  # else another run has installed it while this one waited
                _install_cifar(cls, root)
    train_set, eval_set = open_cifar(name, path, "train"), open_cifar(name, path, "eval")
    return DataInfo(name, len(train_set), len(eval_set), tuple(train_set.classes))


def open_cifar(name: str, path: str | None, split: str) -> Any:
    """torchvision's data set: items (RGB picture of 32x32, label)."""
    try:
        with _without_deprecations():
            return _cifar_class(name)(_root(name, path), train=split == "train")
    except RuntimeError as error:  # torchvision's "not found or corrupted"
        raise ConfigError("dataset.path", path, f"{name} cannot be read: {error}") from None


def prepare_imagenet(path: str | None) -> None:
    """Unpack ImageNet-2012 from its archives unless the class folders are there already.

    Raises ConfigError naming the archives that are missing, or damaged.
    """
    root = _root("imagenet", path)
    folders = {"train": ("train",), "val": EVAL_FOLDERS}
    absent = [split for split, names in folders.items() if not any((root / name).is_dir() for name in names)]
    if absent and (missing := _missing_archives(root, absent)):
        problem = f"no class folders in {' and '.join(f'{split}/' for split in absent)}, and no {' and '.join(missing)}"
        remedy = "to unpack them from; get it from https://image-net.org (registration needed) and put it there"
        raise ConfigError("dataset.path", path, f"{problem} {remedy}")
    for split in absent:
        with _exclusive(root):
            if not (root / split).is_dir():  # else another run has unpacked it while this one waited
                _install_imagenet(root, split)


def _root(name: str, path: str | None) -> Path:
    if path is None:
        raise ConfigError("dataset.path", None, f"dataset={name} needs the folder of its data, dataset.path=FOLDER")
    return Path(path).expanduser()


def _cifar_class(name: str) -> Any:
    from torchvision.datasets import CIFAR10, CIFAR100  # seconds to import, for these data sets only

    return {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]


def _damaged_file(cls: Any, root: Path) -> str | None:
    """The first file of an installed CIFAR that is missing or fails its checksum, or None when all are whole."""
    files = [*cls.train_list, *cls.test_list, (cls.meta["filename"], cls.meta["md5"])]
    for name, md5 in files:
        if not _is_whole(root / cls.base_folder / name, md5):
            return f"{cls.base_folder}/{name}"
    return None


def _is_whole(file: Path, md5: str) -> bool:
    from torchvision.datasets.utils import check_integrity

    return bool(check_integrity(file, md5))


def _what_is_missing(cls: Any, root: Path, damaged: str) -> str:
    what = f"{damaged} fails its MD5 check" if (root / damaged).exists() else f"no {damaged} there"
    if (root / cls.filename).exists():
        what += f", and {cls.filename} fails its MD5 check"
    return f"{what}; use dataset.download=true, or put {cls.filename} from {cls.url} there"


def _install_cifar(cls: Any, root: Path) -> None:
    archive = root / cls.filename
    archive_is_whole = _is_whole(archive, cls.tgz_md5)
    doing = "unpacking" if archive_is_whole else f"downloading {cls.url}"
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpacking-") as aside:
        try:
            if archive_is_whole:
                (Path(aside) / cls.filename).symlink_to(archive.resolve())
            else:
                _download(cls.url, Path(aside) / cls.filename)
                if not _is_whole(Path(aside) / cls.filename, cls.tgz_md5):
                    raise OSError("what came fails its MD5 check")
            with _without_deprecations():
                cls(aside, download=True)  # finds the archive whole, so it only unpacks
        except (OSError, HTTPException, RuntimeError, EOFError, tarfile.TarError) as error:
            remedy = f"try again, or put {cls.filename} into {root} yourself"
            raise ConfigError("dataset.path", root, f"{doing} failed: {_reason(error)}; {remedy}") from None
        if (root / cls.base_folder).exists():
            os.rename(root / cls.base_folder, Path(aside) / "damaged")
        os.rename(Path(aside) / cls.base_folder, root / cls.base_folder)


def _install_imagenet(root: Path, split: str) -> None:
    from torchvision.datasets import imagenet

    reads_devkit = split == "val" and not (root / imagenet.META_FILE).exists()
    if reads_devkit and importlib.util.find_spec("scipy") is None:
        raise ConfigError("dataset.path", root, "unpacking val/ reads the devkit with SciPy: pip install scipy")
    aside = f".unpacking-{split}"
    shutil.rmtree(root / aside, ignore_errors=True)  # what an interrupted run has left
    try:
        with _without_deprecations():
            if split == "train":
                imagenet.parse_train_archive(root, folder=aside)
            else:
                if reads_devkit:
                    imagenet.parse_devkit_archive(root)
                imagenet.parse_val_archive(root, folder=aside)
    except (OSError, RuntimeError, EOFError, tarfile.TarError) as error:
        shutil.rmtree(root / aside, ignore_errors=True)
        raise ConfigError("dataset.path", root, f"unpacking {split}/ failed: {_reason(error)}") from None
    os.rename(root / aside, root / split)


def _missing_archives(root: Path, splits: list[str]) -> list[str]:
    from torchvision.datasets import imagenet

    needed = [imagenet.ARCHIVE_META[split][0] for split in splits]
    if "val" in splits and not (root / imagenet.META_FILE).exists():
        needed.append(imagenet.ARCHIVE_META["devkit"][0])  # says which picture is of which class
    return [name for name in needed if not (root / name).is_file()]


def _download(url: str, file: Path) -> None:
    """One request, a bar on a terminal. (torchvision's function asks twice, and waits for a silent server forever.)"""
    from tqdm import tqdm

    request = urllib.request.Request(url, headers={"User-Agent": "gpipe"})
    with urllib.request.urlopen(request, timeout=_STALLED_AFTER_S) as response, open(file, "wb") as target:
        size = int(response.headers.get("Content-Length") or 0) or None
        # disable=None: no bar unless it is a terminal
        with tqdm(total=size, unit="B", unit_scale=True, desc=file.name, leave=False, disable=None) as bar:
            while block := response.read(2**18):
                target.write(block)
                bar.update(len(block))


def _reason(error: BaseException) -> str:
    return "the archive fails its MD5 check" if "corrupted" in str(error) else str(error) or type(error).__name__


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Hold the folder's lock, creating the folder. Raises ConfigError when it cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / ".gpipe-lock", "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigError("dataset.path", root, f"cannot write there: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also when the process is killed
        yield


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Without what torchvision's ways provoke and a user cannot change.

    Python 3.12 and 3.13 deprecate tarfile without a filter; NumPy 2.4 deprecates the integers 0 and 1 as flags of a
    dtype, as they stand in the pickles of CIFAR.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
        yield
