"""Pictures by strangers: bounded memory, the same bits, colours of other spaces."""

import io
import threading
import time
import zipfile

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageCms
from refusals import refused

from titan_dit.data.files import BadFileError, read_latent
from titan_dit.data.packing import images
from titan_dit.data.packing.images import DecodingBudget, center_crop, decode_image
from titan_dit.interop import tensor_file

RED = (250, 20, 30)


def file_of(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def random_picture(mode, size=(97, 61)):
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], channels), np.uint8)
    return (
        Image.fromarray(pixels.squeeze(), mode) if channels > 1 else Image.fromarray(pixels[..., 0])
    )


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_bits_are_those_of_a_picture_that_is_converted_whole(mode, channels, monkeypatch):
    """Greys become RGB after the crop, and transparent pictures are composited in bands."""
    monkeypatch.setattr(images, "BAND", 7 * 97)
    data = file_of(random_picture(mode), "TIFF")
    with Image.open(io.BytesIO(data)) as image:
        if mode in ("LA", "RGBA"):
            layer = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        one = mode in ("L", "LA") and channels == 1
        wanted = np.asarray(center_crop(image.convert("RGB").convert("L" if one else "RGB"), 16))
    if channels == 1 and not one:
        return
    found = decode_image(data, 16, (channels, 16, 16))
    assert np.array_equal(found.pixels.permute(1, 2, 0).numpy().squeeze(), wanted)
    assert not found.is_converted


def test_a_large_jpeg_is_reduced_while_it_is_decoded(monkeypatch):
    smooth = random_picture("RGB", (9, 7)).resize((1280, 960), Image.Resampling.BICUBIC)
    data = file_of(smooth, "JPEG", quality=95)
    whole = decode_image(data, 32).pixels.float()
    monkeypatch.setattr(images, "REDUCED", 1280 * 960 - 1)
    costs = []
    monkeypatch.setattr(images, "memory_of", lambda image, *_: costs.append(image.size) or 1)
    found = decode_image(data, 32).pixels.float()
    assert costs == [(160, 120)] or costs == [(320, 240)]
    assert min(costs[0]) >= 4 * 32 - 8
    assert (found - whole).abs().max() <= 3
    decode_image(data, 240)
    assert costs[1] == (1280, 960)  # Not below four times the crop.


