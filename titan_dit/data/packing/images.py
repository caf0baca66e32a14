"""Read images as uint8 sRGB pixels, optionally resized and cropped."""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageCms
from torch import Tensor

from titan_dit.config import limits
from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError, read_whole

SPACES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Colour space of a profile -> Pillow's mode."""
SRGB: Final = "sRGB"
"""Text in the description of an sRGB profile, whose pictures are not converted."""
MAX_PROFILE_BYTES = 4 << 20
"""Maximum bytes of a profile; a printer's have one or two million."""
EQUAL = 2
"""Maximum difference in levels between sRGB and a profile that is sRGB by another name."""


def colour_space(mode: str) -> str:
    """The mode that a profile describes, for an image of this mode."""
    if mode in ("1", "L", "LA"):
        return "L"
    return "CMYK" if mode == "CMYK" else "RGB"


@lru_cache(8)
def colour_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The transform from a profile's colours, in this mode, to sRGB.

    None if they are sRGB, if the profile is damaged, or if it describes another mode.
    """
    if len(profile) > MAX_PROFILE_BYTES:
        return None
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if SPACES.get(opened.profile.xcolor_space.strip()) != mode:
            return None
        found = ImageCms.buildTransform(opened, ImageCms.createProfile(SRGB), mode, "RGB")
        name = opened.profile.profile_description or ""
    except Exception:  # Pillow raises any exception on a damaged profile.
        return None
    is_srgb = mode != "CMYK" and (SRGB in name or is_equal(found, mode))
    return None if is_srgb else found


def is_equal(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """True if the transform leaves a cube of colours unchanged."""
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(27, 27, 3)
    before = Image.fromarray(cube).convert(mode)
    after = apply_colours(transform, before)
    differences = np.asarray(after).astype(int) - np.asarray(before.convert("RGB")).astype(int)
    return int(abs(differences).max()) <= EQUAL


def apply_colours(transform: ImageCms.ImageCmsTransform, image: Image.Image) -> Image.Image:
    """The picture in sRGB, as RGB."""
    found = ImageCms.applyTransform(image, transform)
    assert found is not None
    return found


MAX_PIXELS = 178_956_970
"""Maximum pixels of a picture; Pillow's own limit."""
MAX_BYTES = 512 << 20
"""Maximum memory for decoding one picture. It limits the pixels by format and mode."""
AT_ONCE = 896 << 20
"""Maximum memory for all pictures that are decoded at once."""
UNIT = 1 << 20
"""Bytes per unit of a DecodingBudget's semaphore."""
LARGE = 64 << 20
"""Above this memory, a picture's memory is returned to the system at once."""
REDUCED = 1 << 26
"""Above these pixels a JPEG is decoded at a reduced size, which changes last bits."""
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
JPEGS = ("JPEG", "MPO")
GREYS = ("1", "L", "LA")
FULL_SIZE = "full_size"
BAND = 1 << 18
"""Pixels per step of compositing a transparent picture."""
BYTE_MODES = ("1", "L", "P")
"""Modes of one byte per pixel; Pillow keeps all others in four."""
DECODERS = {
    **{"WEBP": 13, "AVIF": 16, "TIFF": 8, "PPM": 8},
    **{"GIF": 4, "BMP": 4, "DIB": 4},
}
"""Bytes per pixel that a decoder holds besides the image, as measured with Pillow 12."""
JPEG2000 = 6
"""Bytes per pixel and channel that the JPEG 2000 decoder holds besides the image."""
HALVED, WHOLE = 1.75, 18
"""Memory of cropping, relative to the picture's; bytes per pixel of a picture that is scored
uncropped."""
THINNEST = 100
"""Maximum ratio of sides for a crop: the shorter side is resized first."""
ORIENTATION = 0x0112
"""EXIF tag that says how the camera was held."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> transposition that makes the picture upright; 1 is upright."""


TURNED = {turn for orientation, turn in TURNS.items() if orientation >= 5}
"""Transpositions that exchange width and height."""
Crop: TypeAlias = int | tuple[int, int]
"""A size to crop to: the side of a square, or (width, height)."""


def sides_of(crop: Crop) -> tuple[int, int]:
    """(width, height) of a crop."""
    return (crop, crop) if isinstance(crop, int) else crop


