"""The example pictures and their autoencoder, as the repository has them."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from make_vae import psnr, split
from PIL import Image

from titan_dit.commands import data_example
from titan_dit.commands.flags import DataExampleFlags
from titan_dit.config.section import UserError
from titan_dit.pictures import autoencoder, output

VAE = data_example.SOURCE / "vae"


@pytest.mark.long
def test_pictures_are_laid_out_by_class(tmp_path):
    out = tmp_path / "emoji"
    data_example.main(DataExampleFlags(name="pictures", out=str(out)))
    lines = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    assert len(lines) == 3786
    assert len({line["label"] for line in lines}) == 10
    files = {str(file.relative_to(out)) for file in out.rglob("*.png")}
    assert files == {line["file_name"] for line in lines}
    [face] = [line for line in lines if line["file_name"].endswith("/1f600.png")]
    assert (face["label"], face["text"]) == ("smileys-and-emotion", "grinning face")
    pixels = np.asarray(Image.open(out / face["file_name"]))
    assert pixels.shape == (64, 64, 3)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    red, green, blue = pixels[20, 32].tolist()
    assert red > green > blue + 50  # A yellow face, not a blue one.
    with pytest.raises(UserError, match=r"emoji exists\. Choose another folder"):
        data_example.main(DataExampleFlags(name="pictures", out=str(out)))


def test_an_installed_package_says_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(data_example, "SOURCE", tmp_path)
    with pytest.raises(UserError, match="without these pictures. Clone".replace(".", r"\.")):
        data_example.main(DataExampleFlags(name="pictures", out=str(tmp_path / "x")))


def test_a_full_disk_leaves_no_part_of_the_pictures(tmp_path, monkeypatch):
    def fills(self, file, *_):
        Path(file).write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fills)
    with pytest.raises(UserError, match=r"x cannot be written: No space left on device\. Free"):
        data_example.main(DataExampleFlags(name="pictures", out=str(tmp_path / "x")))
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_autoencoder_restores_pictures_it_never_saw():
    vae = autoencoder.load(str(VAE), torch.device("cpu"))
    train, held_out = split()
    assert len(held_out) == 256
    digests = [{hashlib.sha256(p.numpy()).digest() for p in part} for part in (train, held_out)]
    assert len(digests[0] & digests[1]) < 8  # Some emoji look like others.
    with torch.no_grad():
        assert psnr(vae.module, held_out) > 27
        mean, std = vae.encode(((train[:512] + 1) * 127.5).round().byte())
        latents = mean + std * torch.randn(std.shape, generator=torch.Generator().manual_seed(0))
    assert latents.std().item() * vae.scale == pytest.approx(1, abs=0.05)
    assert abs(latents.mean().item()) * vae.scale < 0.05
    assert (vae.channels, vae.facts.factor) == (4, 4)


def test_captioned_emoji_lie_flat_with_their_names_beside_them(tmp_path, monkeypatch):
    every = list(output.read_sheet(data_example.SOURCE / "pictures"))
    toned = [line for line, _ in every if "skin tone" in line["text"]]
    assert len(every) - len(toned) == 1911
    few = [pair for i, pair in enumerate(every) if i % 40 == 0]
    monkeypatch.setattr(data_example.output, "read_sheet", lambda source: iter(few))
    out = tmp_path / "emoji"
    data_example.main(DataExampleFlags(name="emoji_captioned", out=str(out)))
    wanted = {
        Path(line["file_name"]).stem: line["text"]
        for line, _ in few
        if "skin tone" not in line["text"]
    }
    assert {file.stem: file.read_text().strip() for file in out.glob("*.txt")} == wanted
    assert {file.stem for file in out.glob("*.png")} == wanted.keys()
    line, picture = next(pair for pair in few if "skin tone" not in pair[0]["text"])
    with Image.open(out / Path(line["file_name"]).name) as written:
        assert np.array_equal(written, picture)
    assert (out / "NOTICE").is_file(), "their licence"
