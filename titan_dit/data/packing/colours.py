"""Colours of a picture with an ICC profile, to sRGB."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Final

import numpy as np
from PIL import Image, ImageCms

SPACES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Colour space of a profile -> mode of Pillow."""
SRGB: Final = "sRGB"
"""In the description of a profile: its pictures are left as they are."""
MAX_BYTES = 4 << 20
"""Bytes of a profile; those of inks have one or two million."""
EQUAL = 2
"""Levels by which a profile that is sRGB under another name may differ from it."""


def space_of(mode: str) -> str:
    """The mode that a profile of an image of this mode is about."""
    if mode in ("1", "L", "LA"):
        return "L"
    return "CMYK" if mode == "CMYK" else "RGB"


@lru_cache(8)
def transform_of(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The way from a profile's colours in this mode to sRGB.

    None if they are sRGB, or the profile is damaged or of other colours than the image.
    """
    if len(profile) > MAX_BYTES:
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
    """True if a cube of colours stays what it is."""
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(27, 27, 3)
    before = Image.fromarray(cube).convert(mode)
    after = apply(transform, before)
    differences = np.asarray(after).astype(int) - np.asarray(before.convert("RGB")).astype(int)
    return int(abs(differences).max()) <= EQUAL


def apply(transform: ImageCms.ImageCmsTransform, image: Image.Image) -> Image.Image:
    """The picture in sRGB, RGB."""
    found = ImageCms.applyTransform(image, transform)
    assert found is not None
    return found
