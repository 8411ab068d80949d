"""Pictures to network input: augmentation for training, the fixed crop for evaluation, normalisation for both.

`none`      resize only.
`light`     a small random shift, rotation and change of size; no mirror image (digits, letters, signs).
`standard`  below 64 pixels: crop out of a border of an eighth of the size, and flip (what most CIFAR results use);
            from 64 pixels on: random resized crop, and flip (what most ImageNet results use).
`inception` random resized crop, flip, and the colour distortion of the AmoebaNet authors' TPU code
            (tensorflow/tpu, models/official/amoeba_net/inception_preprocessing.py, its defaults).
`cutout`    the whole picture resized, its proportions with it, flip, and a square of one colour (DeVries and Taylor,
            arXiv 1708.04552): what the paper's section 4 says of its fine-tuning.

All draws come from torch's default generator, which the loader seeds for each sample. Resizing is Pillow's bilinear
filter throughout, so pictures and tensors of the same pixels give the same result. Only random resized crops need
torchvision, which takes seconds to import.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from PIL import Image
from torch.nn import functional

from gpipe_cli.config import DatasetConfig
from gpipe_cli.data.images import as_picture, as_tensor

Picture = Image.Image | torch.Tensor  # RGB picture, or uint8 tensor (3, H, W)

SMALL_IMAGE_SIZE = 64  # below it pictures are thumbnails already: they are shifted, not cropped
_EVAL_CROP = 0.875  # of the shorter side is seen in evaluation, after training on crops (inception_preprocessing.py)
_CROP_AREA = (0.05, 1.0)  # share of the picture in a random resized crop (inception_preprocessing.py)
_BRIGHTNESS = 32 / 255  # largest shift of pixels in 0..1 (inception_preprocessing.py)
_CHROMA = 0.1  # largest shift of Cb and Cr (inception_preprocessing.py)
# How one unit of Cb and of Cr moves red, green and blue (ITU-R BT.601, as JPEG).
_CB_TO_RGB = (0.0, -0.344136, 1.772)
_CR_TO_RGB = (1.402, -0.714136, 0.0)
# Side of the square as a share of the picture's: 8 of 32 pixels, the authors' for CIFAR-100; the paper does not say.
_CUTOUT_SIDE = 1 / 4
_LIGHT_ROTATION = math.radians(10)
_LIGHT_ZOOM = 0.1
_LIGHT_SHIFT = 1 / 16  # of the size


class Transform:
    """Picture to network input, in two steps: `augment` a sample, then `normalize`, which also takes a whole batch."""

    def __init__(self, image_size: int, mean: tuple[float, float, float], std: tuple[float, float, float]) -> None:
        self.image_size = image_size
        self._mean = torch.tensor(mean).mul_(255).view(3, 1, 1)
        self._scale = torch.tensor(std).mul_(255).reciprocal_().view(3, 1, 1)

    def augment(self, picture: Picture) -> torch.Tensor:
        """Tensor (3, image_size, image_size) of 0..255, uint8 or float32."""
        raise NotImplementedError

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """(x - mean) / std per channel in float32, of images (..., 3, H, W) of 0..255."""
        return (images - self._mean).mul_(self._scale)

    def __call__(self, picture: Picture) -> torch.Tensor:
        return self.normalize(self.augment(picture))


def build_transform(config: DatasetConfig, image_size: int, train: bool) -> Transform:
    """Function from a picture to a float32 tensor (3, image_size, image_size), (x - mean) / std of pixels in 0..1."""
    if config.augment == "cutout":
        return (Cutout if train else Whole)(image_size, config.mean, config.std)
    crops = config.augment == "inception" or (config.augment == "standard" and image_size >= SMALL_IMAGE_SIZE)
    if not train or config.augment == "none":
        crop = _EVAL_CROP if crops and image_size >= SMALL_IMAGE_SIZE else 1.0
        return Fit(image_size, config.mean, config.std, crop=crop)
    if crops:
        return ResizedCrop(image_size, config.mean, config.std, distort=config.augment == "inception")
    return (Shift if config.augment == "standard" else Wiggle)(image_size, config.mean, config.std)


class Fit(Transform):
    """Centre square of the shorter side's share `crop`."""

    def __init__(self, image_size: int, mean: Any, std: Any, *, crop: float) -> None:
        super().__init__(image_size, mean, std)
        self.crop = crop

    def augment(self, picture: Picture) -> torch.Tensor:
        return as_tensor(fit(picture, self.image_size, self.crop))


