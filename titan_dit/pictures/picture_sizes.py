"""Sizes and lengths of buckets: which one fits a picture or a clip, and what a crop costs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from titan_dit.config.section import UserError

MAX_RATIO = 4
"""Maximum ratio of the sides of the buckets of `--pixels`."""
MIN_KEPT = 0.5
"""Minimum share of a picture that the crop to its bucket keeps, if there are several buckets. With
a single one all pictures are cropped to it."""
MAX_BUCKETS = 4096
"""Maximum widths of the buckets of `--pixels`."""
MAX_SIDE = 1 << 16
"""Maximum side of a bucket, in pixels."""


class Size(NamedTuple):
    """Width and height of a picture, in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        """Format as the flags have it: "832x1216", width first."""
        return f"{self.width}x{self.height}"

    @property
    def pixels(self) -> int:
        """The area."""
        return self.width * self.height


class Fit(NamedTuple):
    """How a picture becomes one of a bucket: resized to cover it, then cropped."""

    bucket: int
    """Number of the bucket whose aspect ratio is nearest."""
    kept: float
    """Share of the picture's area that the crop keeps."""
    scale: float
    """Sides after the resize, relative to the picture's; above 1 it is enlarged."""


def parse_sizes(text: str) -> tuple[Size, ...]:
    """The sizes of `--buckets 1024x1024,832x1216`. Raises UserError."""
    where = f"[data encode] buckets={text}"
    sizes = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})x(\d{1,6})\s*", word)
        if found is None:
            raise UserError(
                f"{where}: {word.strip()!r} is no size. Give width x height in pixels, with commas "
                "between buckets: 1024x1024,832x1216."
            )
        size = Size(int(found[1]), int(found[2]))
        if not 0 < min(size) <= max(size) <= MAX_SIDE:
            raise UserError(f"{where}: a side of {size} is not from 1 to {MAX_SIDE}. Correct it.")
        if size in sizes:
            raise UserError(f"{where}: {size} stands twice. Keep one of them.")
        sizes.append(size)
    return tuple(sizes)


def sizes_within(pixels: int, multiple: int) -> tuple[Size, ...]:
    """All sizes of at most `pixels` whose sides are multiples, up to MAX_RATIO, narrow ones first.

    None of them fits into another one. Raises UserError if there is none.
    """
    if pixels < multiple**2:
        raise UserError(
            f"[data encode] pixels={pixels} holds no picture whose sides are multiples of "
            f"multiple={multiple}. Set --pixels to at least {multiple**2}."
        )

    if MAX_RATIO * math.isqrt(pixels) > MAX_BUCKETS * multiple:
        raise UserError(
            f"[data encode] pixels={pixels} has more than {MAX_BUCKETS} sizes whose sides are "
            f"multiples of multiple={multiple}. Raise --multiple."
        )

    def longest(side: int) -> int:
        return pixels // side // multiple * multiple

    widths = range(multiple, MAX_RATIO * math.isqrt(pixels) + multiple, multiple)
    sizes = [Size(width, longest(width)) for width in widths if longest(width)]
    return tuple(
        size
        for size in sizes
        if longest(size.height) == size.width and max(size) <= MAX_RATIO * min(size)
    )


def check_image_size(side: int, factor: int, vae: str) -> None:
    """Raise UserError for a square that the autoencoder cannot divide by its factor."""
    if side % factor:
        near = max(factor, round(side / factor) * factor)
        raise UserError(
            f"[data encode] image_size={side} is no multiple of {factor}, by which {vae} divides a "
            f"side. Set --image-size {near}."
        )


def check_multiples(sizes: Sequence[Size], factor: int, vae: str) -> None:
    """Raise UserError for a size that the autoencoder cannot divide by its factor."""
    for size in sizes:
        if size.width % factor or size.height % factor:
            near = Size(*(max(factor, round(side / factor) * factor) for side in size))
            raise UserError(
                f"[data encode] buckets: the sides of {size} are no multiples of {factor}, by "
                f"which {vae} divides a side. Set {near}, or --multiple to a multiple of {factor}."
            )


@lru_cache(maxsize=1 << 16)
def fit(sizes: tuple[Size, ...], picture: Size) -> Fit:
    """The bucket of the nearest aspect ratio, and what cover and crop cost.

    Of equally near ones the largest that the picture covers without being enlarged, else the
    smallest.
    """

    def order(number: int) -> tuple[float, bool, int]:
        size = sizes[number]
        distance = abs(math.log(picture.width * size.height / (picture.height * size.width)))
        enlarges = size.width > picture.width or size.height > picture.height
        return round(distance, 9), enlarges, size.pixels if enlarges else -size.pixels

    number = min(range(len(sizes)), key=order)
    size = sizes[number]
    scale = max(size.width / picture.width, size.height / picture.height)
    return Fit(number, size.pixels / (picture.pixels * scale * scale), scale)


def parse_lengths(text: str) -> tuple[int, ...]:
    """The lengths of `--frames 17,49,81`, in order. Raises UserError."""
    where = f"[data encode] frames={text}"
    lengths = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not word.isascii() or not 0 < int(word[:9]) <= 10**4:
            raise UserError(
                f"{where}: {word.strip()!r} is no number of frames from 1 to 10,000. Give numbers "
                "with commas between: 17,49,81."
            )
        lengths.append(int(word))
    if len(set(lengths)) < len(lengths):
        raise UserError(f"{where}: a number stands twice. Keep one of them.")
    return tuple(sorted(lengths))


def check_lengths(lengths: Sequence[int], factor: int, vae: str) -> None:
    """Raise UserError unless an autoencoder of this factor takes clips of these lengths."""
    for length in lengths:
        if (length - 1) % factor:
            near = max(1, round((length - 1) / factor)) * factor + 1
            raise UserError(
                f"[data encode] frames={length}: {vae} makes a latent frame of the first frame and "
                f"of every {factor} frames after it, so it takes {factor}k + 1. Set {near}."
            )
