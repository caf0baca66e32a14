import dataclasses
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from folders_of_files import pictures
from packed_folders import packed
from PIL import Image, ImageOps
from refusals import refused

from titan_dit.data.files import BadFileError
from titan_dit.data.latents import LatentShards
from titan_dit.data.packing import pack
from titan_dit.data.packing.images import DecodingBudget, center_crop, decode_image, read_image


def test_pictures_become_pixels(tmp_path):
    pictures(tmp_path / "in")
    assert packed(tmp_path / "in", tmp_path / "out") == []
    source = LatentShards(tmp_path / "out", verify=True)
    assert source.facts.shape == (3, 10, 10)
    assert (source.facts.scale, source.facts.shift) == (1 / 127.5, 127.5)
    assert source.facts.value_range == (0, 255)
    assert source.facts.class_names == ("cat", "dog")
    assert source.dtype == torch.uint8
    pixels = np.asarray(Image.open(tmp_path / "in" / "dog" / "2.png"))
    assert torch.equal(source[5]["latent"], torch.from_numpy(pixels.copy()).permute(2, 0, 1))


def test_grey_pictures_have_one_channel_unless_others_have_colour(tmp_path):
    pictures(tmp_path / "in", mode="L")
    packed(tmp_path / "in", tmp_path / "grey")
    assert LatentShards(tmp_path / "grey").facts.shape == (1, 10, 10)
    pictures(tmp_path / "in", classes=("emu",), each=20)
    packed(tmp_path / "in", tmp_path / "both")
    source = LatentShards(tmp_path / "both")
    assert source.facts.shape == (3, 10, 10)
    assert len(source) == 26
    assert torch.equal(source[0]["latent"][0], source[0]["latent"][2])


def test_bad_pictures_are_left_out(tmp_path):
    pictures(tmp_path / "in", each=70)
    cat = tmp_path / "in" / "cat"
    (cat / "0.png").write_bytes(b"")
    (cat / "1.png").write_bytes(b"\x89PNG and no more")
    whole = (cat / "3.png").read_bytes()
    (cat / "3.png").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.full((10, 10), 40000, dtype=np.uint16)).save(cat / "4.png")
    Image.new("RGB", (4, 4)).save(cat / "5.png")  # Not among the sampled files.
    reasons = [reason for _, reason in packed(tmp_path / "in", tmp_path / "out")]
    assert reasons == [
        "empty file",
        *["not a readable image: damaged, or cut off"] * 2,
        "I;16 image with more than 8 bits; convert it to 8",
        "shape [3, 4, 4], not [3, 10, 10] like the other files",
    ]


def test_16_bit_colours_are_read_by_their_upper_bits():
    pixels = np.random.default_rng(0).integers(0, 2**16, (4, 5, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = {b"IHDR": struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0), b"IDAT": zlib.compress(rows)}
    file = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    file.seek(0, io.SEEK_END)
    for kind, data in (parts | {b"IEND": b""}).items():
        file.write(struct.pack(">I", len(data)) + kind + data)
        file.write(struct.pack(">I", zlib.crc32(kind + data)))
    found = decode_image(file.getvalue(), None, (3, 4, 5)).pixels.permute(1, 2, 0)
    assert np.array_equal(found.numpy(), pixels >> 8)


@pytest.mark.parametrize("sizes", [((10, 10), (12, 12)), ((10, 12), (10, 12))])
def test_pictures_that_are_not_squares_of_one_size_need_a_size(tmp_path, sizes):
    for name, size in zip(("cat", "dog"), sizes, strict=True):
        pictures(tmp_path / "in", classes=(name,), size=size)
    message = refused(lambda: packed(tmp_path / "in", tmp_path / "out"))
    assert "not squares of one size (1" in message
    assert "--image-size" in message
    packed(tmp_path / "in", tmp_path / "out", image_size=8)
    assert LatentShards(tmp_path / "out").facts.shape == (3, 8, 8)


def test_pictures_of_another_size_are_another_plan(tmp_path):
    pictures(tmp_path / "in", size=(40, 40))
    plan = pack.make_job(tmp_path / "in", tmp_path / "out", image_size=40)
    assert dataclasses.replace(plan, image_size=None).digest != plan.digest


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_laid_on_white(tmp_path, mode):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (40, 40, 40, 255))
    image.convert(mode).save(tmp_path / "0.png")
    pixels = read_image(tmp_path / "0.png")
    assert pixels.shape[0] == (1 if mode == "LA" else 3)
    assert pixels[:, 0].unique(dim=0).tolist() == [[255, 40]]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_pictures_are_turned_as_their_exif_says(kind):
    whole = np.zeros((16, 32, 3), np.uint8)
    whole[:8, :16], whole[:8, 16:], whole[8:, :16] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    for orientation in range(10):
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        Image.fromarray(whole).save(file, kind, exif=exif, quality=95, lossless=True)
        with Image.open(io.BytesIO(file.getvalue())) as image:
            expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        assert np.array_equal(
            decode_image(file.getvalue()).pixels.permute(1, 2, 0).numpy(), expected
        )
    damaged = io.BytesIO()
    Image.fromarray(whole).save(damaged, kind, exif=b"Exif\0\0no header")
    assert decode_image(damaged.getvalue(), 4).pixels.shape == (3, 4, 4)


def test_the_crop_is_in_the_middle_of_the_height_too():
    ramp = np.linspace(0, 255, 300)[:, None].repeat(40, 1).round().astype(np.uint8)
    cropped = np.asarray(center_crop(Image.fromarray(ramp), 16)).astype(float)
    assert cropped[7:9].mean() == pytest.approx(127.5, abs=6)
    assert cropped[0].mean() == pytest.approx(127.5 - 7.5 * 255 * 40 / 300 / 16, abs=6)


def test_a_picture_that_is_too_large_names_the_flag():
    file = io.BytesIO()
    Image.new("L", (20, 20)).save(file, "PNG")
    said = r"^20 x 20 pixels, more than 399 of PNG in L\. Raise --max-pixels$"
    with pytest.raises(BadFileError, match=said):
        decode_image(file.getvalue(), budget=DecodingBudget(399, flag="--max-pixels"))


def test_what_is_too_thin_is_not_enlarged():
    """Once its shorter side is 256, a line of 60,000 pixels would need 12 GB."""
    data = io.BytesIO()
    Image.new("L", (60_000, 1)).save(data, "PNG")
    with pytest.raises(BadFileError, match=r"^60000 x 1 pixels: too thin to be cropped"):
        decode_image(data.getvalue(), 256)
    assert decode_image(data.getvalue()).pixels.shape == (1, 1, 60_000)


@pytest.mark.parametrize("size", [(90, 61), (32, 32), (40, 300), (17, 20)])
def test_the_crop_is_the_middle_of_the_shrunk_picture(size, tmp_path):
    ramp = np.linspace(0, 255, size[0])[None].repeat(size[1], 0).round().astype(np.uint8)
    image = Image.fromarray(ramp)
    cropped = np.asarray(center_crop(image, 16)).astype(float)
    assert cropped.shape == (16, 16)
    assert cropped[:, 7:9].mean() == pytest.approx(127.5, abs=6)  # The centre stays in place.
    step = np.diff(cropped.mean(0)).mean()
    assert step == pytest.approx(255 / size[0] * min(size) / 16, rel=0.1)
    image.save(tmp_path / "0.png")
    assert np.array_equal(read_image(tmp_path / "0.png", 16)[0], cropped)