class Whole(Transform):
    """The whole picture in the square, its proportions given up."""

    def augment(self, picture: Picture) -> torch.Tensor:
        size = self.image_size
        width, height = _size(picture)
        if (width, height) == (size, size):
            return as_tensor(picture)
        return as_tensor(as_picture(picture).resize((size, size), Image.Resampling.BILINEAR))


class Cutout(Whole):
    """The whole picture, randomly flipped, without a square around a random pixel; its colour becomes 0."""

    def augment(self, picture: Picture) -> torch.Tensor:
        size = self.image_size
        side = max(1, round(size * _CUTOUT_SIDE))
        flip, down, right = torch.rand(3).tolist()
        whole = super().augment(picture)
        image = whole.flip(2) if flip < 0.5 else whole.clone()  # the pixels may be a cached picture's
        # Around any pixel, so at the border a part of the square falls outside, as in the article.
        top, left = int(down * size) - side // 2, int(right * size) - side // 2
        blank = self._mean.round().to(image.dtype)
        image[:, max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] = blank
        return image


class Shift(Transform):
    """Random crop out of a black border of image_size / 8, and a random horizontal flip."""

    def augment(self, picture: Picture) -> torch.Tensor:
        size, border = self.image_size, max(1, self.image_size // 8)
        down, right, flip = torch.rand(3).tolist()
        top, left = int(down * (2 * border + 1)), int(right * (2 * border + 1))
        image = functional.pad(as_tensor(fit(picture, size, 1.0)), (border, border, border, border))
        shifted = image[:, top : top + size, left : left + size]
        return shifted.flip(2) if flip < 0.5 else shifted


class Wiggle(Transform):
    """Random rotation (up to 10 degrees), change of size (10 %) and shift (1/16 of the size), on black."""

    def augment(self, picture: Picture) -> torch.Tensor:
        image = as_tensor(fit(picture, self.image_size, 1.0)).to(torch.float32).unsqueeze(0)
        turn, zoom, right, down = torch.rand(4).mul_(2).sub_(1).tolist()
        cosine, sine = math.cos(turn * _LIGHT_ROTATION), math.sin(turn * _LIGHT_ROTATION)
        factor = 1 + zoom * _LIGHT_ZOOM
        # Rows map output to input coordinates, which run from -1 to 1: a shift by the whole size is 2.
        rows = [
            [factor * cosine, -factor * sine, right * 2 * _LIGHT_SHIFT],
            [factor * sine, factor * cosine, down * 2 * _LIGHT_SHIFT],
        ]
        grid = functional.affine_grid(torch.tensor([rows]), list(image.shape), align_corners=False)
        return functional.grid_sample(image, grid, align_corners=False).squeeze(0)


class ResizedCrop(Transform):
    """torchvision's random resized crop and flip, with the authors' colour distortion if `distort`."""

    def __init__(self, image_size: int, mean: Any, std: Any, *, distort: bool) -> None:
        from torchvision import transforms

        super().__init__(image_size, mean, std)
        self.crop: Any = transforms.RandomResizedCrop(image_size, scale=_CROP_AREA)
        self.flip: Any = transforms.RandomHorizontalFlip()
        self.distort = distort

    def augment(self, picture: Picture) -> torch.Tensor:
        image = as_tensor(self.flip(self.crop(as_picture(picture))))
        return distort_colour(image) if self.distort else image


def distort_colour(image: torch.Tensor) -> torch.Tensor:
    """Move brightness, Cb and Cr of a whole picture (3, H, W) of 0..255 by uniform draws; float32, kept in 0..255."""
    brightness, cb, cr = torch.rand(3).mul_(2).sub_(1).tolist()
    offsets = torch.tensor(_CB_TO_RGB) * (cb * _CHROMA) + torch.tensor(_CR_TO_RGB) * (cr * _CHROMA)
    return torch.clamp(image + 255 * (offsets + brightness * _BRIGHTNESS).view(3, 1, 1), 0, 255)


def fit(picture: Picture, size: int, crop: float) -> Picture:
    """The centre square whose side is `crop` of the shorter side, resized to size x size; unchanged if it is that."""
    width, height = _size(picture)
    if (width, height, crop) == (size, size, 1.0):
        return picture
    side = min(width, height) * crop
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return as_picture(picture).resize((size, size), Image.Resampling.BILINEAR, box=box)


def _size(picture: Picture) -> tuple[int, int]:
    """Width and height in pixels."""
    return picture.size if isinstance(picture, Image.Image) else (picture.shape[2], picture.shape[1])
