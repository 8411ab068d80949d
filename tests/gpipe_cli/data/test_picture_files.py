"""Pictures in files: decoded once when they fit into memory, with the same pixels every time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe_cli.data.folder import ClassFolder
from gpipe_cli.data.images import as_tensor


def test_first_and_later_reading_of_a_picture_give_the_same_pixels(write_tree: Callable) -> None:
    root = write_tree({"a": 5})
    write_tree({"b": 2}, root=root, size=(6, 4))  # another size than the first picture's: decoded each time
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "a/0003.png")
    dataset = ClassFolder(root, ("a", "b"))
    first = [as_tensor(dataset[index][0]).clone() for index in range(7)]
    assert [tuple(image.shape) for image in first] == [(3, 8, 8)] * 5 + [(3, 4, 6)] * 2
    assert np.array_equal(first[3].permute(1, 2, 0).numpy(), pixels)
    for file in root.rglob("a/*.png"):
        file.unlink()
    assert all(torch.equal(as_tensor(dataset[index][0]), first[index]) for index in range(7))


def test_large_data_sets_are_not_kept_in_memory(write_tree: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe_cli.data.picture_files.CACHE_LIMIT_BYTES", 3 * 8 * 8 * 4)
    dataset = ClassFolder(write_tree({"a": 5}), ("a",))
    assert isinstance(dataset[0][0], Image.Image)
    assert isinstance(dataset[0][0], Image.Image)
