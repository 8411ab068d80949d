"""Pictures of any kind to 8-bit RGB, or one line with the path.

Every mode that Pillow reads ends as RGB of the same appearance: grey is repeated, palettes are looked up, CMYK is
converted, 16-bit grey is scaled to 8 bits (not clipped), and whatever has transparency is laid over white, as a viewer
shows it. A file that ends early raises DataError, it is not completed with grey pixels. (Beyond reach: a JPEG that
lacks data in the middle yet closes with its end marker; libjpeg fills the gap with grey and Pillow does not say so.)
"""

from __future__ import annotations

import os

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from gpipe_cli.errors import DataError

# Pillow's modes with 16 bits a pixel. 16-bit colour needs no care: Pillow keeps the upper byte of each channel itself.
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
# Formats whose 32-bit mode "I" holds a 16-bit picture over the full range 0..65535 (older Pillow for PNG).
_SIXTEEN_BIT_FORMATS = ("PNG", "PPM")
_REMEDY = "replace or remove the file, or set dataset.corrupt=skip"


def read_picture(path: str) -> Image.Image:
    """Decode the first frame of a picture file to mode RGB.

    Raises DataError with the path when the file is missing, empty, cut short, not a picture, or of a kind that has no
    agreed conversion to 8 bits (32-bit and floating-point pixels).
    """
    try:
        with Image.open(path) as image:
            image.load()
            return to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ... for damaged bytes
        raise DataError(path, f"{_why_unreadable(path, error)}; {_REMEDY}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in mode RGB, 8 bits a channel. Raises ValueError for pixels without an agreed conversion."""
    if image.mode in _SIXTEEN_BIT_MODES or (image.mode == "I" and image.format in _SIXTEEN_BIT_FORMATS):
        values = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels have no agreed brightness range, save it with 8 or 16 bits")
    if image.has_transparency_data:
        coloured = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def as_tensor(picture: Image.Image | torch.Tensor) -> torch.Tensor:
    """RGB picture, or uint8 tensor (3, H, W), as a uint8 tensor (3, H, W)."""
    if isinstance(picture, torch.Tensor):
        return picture
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def as_picture(picture: Image.Image | torch.Tensor) -> Image.Image:
    """RGB picture, or uint8 tensor (3, H, W), as a Pillow picture in mode RGB."""
    if isinstance(picture, torch.Tensor):
        return Image.fromarray(np.ascontiguousarray(picture.permute(1, 2, 0).numpy()))
    return picture


def _why_unreadable(path: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:  # missing, no permission, ...
        return error.strerror.lower()
    if os.path.getsize(path) == 0:
        return "empty file (0 bytes)"
    if isinstance(error, UnidentifiedImageError):
        with open(path, "rb") as file:
            start = file.read(256).lstrip().lower()
        return "a web page, not a picture" if start.startswith((b"<!doctype html", b"<html")) else "not a picture"
    return f"damaged or unsupported picture ({error})"
