"""Generated pictures for trying and measuring without data: each class is a fixed coarse pattern under noise.

Sample i of a split is a function of (seed, split, i), so any rank or worker makes the same one, and a network can learn
the classes: patterns are shared by both splits, the noise is not.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from gpipe_cli.data.info import DataInfo
from gpipe_cli.data.seeding import derive_seed

DEFAULT_IMAGE_SIZE = 32
DEFAULT_NUM_CLASSES = 10
DEFAULT_NUM_TRAIN = 1000
_PATTERN_CELLS = 4  # a class is a 4x4 grid of random colours
_NOISE_RANGE = 64  # uniform noise of -32..31 on colours of 32..223: nothing is clipped


class Synthetic(Dataset[tuple[torch.Tensor, int]]):
    """One split: items (uint8 tensor (3, image_size, image_size), label); labels run 0, 1, ..., 0, 1, ... by index."""

    def __init__(self, split: str, seed: int, *, num_samples: int, num_classes: int, image_size: int) -> None:
        self.split, self.seed = split, seed
        self.num_samples, self.image_size = num_samples, image_size
        generator = torch.Generator().manual_seed(derive_seed("synthetic patterns", seed))
        shape = (num_classes, 3, _PATTERN_CELLS, _PATTERN_CELLS)
        margin = _NOISE_RANGE // 2
        self.patterns = torch.randint(margin, 256 - margin, shape, dtype=torch.int16, generator=generator)
        self._cell = torch.arange(image_size) * _PATTERN_CELLS // image_size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        label = index % len(self.patterns)
        generator = torch.Generator().manual_seed(derive_seed("synthetic noise", self.seed, self.split, index))
        image = self.patterns[label][:, self._cell][:, :, self._cell]
        noise = torch.randint(
            -_NOISE_RANGE // 2, _NOISE_RANGE // 2, image.shape, dtype=torch.int16, generator=generator
        )
        return (image + noise).to(torch.uint8), label


def synthetic_info(num_train: int | None, num_classes: int | None) -> DataInfo:
    """One evaluation sample for five of training (at least one); classes are named class0, class1, ..."""
    num_train = DEFAULT_NUM_TRAIN if num_train is None else num_train
    names = tuple(f"class{label}" for label in range(DEFAULT_NUM_CLASSES if num_classes is None else num_classes))
    return DataInfo("synthetic", num_train, max(1, num_train // 5), names)
