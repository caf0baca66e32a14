"""Read images as uint8 pixels, optionally resized and cropped to squares."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from titan_dit.data.files import BadFileError, read_whole

THINNEST = 100
"""Ratio of sides up to which a picture is cropped: before the crop its shorter side is resized."""
ORIENTATION = 0x0112
"""Tag of EXIF: how a camera was held."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture upright, by its orientation; 1 is upright."""


def read_image(
    path: Path, size: int | None = None, shape: tuple[int, ...] | None = None
) -> UInt8[Tensor, "c h w"]:
    """Read an image file: one channel if grey, else RGB; transparency on white, upright.

    `size` crops to a square, see `center_crop`. If `shape` has three channels, grey becomes RGB.
    Raises BadFileError for any other difference from `shape`, and if it is too thin to be cropped.
    """
    return decode_image(read_whole(path), size, shape)


def decode_image(
    data: bytes | bytearray, size: int | None = None, shape: tuple[int, ...] | None = None
) -> UInt8[Tensor, "c h w"]:
    """Decode the bytes of an image file, see `read_image`."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            grey = image.mode in ("1", "L", "LA")
            if image.mode.startswith(("I", "F")):
                raise BadFileError(f"{image.mode} image with more than 8 bits; convert it to 8")
            mode = "L" if grey and (shape is None or shape[0] == 1) else "RGB"
            picture = upright(on_white(image).convert(mode), image)
    except BadFileError:
        raise
    except Image.DecompressionBombError:
        raise BadFileError("so large that it is not opened; make it smaller") from None
    except Exception as error:  # Pillow raises any exception on a damaged file.
        raise BadFileError("not a readable image: damaged, or cut off") from error
    if size is not None and max(picture.size) > THINNEST * min(picture.size):
        raise BadFileError(
            f"{picture.width} x {picture.height} pixels: too thin to be cropped to a square"
        )
    pixels = np.asarray(picture if size is None else center_crop(picture, size))
    tensor = torch.from_numpy(pixels.copy()).view(*pixels.shape[:2], -1).permute(2, 0, 1)
    if shape is not None and tuple(tensor.shape) != shape:
        raise BadFileError(f"shape {list(tensor.shape)}, not {list(shape)} like the other files")
    return tensor.contiguous()


def on_white(image: Image.Image) -> Image.Image:
    """Composite a transparent image onto white."""
    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def upright(picture: Image.Image, file: Image.Image) -> Image.Image:
    """Turn the picture of a file as the file's EXIF says, which every viewer of pictures does."""
    turn = None
    with suppress(Exception):  # Pillow raises any exception on damaged EXIF.
        turn = TURNS.get(file.getexif().get(ORIENTATION, 1))
    return picture if turn is None else picture.transpose(turn)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Resize and center-crop to `size` x `size`, like ADM (arXiv:2105.05233) and DiT.

    Halves the image with a box filter while its shorter side is >= 2 * size. The last resize is
    bicubic: one large bicubic step would alias.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    ratio = size / min(image.size)
    fitted = (round(image.width * ratio), round(image.height * ratio))
    image = image.resize(fitted, Image.Resampling.BICUBIC)
    left, above = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, above, left + size, above + size))
