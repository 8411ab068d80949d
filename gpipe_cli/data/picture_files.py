"""Pictures in files, each with a label: what class folders and the annotated data sets have in common."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from gpipe_cli.data.images import read_picture

# Decoded pictures are kept when a whole split fits: 50,000 of 32x32 take 154 MB and then load three times as fast.
CACHE_LIMIT_BYTES = 256 * 2**20


class PictureFiles(Dataset[tuple[Image.Image | torch.Tensor, int]]):
    """Items (picture, label); the picture is RGB, or a uint8 tensor (3, H, W) from the cache.

    `classes`: the names of labels 0, 1, ... An item raises DataError with the path when its file cannot be decoded.
    """

    def __init__(self, paths: list[str], labels: list[int], classes: Sequence[str]) -> None:
        self.paths, self.labels, self.classes = paths, labels, tuple(classes)
        self._cache = _PixelCache.for_pictures(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image | torch.Tensor, int]:
        label = self.labels[index]
        if self._cache is None:
            return read_picture(self.paths[index]), label
        pixels = self._cache.get(index)
        if pixels is None:
            picture = read_picture(self.paths[index])
            if not self._cache.put(index, picture):
                return picture, label
            pixels = self._cache.get(index)
            assert pixels is not None
        return pixels, label


class _PixelCache:
    """Decoded pictures of one size, in memory that forked worker processes share.

    An anonymous mapping is not limited by the size of /dev/shm. No lock is needed: within an epoch an index is handled
    by one process only, and the workers of the next epoch are forked later.
    """

    def __init__(self, num_pictures: int, height: int, width: int) -> None:
        self.height, self.width = height, width
        size = height * width * 3
        memory = np.frombuffer(mmap.mmap(-1, num_pictures * (size + 1)), dtype=np.uint8)
        self._filled = memory[:num_pictures]
        self._pixels = memory[num_pictures:].reshape(num_pictures, height, width, 3)
        self._tensors = torch.from_numpy(self._pixels).permute(0, 3, 1, 2)

    @classmethod
    def for_pictures(cls, paths: list[str]) -> _PixelCache | None:
        """A cache for pictures of the first one's size, or None when that is unknown or too much memory."""
        try:
            with Image.open(paths[0]) as first:  # reads the header only
                width, height = first.size
        except Exception:  # a bad file is reported when it is loaded, with its path
            return None
        return cls(len(paths), height, width) if len(paths) * height * width * 3 <= CACHE_LIMIT_BYTES else None

    def get(self, index: int) -> torch.Tensor | None:
        return self._tensors[index] if self._filled[index] else None

    def put(self, index: int, picture: Image.Image) -> bool:
        if picture.size != (self.width, self.height):
            return False
        self._pixels[index] = np.asarray(picture)
        self._filled[index] = 1
        return True
