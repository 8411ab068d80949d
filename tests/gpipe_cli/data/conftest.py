"""Data set settings and small class folders for the tests of gpipe_cli.data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from gpipe_cli.config import DatasetConfig
from gpipe_cli.data.info import DataInfo
from gpipe_cli.data.loaders import train_loader


@pytest.fixture
def settings() -> Callable[..., DatasetConfig]:
    """`settings("folder", path=…)`: no augmentation, and pixels of 0..255 unless a test asks for more."""

    def make(name: str, **changes: Any) -> DatasetConfig:
        values = {"image_size": 8, "augment": "none", "mean": (0.0,) * 3, "std": (1 / 255,) * 3, **changes}
        if "path" in values:
            values["path"] = str(values["path"])
        return DatasetConfig(name=name, **values)

    return make


@pytest.fixture
def write_tree(tmp_path: Path) -> Callable[..., Path]:
    """`write_tree({"train/a": 3, "val/a": 1})`: that many 8x8 PNG files, of a colour that differs from file to file."""

    def write(num_pictures: dict[str, int], root: Path | None = None, size: tuple[int, int] = (8, 8)) -> Path:
        root = root or tmp_path / "tree"
        shade = 0
        for folder, number in num_pictures.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for index in range(number):
                Image.new("RGB", size, (shade % 256, shade // 256, 7)).save(root / folder / f"{index:04}.png")
                shade += 1
        return root

    return write


class Counted(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of one pixel that hold their index; remembers what was asked for."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.asked = num_samples, []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.asked.append(index)
        return torch.full((3, 1, 1), index, dtype=torch.uint8), index


@pytest.fixture
def counted() -> type[Counted]:
    return Counted


@pytest.fixture
def train(settings: Callable) -> Callable[..., Any]:
    """`train(dataset, …)`: train_loader over a data set of our own; pictures of one pixel, batches of 4."""

    def make(dataset: Any, **changes: Any) -> Any:
        info = DataInfo("ours", len(dataset), len(dataset), ("a", "b"))
        arguments = {"image_size": 1, "batch_size": 4, "workers": 0, "seed": 0, "epoch": 0, **changes}
        return train_loader(settings("synthetic"), info, dataset=dataset, **arguments)

    return make
