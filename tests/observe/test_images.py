import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

from titan_dit.observe.images import SMOOTH, draw_curve, draw_grid, smooth, ticks, to_pixels

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
    assert to_pixels(torch.ones(1, 1, 2, 2), None).max() == 0  # nothing to stretch


def test_a_grid_shows_every_sample_in_the_row_of_its_label(tmp_path):
    # Each sample a shade of its own, labels in no order.
    labels = [2, 0, 2, 0, 2]
    shades = torch.linspace(0.1, 0.9, 5)
    samples = shades[:, None, None, None].expand(5, 1, 8, 8).clone()
    # Corners that tell up from down and left from right.
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
    # A label stands in front of each row.
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


def heights_of(path, colour):
    """Mean height of a colour on the left and on the right of a picture, and its pixels."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    rows, columns = np.nonzero((pixels == ImageColor.getrgb(colour)).all(-1))
    middle = pixels.shape[1] // 2
    left, right = rows[columns < middle - 200], rows[columns > middle + 200]
    return left.mean(), right.mean(), len(rows)


def test_a_falling_loss_is_drawn_as_a_falling_line(tmp_path):
    path = tmp_path / "loss.png"
    steps = list(range(10, 2010, 10))
    draw_curve(path, steps, [0.2 + math.exp(-s / 500) for s in steps], "a run")
    assert Image.open(path).size == (960, 540)
    left, right, count = heights_of(path, SMOOTH)
    assert count > 1000
    assert right > left + 50  # rows are counted from the top
    draw_curve(path, steps, [0.2 + s / 500 for s in steps], "a run")
    left, right, _ = heights_of(path, SMOOTH)
    assert right < left - 50


def test_a_curve_skips_what_is_not_finite_and_clips_the_first_values(tmp_path):
    path = tmp_path / "loss.png"
    steps = list(range(200))
    losses = [1e6, *[0.5 + 0.1 * (s % 2) for s in steps[1:]]]
    losses[50], losses[60] = math.nan, math.inf
    draw_curve(path, steps, losses, "a run")
    assert heights_of(path, SMOOTH)[2] > 1000


@pytest.mark.parametrize("losses", [[], [0.5], [math.nan, 0.5]])
def test_one_point_is_no_curve(tmp_path, losses):
    draw_curve(tmp_path / "loss.png", range(len(losses)), losses, "a run")
    assert not (tmp_path / "loss.png").exists()


def test_two_points_and_a_constant_loss_are_drawn(tmp_path):
    for losses in ([0.5, 0.4], [0.5, 0.5], [0.25] * 100):
        path = tmp_path / f"{len(losses)}-{losses[1]}.png"
        draw_curve(path, range(len(losses)), losses, "a run")
        assert heights_of(path, SMOOTH)[2] > 100


def test_the_running_mean_is_not_pulled_to_zero_at_its_start():
    assert smooth([2.0] * 5, 0.95) == pytest.approx([2] * 5)
    values = [1.0, 3.0, 2.0, 5.0]
    for n, got in enumerate(smooth(values, 0.9), start=1):
        weights = [0.9 ** (n - 1 - i) for i in range(n)]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 3000), (0.1, 1.23), (0.4999, 0.5001), (1, 2), (7, 7.9), (50, 1_000_000)]
)
def test_ticks_are_few_round_and_inside(low, high):
    got = ticks(low, high)
    assert 4 <= len(got) <= 11
    assert low - 1e-9 <= got[0] < got[-1] <= high + 1e-9
    gap = got[1] - got[0]
    mantissa = gap / 10 ** math.floor(math.log10(gap) + 1e-9)
    assert min(abs(mantissa - part) for part in (1, 2, 5)) < 1e-6


@pytest.mark.parametrize("losses", [[0.0, 0.0], [0.0, 1.0], [0.0] * 50 + [1.0], [-1.0, -2.0]])
def test_a_curve_of_any_losses_is_drawn(tmp_path, losses):
    draw_curve(tmp_path / "loss.png", list(range(len(losses))), losses, "odd")
    assert (tmp_path / "loss.png").is_file()