def test_the_coefficients_of_a_progressive_jpeg_are_counted(monkeypatch):
    monkeypatch.setattr(images, "REDUCED", 100)
    picture = random_picture("RGB", (400, 300))
    costs = []
    for options in ({}, {"progressive": True}, {"progressive": True, "subsampling": 0}):
        costs.append(cost_of(file_of(picture, "JPEG", **options), 16))
    half = 100 * 75 * 4
    assert costs == [2 * half * 7 // 8, 3 * 400 * 300 + half, 6 * 400 * 300 + half]
    # The same, of a JPEG whose scans have one channel each, without being progressive.
    data = file_of(picture, "JPEG")
    scan = data.index(b"\xff\xda\x00\x0c\x03")
    assert cost_of(data[:scan] + b"\xff\xda\x00\x08\x01" + data[scan + 5 :], 16) == costs[1]


def cost_of(data, size):
    with Image.open(io.BytesIO(data)) as image:
        is_jpeg = image.format == "JPEG"
        coefficients = is_jpeg and not images.is_one_scan(image, data)
        images.reduce_jpeg(image, size)
        return images.memory_of(image, size, coefficients)


@pytest.mark.parametrize(
    ("kind", "mode", "options", "most"),
    [
        ("PNG", "RGB", {}, 2**26),
        ("PNG", "L", {}, images.MAX_PIXELS),
        ("PNG", "RGBA", {}, 2**26),
        ("PNG", "P", {}, 2**26),
        ("WEBP", "RGB", {}, 2**29 // 17),
        ("TIFF", "CMYK", {}, 2**29 // 12),
        ("JPEG", "RGB", {}, 2**29 // 7),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 0}, 2**29 // 10),
        ("GIF", "P", {}, 2**29 // 7),
    ],
)
def test_the_pixels_of_a_picture_are_limited_by_what_its_format_takes(kind, mode, options, most):
    data = file_of(random_picture("RGB", (40, 30)).convert(mode), kind, **options)
    cost = cost_of(data, 16)
    with Image.open(io.BytesIO(data)) as image:
        for width, is_refused in ((int(most * 0.99) // 1000, False), (most // 1000 + 9, True)):
            image._size = (width, 1000)
            grown = cost * width * 1000 // (40 * 30)
            if not is_refused:
                DecodingBudget().check(image, grown)
                continue
            with pytest.raises(BadFileError, match=rf"^{width} x 1000 pixels, more than [\d,]+ of"):
                DecodingBudget().check(image, grown)
            DecodingBudget(most * 2, flag="--max-pixels").check(image, grown)


def test_a_variable_raises_the_limit_of_pictures_that_no_flag_raises(monkeypatch):
    data = file_of(random_picture("RGB"), "PNG")
    monkeypatch.setattr(images, "MAX_BYTES", 30_000)
    with pytest.raises(
        BadFileError, match=r"If it is no forgery, set TITAN_DIT_LIMITS=\d$"
    ) as caught:
        decode_image(data)
    monkeypatch.setenv("TITAN_DIT_LIMITS", str(caught.value)[-1])
    assert decode_image(data).pixels.shape == (3, 61, 97)
    monkeypatch.setenv("TITAN_DIT_LIMITS", "many")
    assert "TITAN_DIT_LIMITS=many" in refused(lambda: decode_image(data))


def test_pictures_beyond_the_budget_wait_and_are_not_blocked(monkeypatch):
    monkeypatch.setattr(images, "AT_ONCE", 4 * images.UNIT)
    budget, most, held, lock = DecodingBudget(), 0, 0, threading.Lock()

    def work(units):
        nonlocal most, held
        for _ in range(20):
            with budget.taken(units * images.UNIT):
                with lock:
                    held += min(units, 4)
                    most = max(most, held)
                time.sleep(0.001)
                with lock:
                    held -= min(units, 4)

    threads = [threading.Thread(target=work, args=(units,)) for units in (1, 2, 3, 4, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert most == 4


def test_a_picture_of_another_kind_starts_no_program(monkeypatch):
    """Pillow starts Ghostscript for PostScript, whatever the file's name is."""
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given: started.append(given))
    with pytest.raises(BadFileError, match="not a readable image"):
        decode_image(file_of(random_picture("RGB"), "EPS"))
    assert not started
    assert decode_image(file_of(random_picture("RGB"), "BMP")).pixels.shape == (3, 61, 97)


def profile(space, gamma=2.2):
    """An ICC profile of RGB with Adobe RGB's primaries, or sRGB's, or of grey."""
    if space == "sRGB":
        return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return matrix_profile(gamma)


def matrix_profile(gamma):
    """The smallest profile: primaries of Adobe RGB (1998), adapted to D50, and a gamma."""
    rows = {
        b"rXYZ": (0.60974, 0.31111, 0.01947),
        b"gXYZ": (0.20528, 0.62567, 0.06087),
        b"bXYZ": (0.14919, 0.06322, 0.74457),
        b"wtpt": (0.9642, 1.0, 0.8249),
    }
    tags = {name: b"XYZ \0\0\0\0" + b"".join(map(fixed, row)) for name, row in rows.items()}
    curve = (
        b"curv\0\0\0\0" + (1).to_bytes(4, "big") + round(gamma * 256).to_bytes(2, "big") + b"\0\0"
    )
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    tags[b"desc"] = b"desc\0\0\0\0" + (6).to_bytes(4, "big") + b"Other\0" + bytes(78 + 4)
    start, table, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, data in tags.items():
        table += name + (start + len(body)).to_bytes(4, "big") + len(data).to_bytes(4, "big")
        body += data + bytes(-len(data) % 4)
    size = start + len(body)
    head = size.to_bytes(4, "big") + b"lcms\x02\x10\0\0mntrRGB XYZ " + bytes(12) + b"acsp"
    head += bytes(28) + fixed(0.9642) + fixed(1.0) + fixed(0.8249)
    return head.ljust(128, b"\0") + len(tags).to_bytes(4, "big") + table + body


def fixed(value):
    """A number of ICC: 16 bits before and 16 after the point."""
    return round(value * 65536).to_bytes(4, "big", signed=True)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_colors_of_another_space_become_srgb(kind):
    options = {"quality": 100, "lossless": True, "icc_profile": profile("other")}
    flat = Image.new("RGB", (40, 40), (150, 130, 60))
    found = decode_image(file_of(flat, kind, **options), 8, (3, 8, 8))
    assert found.is_converted
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile("other")))
    wanted = ImageCms.profileToProfile(flat, opened, ImageCms.createProfile("sRGB"))
    difference = found.pixels.float() - torch.tensor(wanted.getpixel((0, 0)))[:, None, None]
    assert difference.abs().max() <= 2  # The JPEG's own error.
    assert (found.pixels[0].float() - 150).abs().min() > 3


@pytest.mark.parametrize("data", [profile("sRGB"), b"damaged", b""])
def test_bits_with_a_profile_of_srgb_or_a_damaged_one_are_kept(data):
    picture = random_picture("RGB")
    found = decode_image(file_of(picture, icc_profile=data))
    assert not found.is_converted
    assert np.array_equal(found.pixels.permute(1, 2, 0).numpy(), np.asarray(picture))


def test_a_latent_that_is_a_view_of_little_is_refused(tmp_path):
    torch.save(torch.zeros(1).expand(4, 10_000, 10_000), tmp_path / "0.pt")
    with pytest.raises(BadFileError, match="holds a view that is larger than the file"):
        read_latent(tmp_path / "0.pt")
    (tmp_path / "0.npy").touch()
    with (tmp_path / "0.npy").open("wb") as file:
        file.truncate(30 * 10**9)  # It is sparse, and takes no room.
    with pytest.raises(BadFileError, match="30,000,000,000 bytes, more than the 268,435,456 of"):
        read_latent(tmp_path / "0.npy")


def compressed(source, target):
    """The same zip with compressed entries."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def test_a_compressed_pt_file_is_refused(tmp_path):
    torch.save(torch.zeros(4, 500, 500), tmp_path / "a.pt")
    compressed(tmp_path / "a.pt", tmp_path / "b.pt")
    with pytest.raises(BadFileError, match=r"not a readable \.pt file"):
        read_latent(tmp_path / "b.pt")
    torch.save({"a": torch.zeros(4, 500, 500)}, tmp_path / "a.pt")
    compressed(tmp_path / "a.pt", tmp_path / "b.pt")
    assert "(it is compressed)" in refused(lambda: tensor_file.read_weight_file(tmp_path / "b.pt"))
