"""The embedded default: real handwritten digits, nothing to download (source and licence: digits.md beside this file).

The held-out split is stratified: of each class, in file order, every fifth picture. It depends on no seed, so all runs
are judged by the same 20 % of the pictures, and every class is in both splits in proportion. (The file does not say who
wrote a digit, so the same hands occur in both splits.)
"""

from __future__ import annotations

import gzip
from importlib import resources

import numpy as np
import torch
from torch.utils.data import Dataset

from gpipe_cli.data.info import DataInfo

HELD_OUT_EVERY = 5
CLASSES = tuple(str(digit) for digit in range(10))
_LARGEST_VALUE = 16  # a pixel counts the ink of a 4x4 block


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """One split of the digits: items (uint8 tensor (3, 8, 8), label 0..9), ink white on black."""

    def __init__(self, split: str) -> None:
        pixels, labels = _read()
        chosen = held_out(labels) if split == "eval" else ~held_out(labels)
        grey = (pixels[chosen].astype(np.uint16) * 255 + _LARGEST_VALUE // 2) // _LARGEST_VALUE
        self.images = torch.from_numpy(grey.astype(np.uint8)).unsqueeze(1).expand(-1, 3, -1, -1)
        self.labels: list[int] = labels[chosen].tolist()
        self.classes = CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], self.labels[index]


def digits_info() -> DataInfo:
    _, labels = _read()
    num_eval = int(held_out(labels).sum())
    return DataInfo("digits", len(labels) - num_eval, num_eval, CLASSES)


def held_out(labels: np.ndarray) -> np.ndarray:
    """Which samples (bool, one a label) are held out: every HELD_OUT_EVERY-th of each class, in order."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]] = True
    return chosen


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 8, 8) of values 0..16 and labels (1797,), both uint8."""
    compressed = (resources.files("gpipe_cli.data") / "digits.csv.gz").read_bytes()
    lines = gzip.decompress(compressed).decode("ascii").split()
    table = np.array([line.split(",") for line in lines]).astype(np.uint8)
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1]
