"""The data sets by name: `prepare` once, by one rank; `open_split` where samples are needed.

Modules that cost seconds to import (torchvision) are imported only for the data sets that need them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch.utils.data import Dataset

from gpipe_cli.config import DatasetConfig
from gpipe_cli.data.info import DataInfo
from gpipe_cli.data.subset import is_restricted, restrict, restricted_info
from gpipe_cli.errors import ConfigError

Split = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")

# Settings of pictures, whatever they are.
_USED_BY_ALL = frozenset({"augment", "mean", "std"})
_PARTS = frozenset({"classes", "samples_per_class"})
_DOWNLOADED = _PARTS | {"path", "download"}
_FOLDERS = _PARTS | {"path", "corrupt", "train_split", "eval_split"}
# Optional settings that each data set reads; any other one that is set is refused rather than ignored.
_SETTINGS_USED = {
    "digits": _PARTS,
    "synthetic": frozenset({"num_classes", "size"}),
    "cifar10": _DOWNLOADED,
    "cifar100": _DOWNLOADED,
    "stanford_cars": _PARTS | {"path", "corrupt"},
    "oxford_pets": _DOWNLOADED | {"corrupt"},
    "food101": _DOWNLOADED | {"corrupt"},
    "fgvc_aircraft": _DOWNLOADED | {"corrupt"},
    "imagenet": _PARTS | {"path", "corrupt"},
    "birdsnap": _FOLDERS,
    "folder": _FOLDERS,
}
_CIFAR = ("cifar10", "cifar100")
_TRANSFER = ("stanford_cars", "oxford_pets", "food101", "fgvc_aircraft")


def prepare(config: DatasetConfig, seed: int) -> DataInfo:
    """Make the data ready and count them: one rank calls this, before training, and sends the result to the others.

    Downloads, verifies, unpacks, scans; the splits share no sample. `seed` is the run's; it chooses the samples of
    `samples_per_class`, no split depends on it. Raises ConfigError, one line, for whatever is missing, damaged or set
    in vain.
    """
    _refuse_unused_settings(config)
    info = _whole_info(config)
    if not is_restricted(config):
        return info
    train, evaluation = (restrict(config, _open_whole(config, split, seed), split, seed) for split in SPLITS)
    return restricted_info(config, train, evaluation)


def open_split(config: DatasetConfig, split: Split, seed: int) -> Dataset[Any]:
    """One split of prepared data: items (RGB picture or uint8 tensor (3, H, W), label), not transformed.

    `seed` makes the synthetic pictures and chooses the samples of `samples_per_class`. A picture that cannot be decoded
    raises DataError with its path when it is asked for; missing folders raise ConfigError now.
    """
    whole = _open_whole(config, split, seed)
    return restrict(config, whole, split, seed) if is_restricted(config) else whole


def _whole_info(config: DatasetConfig) -> DataInfo:
    if config.name == "digits":
        from gpipe_cli.data.digits import digits_info

        return digits_info()
    if config.name == "synthetic":
        from gpipe_cli.data.synthetic import synthetic_info

        return synthetic_info(config.size, config.num_classes)
    if config.name in _CIFAR:
        from gpipe_cli.data.cifar import cifar_info

        return cifar_info(config.name, config.path, config.download)
    if config.name in _TRANSFER:
        from gpipe_cli.data.transfer_sets import transfer_info

        return transfer_info(config.name, config.path, config.download)
    if config.name == "imagenet":
        from gpipe_cli.data.imagenet import prepare_imagenet

        prepare_imagenet(config.path)
    from gpipe_cli.data.folder import folder_info

    return folder_info(config.name, _class_folder(config, "train"), _class_folder(config, "eval"))


def _open_whole(config: DatasetConfig, split: Split, seed: int) -> Any:
    """A split with all its classes and samples; Labelled, but for the synthetic one."""
    if config.name == "digits":
        from gpipe_cli.data.digits import Digits

        return Digits(split)
    if config.name == "synthetic":
        from gpipe_cli.data.synthetic import DEFAULT_IMAGE_SIZE, Synthetic, synthetic_info

        info = synthetic_info(config.size, config.num_classes)
        num_samples = info.num_train if split == "train" else info.num_eval
        image_size = config.image_size or DEFAULT_IMAGE_SIZE
        return Synthetic(split, seed, num_samples=num_samples, num_classes=info.num_classes, image_size=image_size)
    if config.name in _CIFAR:
        from gpipe_cli.data.cifar import open_cifar

        return open_cifar(config.name, config.path, split)
    if config.name in _TRANSFER:
        from gpipe_cli.data.transfer_sets import open_transfer

        return open_transfer(config.name, config.path, split)
    from gpipe_cli.data.folder import ClassFolder, class_names

    return ClassFolder(_class_folder(config, split), class_names(_class_folder(config, "train")))


def _class_folder(config: DatasetConfig, split: Split) -> Any:
    from gpipe_cli.data.folder import split_folder

    if config.path is None:
        problem = "needs the folder that holds the pictures; dataset.path=FOLDER with train/ and val/ in it"
        raise ConfigError("dataset.path", None, f"dataset={config.name} {problem}")
    return split_folder(config.path, split, train_split=config.train_split, eval_split=config.eval_split)


def _refuse_unused_settings(config: DatasetConfig) -> None:
    for setting in dataclasses.fields(config):
        used = _USED_BY_ALL | _SETTINGS_USED[config.name]
        unused = setting.default is not dataclasses.MISSING and setting.name not in used
        if unused and getattr(config, setting.name) != setting.default:
            value = getattr(config, setting.name)
            raise ConfigError(f"dataset.{setting.name}", value, f"dataset={config.name} does not use it; leave it out")
