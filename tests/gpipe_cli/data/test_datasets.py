"""Choosing a data set: settings that it would ignore are refused, and light ones start at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from gpipe_cli.data.datasets import open_split, prepare
from gpipe_cli.errors import ConfigError


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_splits_have_the_prepared_sizes(settings: Callable, name: str) -> None:
    config = settings(name)
    info = prepare(config, 0)
    assert len(open_split(config, "train", 0)) == info.num_train
    assert len(open_split(config, "eval", 0)) == info.num_eval
    assert {label for _, label in open_split(config, "eval", 0)} == set(range(info.num_classes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("digits", {"path": "somewhere"}, "dataset.path=somewhere: dataset=digits does not use it"),
        ("synthetic", {"download": True}, "dataset.download=true: dataset=synthetic does not use it"),
        ("folder", {"num_classes": 3}, "dataset.num_classes=3: dataset=folder does not use it"),
        ("cifar10", {"corrupt": "skip", "path": "data"}, "dataset.corrupt=skip: dataset=cifar10 does not use it"),
        ("imagenet", {"eval_split": "val", "path": "data"}, "dataset.eval_split=val: dataset=imagenet does not use it"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    settings: Callable, name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(settings(name, **changes), 0)
    assert str(caught.value).startswith(message)


def test_synthetic_pictures_follow_the_seed_and_their_settings(settings: Callable) -> None:
    config = settings("synthetic", num_classes=3, size=30, image_size=12)
    assert (prepare(config, 0).num_train, prepare(config, 0).num_classes) == (30, 3)
    image, _ = open_split(config, "train", 0)[0]
    assert image.shape == (3, 12, 12)
    assert not image.equal(open_split(config, "train", 1)[0][0])


def test_digits_and_class_folders_load_without_the_slow_imports() -> None:
    """torchvision and timm take seconds to import: the first training step must not wait for them."""
    program = """
import sys
from gpipe_cli.config import DatasetConfig
from gpipe_cli.data.datasets import prepare
from gpipe_cli.data.loaders import eval_loader, train_loader
import gpipe_cli.data.folder
for augment in ("light", "standard"):
    config = DatasetConfig(name="digits", image_size=16, augment=augment, mean=(0.3,) * 3, std=(0.4,) * 3)
    info = prepare(config, 0)
    next(iter(train_loader(config, info, image_size=16, batch_size=8, workers=0, seed=0, epoch=0)))
    next(iter(eval_loader(config, info, image_size=16, batch_size=8, workers=0, seed=0)))
print(sorted({"torchvision", "timm", "sklearn", "pandas", "scipy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
