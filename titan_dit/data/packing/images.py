"""One picture into uint8 pixels, cropped to a square where a size is asked for."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from titan_dit.data.files import BadFileError, read_whole


def read_image(
    path: Path, size: int | None = None, shape: tuple[int, ...] | None = None
) -> UInt8[Tensor, "c h w"]:
    """Pixels of an image file, 0 to 255: one channel if it is grey, else RGB.

    What is transparent is laid on white. With `shape`, grey becomes RGB where that has three
    channels; any other difference is refused.
    """
    data = read_whole(path)
    try:
        with Image.open(io.BytesIO(data)) as image:
            grey = image.mode in ("1", "L", "LA")
            if image.mode.startswith(("I", "F")):
                raise BadFileError(f"{image.mode} picture, of more than 8 bit; convert it to 8 bit")
            mode = "L" if grey and (shape is None or shape[0] == 1) else "RGB"
            picture = on_white(image).convert(mode)
    except BadFileError:
        raise
    except Exception as error:  # Pillow raises whatever the damage leads to.
        raise BadFileError("not a readable picture: damaged, or cut off") from error
    pixels = np.asarray(picture if size is None else center_crop(picture, size))
    tensor = torch.from_numpy(pixels.copy()).view(*pixels.shape[:2], -1).permute(2, 0, 1)
    if shape is not None and tuple(tensor.shape) != shape:
        raise BadFileError(f"shape {list(tensor.shape)}, not {list(shape)} as the others")
    return tensor.contiguous()


def on_white(image: Image.Image) -> Image.Image:
    """The image without transparency."""
    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The middle square of an image at `size` pixels, as ADM and DiT prepare ImageNet.

    Halved with a box filter while it is at least twice too large, then resized with a bicubic one
    so that the shorter side fits (arXiv:2105.05233): a bicubic step that is long would alias.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    ratio = size / min(image.size)
    fitted = (round(image.width * ratio), round(image.height * ratio))
    image = image.resize(fitted, Image.Resampling.BICUBIC)
    left, above = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, above, left + size, above + size))
