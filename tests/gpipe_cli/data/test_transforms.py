"""Network input: size and normalisation, what each augmentation may change, and where its draws come from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe_cli.data.transforms import build_transform, distort_colour, fit

AUGMENTATIONS = ["none", "light", "standard", "inception", "cutout"]


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("augment", AUGMENTATIONS)
@pytest.mark.parametrize(("size", "source"), [(32, (32, 32)), (32, (50, 41)), (16, (8, 8)), (64, (90, 120))])
def test_any_picture_becomes_a_float_square(
    settings: Callable, augment: str, train: bool, size: int, source: tuple[int, int]
) -> None:
    image = build_transform(settings("folder", augment=augment), size, train)(noise(*source))
    assert (image.shape, image.dtype) == ((3, size, size), torch.float32)
    assert image.isfinite().all()


@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_draws_come_from_torchs_generator_alone(settings: Callable, augment: str) -> None:
    transform = build_transform(settings("folder", augment=augment), 32, train=True)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(transform(noise(32, 32)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2]) == (augment == "none")


@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_tensor_and_picture_of_the_same_pixels_give_the_same_input(settings: Callable, augment: str) -> None:
    picture = noise(40, 40)
    tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    transform = build_transform(settings("folder", augment=augment), 32, train=True)
    torch.manual_seed(0)
    expected = transform(picture)
    torch.manual_seed(0)
    assert torch.equal(transform(tensor), expected)


def test_normalisation_is_by_mean_and_deviation_of_pixels_in_0_to_1(settings: Callable) -> None:
    config = settings("folder", mean=(0.5, 0.2, 0.0), std=(0.25, 0.5, 1.0))
    image = build_transform(config, 4, train=False)(Image.new("RGB", (4, 4), (255, 51, 102)))
    assert image[:, 0, 0].tolist() == pytest.approx([2.0, 0.0, 0.4], abs=1e-6)


def test_evaluation_of_a_picture_of_the_right_size_changes_no_pixel(settings: Callable) -> None:
    picture = noise(32, 32)
    image = build_transform(settings("folder", augment="standard"), 32, train=False)(picture)
    assert torch.allclose(image, torch.from_numpy(np.array(picture)).permute(2, 0, 1).float(), atol=1e-3)


def test_evaluation_sees_the_centre_with_the_proportions_kept() -> None:
    picture = Image.new("RGB", (40, 20), "red")
    picture.paste((0, 0, 255), (10, 0, 30, 20))
    assert fit(picture, 8, 1.0).crop((1, 0, 7, 8)).getcolors() == [(48, (0, 0, 255))]  # the edges blend with the red
    assert fit(picture, 8, 0.5).getcolors() == [(64, (0, 0, 255))]


def test_standard_augmentation_of_thumbnails_only_shifts_and_flips(settings: Callable) -> None:
    picture = Image.new("RGB", (16, 16))
    picture.putpixel((5, 8), (200, 0, 0))
    transform = build_transform(settings("folder", augment="standard"), 16, train=True)
    seen = set()
    for seed in range(300):
        torch.manual_seed(seed)
        image = transform(picture)[0]
        assert image.max().item() == pytest.approx(200, abs=1e-3)
        row, column = divmod(int(image.argmax()), 16)
        seen.add((row, column))
    # Shifted by up to 2 pixels (an eighth) each way, from column 5 or, mirrored, from column 10.
    assert seen == {(8 + down, column + right) for down in range(-2, 3) for column in (5, 10) for right in range(-2, 3)}


def test_light_augmentation_never_mirrors(settings: Callable) -> None:
    picture = Image.new("RGB", (16, 16))
    picture.paste((255, 255, 255), (0, 0, 6, 16))
    transform = build_transform(settings("folder", augment="light"), 16, train=True)
    for seed in range(100):
        torch.manual_seed(seed)
        image = transform(picture)[0]
        assert image[:, :8].sum() > 2 * image[:, 8:].sum()
        assert image.max() <= 255.001


def test_cutout_flips_the_whole_picture_and_blanks_one_square_in_the_mean_colour(settings: Callable) -> None:
    picture = Image.new("RGB", (64, 32), (250, 250, 250))
    picture.paste((250, 0, 0), (0, 0, 32, 32))  # the left half, wherever the square is
    config = settings("folder", augment="cutout", mean=(0.4, 0.4, 0.4), std=(0.2, 0.2, 0.2))
    transform = build_transform(config, 32, train=True)
    largest, left_is_red = 0, set()
    for seed in range(100):
        torch.manual_seed(seed)
        image = transform(picture)
        blank = (image.abs() < 1e-5).all(dim=0)
        rows, columns = blank.any(dim=1), blank.any(dim=0)
        assert blank.sum() == rows.sum() * columns.sum() > 0  # a rectangle, cut off by the border perhaps
        assert max(rows.sum(), columns.sum()) <= 8  # a quarter of the side
        largest = max(largest, int(blank.sum()))
        green = image[1][~rows]  # rows that the square spares
        assert {green[:, :15].unique().numel(), green[:, 17:].unique().numel()} == {1}  # nothing else is touched
        left_is_red.add(bool(green[0, 0] < 0))
    assert largest == 64
    assert left_is_red == {True, False}


def test_evaluation_after_cutout_sees_the_whole_picture(settings: Callable) -> None:
    picture = Image.new("RGB", (64, 32), (0, 0, 0))
    picture.paste((255, 255, 255), (0, 0, 4, 32))  # a strip that the centre square does not hold
    image = build_transform(settings("folder", augment="cutout"), 32, train=False)(picture)
    assert image[0, :, 0].min() > 250


def test_cutout_leaves_cached_pixels_as_they_are(settings: Callable) -> None:
    pixels = torch.full((3, 32, 32), 200, dtype=torch.uint8)
    transform = build_transform(settings("folder", augment="cutout"), 32, train=True)
    for seed in range(4):
        torch.manual_seed(seed)
        transform(pixels)
    assert bool((pixels == 200).all())


def test_colour_distortion_moves_a_grey_picture_as_a_whole_within_its_bounds() -> None:
    for seed in range(50):
        torch.manual_seed(seed)
        image = distort_colour(torch.full((3, 4, 4), 128, dtype=torch.uint8))
        assert all(len(channel.unique()) == 1 for channel in image)
        # Largest shifts: brightness 32, red 0.1 * 1.402 * 255, blue 0.1 * 1.772 * 255.
        assert (image[0, 0, 0] - 128).abs() <= 32 + 35.8
        assert (image[2, 0, 0] - 128).abs() <= 32 + 45.2
    assert distort_colour(torch.zeros(3, 2, 2)).min() >= 0
    assert distort_colour(torch.full((3, 2, 2), 255.0)).max() <= 255