class DecodingBudget:
    """Limit on the memory of pictures that are decoded at once: a large picture waits.

    `context` makes the locks: threading or multiprocessing. Pictures above `max_pixels` are
    refused; by default those whose decoding takes more than MAX_BYTES. `flag` is the flag that sets
    `max_pixels`.
    """

    def __init__(
        self, max_pixels: int | None = None, context: Any = threading, flag: str = ""
    ) -> None:
        self.max_pixels, self.flag = max_pixels, flag
        self.num_units = AT_ONCE // UNIT
        self.turn, self.free = context.Lock(), context.Semaphore(self.num_units)

    def check(self, image: Image.Image, cost: int) -> None:
        """Raise BadFileError for a picture that is too large. `cost` is its `memory_of`."""
        width, height = image.info.get(FULL_SIZE, image.size)
        pixels = width * height
        most = self.max_pixels or min(
            limits.raised(MAX_PIXELS), pixels * limits.raised(MAX_BYTES) // cost
        )
        if pixels > most:
            fix = f"Raise {self.flag}" if self.flag else limits.fix(pixels, most).rstrip(".")
            raise BadFileError(
                f"{width} x {height} pixels, more than {most:,} of {image.format} in {image.mode}. "
                f"{fix}"
            )

    @contextmanager
    def taken(self, cost: int) -> Iterator[None]:
        """Wait until `cost` bytes are free, and hold them."""
        units = min(self.num_units, -(-cost // UNIT))
        with self.turn:  # One at a time, or two that wait for the rest would block each other.
            for _ in range(units):
                self.free.acquire()
        try:
            yield
        finally:
            for _ in range(units):
                self.free.release()


class Decoded(NamedTuple):
    """A decoded picture."""

    pixels: UInt8[Tensor, "c h w"]
    is_converted: bool
    """True if its colours were converted to sRGB."""
    size: tuple[int, int]
    """(width, height) of the whole picture, upright."""


def read_image(
    path: Path,
    size: Crop | None = None,
    shape: tuple[int, ...] | None = None,
    budget: DecodingBudget | None = None,
) -> UInt8[Tensor, "c h w"]:
    """Read an image file: one channel if grey, else RGB; transparency on white, upright, sRGB.

    `size` crops, see `center_crop`. If `shape` has three channels, grey becomes RGB.
    Raises BadFileError for any other difference from `shape`, and for a picture that is too thin to
    crop.
    """
    return decode_image(read_whole(path), size, shape, budget).pixels


def decode_image(
    data: bytes | bytearray,
    size: Crop | None = None,
    shape: tuple[int, ...] | None = None,
    budget: DecodingBudget | None = None,
) -> Decoded:
    """Decode the bytes of an image file, see `read_image`. Raises BadFileError."""
    budget = budget or DecodingBudget()
    # Pillow's own limit warns on the screen, below ours.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(io.BytesIO(data), formats=known_formats()) as image:
            if size is None and shape is not None and sorted(image.size) != sorted(shape[1:]):
                found = [shape[0], image.height, image.width]
                raise BadFileError(f"shape {found}, not {list(shape)} like the other files")
            if image.mode.startswith(("I", "F")):
                raise BadFileError(f"{image.mode} image with more than 8 bits; convert it to 8")
            if size is not None and max(image.size) > THINNEST * min(image.size):
                shape_of_crop = "to a square" if isinstance(size, int) else "to a bucket"
                raise BadFileError(
                    f"{image.width} x {image.height} pixels: too thin to be cropped {shape_of_crop}"
                )
            has_coefficients = image.format in JPEGS and not is_one_scan(image, data)
            reduce_jpeg(image, size)
            cost = memory_of(image, size, has_coefficients) + len(data)
            budget.check(image, cost)
            with budget.taken(cost):
                pixels, is_converted, whole = flat(image, size, shape)
                image.close()
                if cost > LARGE:
                    give_back_memory()
    except (BadFileError, UserError):
        raise
    except Exception as error:  # Pillow raises any exception on a damaged file.
        raise BadFileError("not a readable image: damaged, or cut off") from error
    tensor = torch.from_numpy(pixels).view(*pixels.shape[:2], -1).permute(2, 0, 1)
    if shape is not None and tuple(tensor.shape) != shape:
        raise BadFileError(f"shape {list(tensor.shape)}, not {list(shape)} like the other files")
    return Decoded(tensor.contiguous(), is_converted, whole)


def flat(
    image: Image.Image, size: Crop | None, shape: tuple[int, ...] | None
) -> tuple[UInt8[np.ndarray, "..."], bool, tuple[int, int]]:
    """(upright, cropped pixels in sRGB, True if they were converted, upright size of the whole)."""
    profile = image.info.get("icc_profile") or b""
    to_srgb = colour_transform(profile, colour_space(image.mode)) if profile else None
    turn = turn_of(image)
    whole = image.info.get(FULL_SIZE, image.size)
    if turn in TURNED:
        whole = whole[::-1]
    # Grey becomes RGB after the crop, in a third of the memory.
    mode = "L" if image.mode in GREYS else "RGB"
    is_cmyk = image.mode == "CMYK"
    if to_srgb is not None and is_cmyk:
        picture = apply_colours(to_srgb, image)
    else:
        picture = on_white(image, mode)
    if picture is not image:
        image.close()
    if turn is not None:
        file, picture = picture, picture.transpose(turn)
        file.close()
    if size is not None:
        picture = center_crop(picture, size)
    if to_srgb is not None and not is_cmyk:
        picture = apply_colours(to_srgb, picture).convert(mode)
    is_grey = mode == "L" and (shape is None or shape[0] == 1)
    if not is_grey and picture.mode != "RGB":
        picture = picture.convert("RGB")
    return np.array(picture), to_srgb is not None, whole


def give_back_memory() -> None:
    """Make glibc return freed memory; it would keep gigabytes for each thread."""
    with suppress(AttributeError, OSError):  # Another C library.
        ctypes.CDLL(None).malloc_trim(0)


@cache
def known_formats() -> tuple[str, ...]:
    """Formats that may be opened. Some others start programs: a .png may be PostScript."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def reduce_jpeg(image: Image.Image, size: Crop | None) -> None:
    """Let a large JPEG be decoded at 1/8 to 1/2 of its size if a crop of `size` needs no more."""
    if size is None or image.format not in JPEGS or image.width * image.height <= REDUCED:
        return
    longer = max(sides_of(size))  # It is not upright yet.
    factor = next((f for f in (8, 4, 2) if min(image.size) // f >= 4 * longer), 1)
    if factor > 1:
        image.info[FULL_SIZE] = image.size
        image.draft(image.mode, (image.width // factor, image.height // factor))


def memory_of(image: Image.Image, size: Crop | None, has_coefficients: bool) -> int:
    """Peak bytes of decoding, converting, turning and cropping a picture to `size`."""
    pixels = image.width * image.height
    stored = 1 if image.mode in BYTE_MODES else 4
    target = 1 if image.mode in GREYS else 4
    decoder = DECODERS.get(image.format or "", 0) * pixels
    if image.format == "JPEG2000":
        decoder = JPEG2000 * len(image.getbands()) * pixels
    if has_coefficients:
        decoder = 2 * samples_of(image)
    is_kept = image.mode in ("L", "RGB") and not image.has_transparency_data
    return max(
        stored * pixels + decoder,
        0 if is_kept else (stored + target) * pixels,
        2 * target * pixels if may_turn(image) else 0,
        WHOLE * pixels if size is None else int(HALVED * target * pixels),
    )


def may_turn(image: Image.Image) -> bool:
    """True unless the picture is known to be upright: a PNG may say so after its pixels."""
    return image.format == "PNG" or turn_of(image) is not None


def is_one_scan(image: Image.Image, data: bytes | bytearray) -> bool:
    """True for a JPEG with all channels in its first scan; else the decoder holds all coefficients.

    Pillow has read that scan's header last.
    """
    count, end = len(image.getbands()), image.fp.tell()  # type: ignore[attr-defined]
    header = b"\xff\xda" + (6 + 2 * count).to_bytes(2, "big") + bytes([count])
    begin = end - 8 - 2 * count
    return not image.info.get("progressive") and data[begin : begin + 5] == header


def samples_of(image: Image.Image) -> int:
    """Coefficients of a JPEG at full size, whatever size is decoded."""
    width, height = image.info.get(FULL_SIZE, image.size)
    layers = [across * down for _, across, down, _ in getattr(image, "layer", ())]
    each = sum(layers) / max(layers) if layers and min(layers) else len(image.getbands())
    return int(width * height * each)


def on_white(image: Image.Image, mode: str) -> Image.Image:
    """The image in a mode; transparency is composited onto white."""
    image.load()
    if not image.has_transparency_data:
        return image if image.mode == mode else image.convert(mode)
    flat = Image.new(mode, image.size)
    rows = max(1, BAND // image.width)
    for top in range(0, image.height, rows):  # Of a large one each copy is half a gigabyte.
        box = (0, top, image.width, min(image.height, top + rows))
        layer = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        flat.paste(Image.alpha_composite(white, layer).convert("RGB").convert(mode), box)
    return flat


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """The transposition that makes a picture upright by its EXIF, as viewers do; None if it is."""
    with suppress(Exception):  # Pillow raises any exception on damaged EXIF.
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    return None


def center_crop(image: Image.Image, size: Crop) -> Image.Image:
    """Resize to cover `size` and crop the center, like ADM (arXiv:2105.05233) and DiT.

    Halves the image with a box filter while it covers twice the size. The last resize is bicubic:
    one large bicubic step would alias.
    """
    width, height = sides_of(size)
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    ratio = max(width / image.width, height / image.height)
    fitted = (round(image.width * ratio), round(image.height * ratio))
    image = image.resize(fitted, Image.Resampling.BICUBIC)
    left, above = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, above, left + width, above + height))
