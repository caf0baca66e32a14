import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from titan_dit.commands import data_show
from titan_dit.commands.flags import DataShowFlags
from titan_dit.config.section import UserError
from titan_dit.data.latents import write_shards
from titan_dit.pictures import output
from titan_dit.pictures.output import WIDEST, draw_grid, to_pixels

CELL, MARGIN = 50, 44  # 48 pixels and a border of one; room for the label


def test_grey_goes_from_black_to_white_over_the_range():
    samples = torch.tensor([-1.0, 0.0, 1.0, -9.0, 9.0, 0.5]).view(1, 1, 2, 3)
    pixels = to_pixels(samples, (-1.0, 1.0))
    assert pixels.shape == (1, 2, 3, 3)
    assert pixels[0, :, :, 0].tolist() == [[0, 128, 255], [0, 255, 191]]
    assert torch.equal(pixels[..., 0], pixels[..., 2])


def test_colours_keep_their_order_and_a_fourth_channel_is_left_out():
    samples = torch.stack([torch.full((2, 2), v) for v in (0.0, 0.5, 1.0, 7.0)])[None]
    assert to_pixels(samples, (0.0, 1.0))[0, 0, 0].tolist() == [0, 128, 255]


def test_latents_are_stretched_channel_by_channel():
    samples = torch.randn(3, 4, 5, 5) * torch.tensor([1.0, 10, 0.1, 1])[:, None, None] + 3
    pixels = to_pixels(samples, None)
    assert pixels.amin((0, 1, 2)).tolist() == [0, 0, 0]
    assert pixels.amax((0, 1, 2)).tolist() == [255, 255, 255]
    assert to_pixels(torch.ones(1, 1, 2, 2), None).max() == 0  # a constant channel


def test_a_grid_shows_every_sample_in_the_row_of_its_label(tmp_path):
    # Each sample a shade of its own, labels in no order.
    labels = [2, 0, 2, 0, 2]
    shades = torch.linspace(0.1, 0.9, 5)
    samples = shades[:, None, None, None].expand(5, 1, 8, 8).clone()
    # Different corners, to detect flips.
    samples[:, 0, :2, :2], samples[:, 0, 6:, :2] = 0, 1
    path = tmp_path / "samples" / "step.png"
    draw_grid(path, samples, labels, (0.0, 1.0))
    sheet = np.asarray(Image.open(path))
    assert sheet.shape == (2 * CELL, MARGIN + 3 * CELL, 3)
    for y, members in enumerate(([1, 3], [0, 2, 4])):
        for x, index in enumerate(members):
            top, left = y * CELL + 1, MARGIN + x * CELL + 1
            cell = sheet[top : top + 48, left : left + 48].astype(float)
            # Away from the corners, whose edges may be smoothed.
            assert np.abs(cell[:, 28:] - 255 * shades[index].item()).max() <= 1
            assert cell[:4, :4].max() < 26
            assert cell[44:, :4].min() > 229
    # Row 0 has two samples: the third place stays white.
    assert (sheet[:CELL, MARGIN + 2 * CELL :] == 255).all()
    # Each row has its label on the left.
    assert (sheet[:CELL, :MARGIN] < 128).any()
    assert (sheet[CELL:, :MARGIN] < 128).any()


def test_a_long_row_is_broken(tmp_path):
    path = tmp_path / "grid.png"
    draw_grid(path, torch.rand(7, 1, 8, 8), [0] * 5 + [1] * 2, (0.0, 1.0), max_columns=2)
    assert Image.open(path).size == (MARGIN + 2 * CELL, 4 * CELL)


def test_large_samples_are_not_enlarged(tmp_path):
    path = tmp_path / "grid.png"
    draw_grid(path, torch.rand(2, 3, 64, 64), [0, 1], (0.0, 1.0))
    assert Image.open(path).size == (MARGIN + 66, 2 * 66)


def test_names_stand_on_the_left_in_the_room_that_they_need(tmp_path):
    path, samples = tmp_path / "grid.png", torch.zeros(3, 1, 8, 8)
    names = ["cat", "golden retriever"]
    widths, texts = [], []
    for given in ((), names, [names[0], names[1] * 9]):
        draw_grid(path, samples, [0, 1, -1], (0.0, 1.0), given)
        sheet = np.asarray(Image.open(path))
        widths.append(sheet.shape[1] - CELL)
        texts.append(
            [(sheet[y * CELL : (y + 1) * CELL, : widths[-1]] < 128).sum() for y in range(3)]
        )
    assert 44 <= widths[0] < 60 < widths[1] < widths[2] <= WIDEST + 17
    assert texts[0][0] == texts[1][0] == texts[2][0] > 0, "none, in the first row"
    assert texts[0][2] < texts[1][2] < texts[2][2]


def test_the_suffix_chooses_the_format(tmp_path):
    for suffix, kind in ((".jpg", "JPEG"), (".webp", "WEBP"), (".png", "PNG"), ("", "PNG")):
        file = tmp_path / f"grid{suffix}"
        draw_grid(file, torch.rand(2, 3, 8, 8), [0, 1], (0.0, 1.0))
        with Image.open(file) as image:
            assert image.format == kind


def test_data_show_on_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def fills(self, file, *_):
        Path(file).write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    source = tmp_path / "set"
    write_shards(source, torch.randn(4, 1, 8, 8), torch.arange(4) % 2, num_classes=2, source="a")
    monkeypatch.setattr(Image.Image, "save", fills)
    out = tmp_path / "out" / "x.png"
    message = f"^--out {out} cannot be written: No space left on device. "
    with pytest.raises(UserError, match=message):
        data_show.main(DataShowFlags(path=str(source), out=str(out)))
    assert not list(out.parent.iterdir())


def test_a_word_of_a_million_characters_is_cut_at_once():
    font, began = ImageFont.load_default(12), time.process_time()
    assert output.caption(0, ["x" * 2_000_000], font, most=3).endswith("...")
    assert output.shortened("y" * 2_000_000, font).endswith("...")
    assert time.process_time() - began < 1
