import math

import numpy as np
import pytest
from PIL import Image, ImageColor

from titan_dit.observe.curve import SMOOTH, draw_curve, smooth, ticks


def heights_of(path, colour):
    """(mean height of a colour in the left half, in the right half, number of its pixels)."""
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
