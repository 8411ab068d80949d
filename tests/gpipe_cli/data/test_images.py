"""Pictures of every mode become RGB of the same appearance; what cannot be decoded is one line with the path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe_cli.data.images import as_picture, as_tensor, read_picture
from gpipe_cli.errors import DataError

RED_SHADES = [(8 * step, 40, 200) for step in range(32)]


def pixel(path: Path) -> tuple[int, int, int]:
    picture = read_picture(str(path))
    assert (picture.mode, picture.size) == ("RGB", (8, 8))
    return picture.getpixel((3, 3))


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def palette_picture(index: int) -> Image.Image:
    image = Image.new("P", (8, 8), index)
    image.putpalette([value for color in RED_SHADES for value in color])
    return image


def test_grey_is_repeated_in_three_channels(tmp_path: Path) -> None:
    assert pixel(saved(Image.new("L", (8, 8), 100), tmp_path / "a.png")) == (100, 100, 100)


def test_black_and_white_bits_become_0_and_255(tmp_path: Path) -> None:
    assert pixel(saved(Image.new("1", (8, 8), 1), tmp_path / "white.png")) == (255, 255, 255)
    assert pixel(saved(Image.new("1", (8, 8), 0), tmp_path / "black.png")) == (0, 0, 0)


@pytest.mark.parametrize("suffix", ["png", "gif", "bmp"])
def test_palette_index_is_looked_up_not_used_as_brightness(tmp_path: Path, suffix: str) -> None:
    assert pixel(saved(palette_picture(5), tmp_path / f"a.{suffix}")) == RED_SHADES[5]


def test_opaque_alpha_changes_nothing(tmp_path: Path) -> None:
    assert pixel(saved(Image.new("RGBA", (8, 8), (10, 20, 30, 255)), tmp_path / "rgba.png")) == (10, 20, 30)
    assert pixel(saved(Image.new("LA", (8, 8), (100, 255)), tmp_path / "la.png")) == (100, 100, 100)


def test_transparent_pixels_are_laid_over_white(tmp_path: Path) -> None:
    assert pixel(saved(Image.new("RGBA", (8, 8), (10, 20, 30, 0)), tmp_path / "rgba.png")) == (255, 255, 255)
    half = pixel(saved(Image.new("LA", (8, 8), (100, 51)), tmp_path / "la.png"))
    assert half == pytest.approx((224, 224, 224), abs=1)  # 0.2 * 100 + 0.8 * 255


@pytest.mark.parametrize("transparency", [5, bytes([255] * 5 + [0])])
def test_transparent_palette_entry_is_white_without_a_warning(tmp_path: Path, transparency: int | bytes) -> None:
    assert pixel(saved(palette_picture(5), tmp_path / "a.png", transparency=transparency)) == (255, 255, 255)


def test_cmyk_jpeg_keeps_its_colour(tmp_path: Path) -> None:
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert pixel(saved(red, tmp_path / "a.jpg", quality=100)) == pytest.approx((255, 0, 0), abs=3)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
@pytest.mark.parametrize(("value", "expected"), [(0, 0), (257, 1), (128 * 257, 128), (40000, 156), (65535, 255)])
def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path, suffix: str, value: int, expected: int) -> None:
    image = Image.fromarray(np.full((8, 8), value, dtype=np.uint16))
    assert pixel(saved(image, tmp_path / f"a.{suffix}")) == (expected,) * 3


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_32_bit_pixels_are_refused_because_their_range_is_unknown(tmp_path: Path, dtype: type) -> None:
    path = saved(Image.fromarray(np.full((8, 8), 7, dtype=dtype)), tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif: .*8 or 16 bit"):
        read_picture(str(path))


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "bmp", "tif", "ppm"])
def test_half_a_file_is_refused_with_its_path(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = saved(Image.fromarray(noise), tmp_path / f"half.{suffix}")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=f"half.{suffix}: ") as caught:
        read_picture(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert "dataset.corrupt=skip" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"<!DOCTYPE html>\n<html><body>404</body></html>", "a web page, not a picture"),
        (b"no picture at all", "not a picture"),
        (b"\xff\xd8\xff\xe0", "picture"),
    ],
)
def test_files_that_are_no_picture_say_what_they_are(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        read_picture(str(path))
    assert caught.value.path == str(path)
    assert "\n" not in str(caught.value)


def test_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.png: no such file"):
        read_picture(str(tmp_path / "gone.png"))


def test_picture_and_tensor_convert_into_each_other() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    tensor = as_tensor(Image.fromarray(pixels))
    assert (tensor.shape, tensor.dtype) == ((3, 5, 7), torch.uint8)
    assert np.array_equal(np.asarray(as_picture(tensor)), pixels)
