"""Sizes of buckets: which there are, which one fits a picture, what the crop keeps."""

import io
import math
import struct
import zlib

import pytest
from PIL import Image
from refusals import refused

from titan_dit.data.files import BadFileError
from titan_dit.data.packing.images import center_crop
from titan_dit.pictures.picture_sizes import Fit, Size, fit, parse_sizes, sizes_within
from titan_dit.pictures.survey import upright_size

SDXL = sizes_within(1024 * 1024, 32)


def test_sizes_are_the_largest_below_the_pixels_for_every_width():
    assert {Size(1024, 1024), Size(832, 1248), Size(1248, 832), Size(512, 2048)} <= set(SDXL)
    for size in SDXL:
        assert size.width % 32 == size.height % 32 == 0
        assert size.pixels <= 1024 * 1024 < size.width * (size.height + 32)
        assert 1 / 4 <= size.width / size.height <= 4
        assert Size(size.height, size.width) in SDXL
    assert list(SDXL) == sorted(SDXL)
    assert len({size.width for size in SDXL}) == len({size.height for size in SDXL}) == len(SDXL)
    assert sizes_within(256 * 256, 256) == (Size(256, 256),)


def test_the_nearest_aspect_ratio_is_chosen_and_covered():
    assert str(SDXL[fit(SDXL, Size(3000, 3000)).bucket]) == "1024x1024"
    for picture in (Size(1920, 1080), Size(1080, 1920), Size(500, 333), Size(4000, 3001)):
        found = fit(SDXL, picture)
        size = SDXL[found.bucket]
        distances = [
            abs(math.log(s.width / s.height * picture.height / picture.width)) for s in SDXL
        ]
        assert distances[found.bucket] == min(distances)
        assert found.scale * picture.width >= size.width - 1e-6
        assert found.scale * picture.height >= size.height - 1e-6
        seen = size.pixels / found.scale**2 / picture.pixels
        assert found.kept == pytest.approx(seen)
        assert 0.9 < found.kept <= 1 + 1e-12


def test_of_equal_ratios_the_largest_that_needs_no_enlarging_is_chosen():
    sizes = (Size(256, 256), Size(1024, 1024), Size(512, 512))
    found = [sizes[fit(sizes, Size(side, side)).bucket].width for side in (100, 256, 800, 4000)]
    assert found == [256, 256, 512, 1024]
    assert fit(sizes, Size(100, 100)) == Fit(0, 1.0, 2.56)


def test_the_crop_is_central_and_covers_the_size():
    ramp = Image.linear_gradient("L").resize((64, 64))
    wide = center_crop(ramp, (64, 16))
    assert wide.size == (64, 16)
    assert wide.getpixel((0, 0)) == ramp.getpixel((0, 24))
    assert center_crop(ramp, (10, 30)).size == (10, 30)
    assert center_crop(ramp, (300, 100)).size == (300, 100)
    assert center_crop(ramp, 16).tobytes() == center_crop(ramp, (16, 16)).tobytes()


def test_sizes_are_written_width_first():
    assert parse_sizes("1024x1024, 832x1216") == (Size(1024, 1024), Size(832, 1216))
    for text, words in {
        "1024": "'1024' is no size. Give width x height in pixels",
        "8x8,": "'' is no size",
        "8x0": "a side of 8x0 is not from 1 to 65536",
        "8x8,16x8,8x8": "8x8 stands twice",
    }.items():
        assert words in refused(lambda text=text: parse_sizes(text))
    assert "Set --pixels to at least 1024" in refused(lambda: sizes_within(1000, 32))
    assert "Raise --multiple" in refused(lambda: sizes_within(10**9, 1))


def file_of(image, kind, **options):
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    file.seek(0)
    return file


def chunk(kind, data):
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_size_is_upright_without_decoding(kind):
    exif, image = Image.Exif(), Image.new("RGB", (30, 20))
    assert upright_size(file_of(image, kind)) == Size(30, 20)
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        found = upright_size(file_of(image, kind, exif=exif))
        assert found == (Size(20, 30) if orientation >= 5 else Size(30, 20))


def test_exif_behind_the_pixels_of_a_png_counts():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = file_of(Image.new("RGB", (30, 20)), "PNG").getvalue()
    end = plain.rindex(b"IEND") - 4
    late = plain[:end] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[end:]
    assert upright_size(io.BytesIO(late)) == Size(20, 30)
    with pytest.raises(BadFileError, match="not a readable image"):
        upright_size(io.BytesIO(plain[:20]))
