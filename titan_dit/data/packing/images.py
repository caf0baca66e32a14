"""Read images as uint8 pixels, optionally resized and cropped to squares."""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from titan_dit.data.files import BadFileError, read_whole
from titan_dit.data.packing import colours

MAX_PIXELS = 178_956_970
"""Pixels of a picture that is read, and of all pictures that are decoded at once. Pillow's own."""
UNIT = 1 << 20
"""Pixels of a step of a PixelBudget."""
LARGE = 1 << 24
"""Pixels of a picture whose memory is given back at once."""
REDUCED = 1 << 26
"""Pixels above which a JPEG is reduced while it is decoded, which changes last bits."""
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
JPEGS = ("JPEG", "MPO")
GREYS = ("1", "L", "LA")
FULL_SIZE = "full_size"
BAND = 256
"""Rows of a transparent picture that are composited at once."""
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


class PixelBudget:
    """Pixels that are decoded at once, by threads or by processes: a large picture waits.

    `context` makes the locks: threading or multiprocessing. A picture of more than `max_pixels` is
    refused; `flag` sets them.
    """

    def __init__(
        self, max_pixels: int = MAX_PIXELS, context: Any = threading, flag: str = ""
    ) -> None:
        self.max_pixels, self.flag = max_pixels, flag
        self.num_units = -(-max_pixels // UNIT)
        self.turn, self.free = context.Lock(), context.Semaphore(self.num_units)

    def check(self, image: Image.Image) -> None:
        """Raise BadFileError for a picture that is too large."""
        if image.width * image.height > self.max_pixels:
            limit = f"{self.flag} {self.max_pixels}" if self.flag else f"{self.max_pixels:,}"
            raise BadFileError(f"{image.width} x {image.height} pixels, more than {limit}")

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Wait until so many pixels may be decoded."""
        units = min(self.num_units, -(-pixels // UNIT))
        with self.turn:  # One at a time, or two that wait for the rest would block each other.
            for _ in range(units):
                self.free.acquire()
        try:
            yield
        finally:
            for _ in range(units):
                self.free.release()


class Decoded(NamedTuple):
    """A picture of a file."""

    pixels: UInt8[Tensor, "c h w"]
    is_converted: bool
    """True if its colours were of another space than sRGB."""


def read_image(
    path: Path, size: int | None = None, shape: tuple[int, ...] | None = None
) -> UInt8[Tensor, "c h w"]:
    """Read an image file: one channel if grey, else RGB; transparency on white, upright, sRGB.

    `size` crops to a square, see `center_crop`. If `shape` has three channels, grey becomes RGB.
    Raises BadFileError for any other difference from `shape`, and if it is too thin to be cropped.
    """
    return decode_image(read_whole(path), size, shape).pixels


def decode_image(
    data: bytes | bytearray,
    size: int | None = None,
    shape: tuple[int, ...] | None = None,
    budget: PixelBudget | None = None,
) -> Decoded:
    """Decode the bytes of an image file, see `read_image`."""
    budget = budget or PixelBudget()
    # Pillow's own limit warns on the screen, below ours.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(io.BytesIO(data), formats=known_formats()) as image:
            budget.check(image)
            if size is None and shape is not None and sorted(image.size) != sorted(shape[1:]):
                found = [shape[0], image.height, image.width]
                raise BadFileError(f"shape {found}, not {list(shape)} like the other files")
            if image.mode.startswith(("I", "F")):
                raise BadFileError(f"{image.mode} image with more than 8 bits; convert it to 8")
            if size is not None and max(image.size) > THINNEST * min(image.size):
                raise BadFileError(
                    f"{image.width} x {image.height} pixels: too thin to be cropped to a square"
                )
            reduce_jpeg(image, size)
            cost = cost_of(image)
            with budget.taken(cost):
                pixels, is_converted = flat(image, size, shape)
                image.close()
                if cost > LARGE:
                    give_back_memory()
    except BadFileError:
        raise
    except Exception as error:  # Pillow raises any exception on a damaged file.
        raise BadFileError("not a readable image: damaged, or cut off") from error
    tensor = torch.from_numpy(pixels).view(*pixels.shape[:2], -1).permute(2, 0, 1)
    if shape is not None and tuple(tensor.shape) != shape:
        raise BadFileError(f"shape {list(tensor.shape)}, not {list(shape)} like the other files")
    return Decoded(tensor.contiguous(), is_converted)


def flat(
    image: Image.Image, size: int | None, shape: tuple[int, ...] | None
) -> tuple[UInt8[np.ndarray, "..."], bool]:
    """Upright pixels, cropped, in sRGB; True if they were in another space."""
    profile = image.info.get("icc_profile") or b""
    to_srgb = colours.transform_of(profile, colours.space_of(image.mode)) if profile else None
    # Grey becomes RGB after the crop, in a third of the memory.
    mode = "L" if image.mode in GREYS else "RGB"
    if to_srgb is not None and image.mode == "CMYK":
        picture = upright(colours.apply(to_srgb, image), image)
    else:
        picture = upright(on_white(image, mode), image)
    if size is not None:
        picture = center_crop(picture, size)
    if to_srgb is not None and image.mode != "CMYK":
        picture = colours.apply(to_srgb, picture).convert(mode)
    is_grey = mode == "L" and (shape is None or shape[0] == 1)
    return np.array(picture if is_grey else picture.convert("RGB")), to_srgb is not None


def give_back_memory() -> None:
    """Have glibc return what a thread has freed; it would keep gigabytes for each thread."""
    with suppress(AttributeError, OSError):  # Another C library.
        ctypes.CDLL(None).malloc_trim(0)


@cache
def known_formats() -> tuple[str, ...]:
    """Formats that are opened. Others of Pillow start programs: a .png may be PostScript."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def reduce_jpeg(image: Image.Image, size: int | None) -> None:
    """Have a large JPEG decoded at an eighth to a half, if a crop of `size` needs no more."""
    if size is None or image.format not in JPEGS or image.width * image.height <= REDUCED:
        return
    factor = next((f for f in (8, 4, 2) if min(image.size) // f >= 4 * size), 1)
    if factor > 1:
        image.info[FULL_SIZE] = image.size
        image.draft(image.mode, (image.width // factor, image.height // factor))


def cost_of(image: Image.Image) -> int:
    """Pixels that are held while a picture is decoded."""
    if image.info.get("progressive"):
        # The coefficients of the whole picture, whatever size is decoded.
        width, height = image.info.get(FULL_SIZE, image.size)
        return int(width * height)
    # The library of WebP decodes into two pictures of its own, of which Pillow takes a copy.
    copies = 4 if image.format == "WEBP" else 2 if image.has_transparency_data else 1
    return image.width * image.height * copies


def on_white(image: Image.Image, mode: str) -> Image.Image:
    """The image in a mode; a transparent one is composited onto white."""
    image.load()
    if not image.has_transparency_data:
        return image if image.mode == mode else image.convert(mode)
    flat = Image.new(mode, image.size)
    for top in range(0, image.height, BAND):  # Of a large one each copy is half a gigabyte.
        box = (0, top, image.width, min(image.height, top + BAND))
        layer = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        flat.paste(Image.alpha_composite(white, layer).convert("RGB").convert(mode), box)
    return flat


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
