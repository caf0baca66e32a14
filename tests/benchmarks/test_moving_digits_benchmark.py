"""benchmarks/moving_digits.py recognises digits and directions from the pixels alone."""

import sys

import numpy as np
import pytest
import torch
from commands import ROOT

pytest.importorskip("sklearn")
sys.path.insert(0, str(ROOT / "benchmarks"))
import moving_digits as benchmark

from titan_dit.pictures.captioned_digits import strokes
from titan_dit.pictures.moving_digits import moved


@pytest.fixture(scope="module")
def wanted():
    """Captions that are seen, and some that are held out."""
    return benchmark.drawn_captions()[::8]


@pytest.fixture(scope="module")
def drawn(wanted):
    """Clips of real digits, with values from 0 to 255."""
    inks, labels = strokes()
    rows = [[row for row, found in enumerate(labels) if found == digit] for digit in range(10)]
    clips = []
    for number, (caption, _) in enumerate(wanted):
        white, black = (moved(inks[rows[of.digit][number]], of.direction) for of in caption)
        clips.append(torch.cat((white, 1 - black), 2))
    return 255 * torch.stack(clips)[:, None].expand(-1, 3, -1, -1, -1)


def test_real_digits_show_what_their_captions_say(drawn, wanted):
    found = benchmark.score(drawn, wanted)
    assert found.keys() == {False, True}
    for figures in found.values():
        assert figures.digit >= 0.9
        assert figures.direction == 1


def test_frames_in_reverse_order_show_no_direction(drawn, wanted):
    for figures in benchmark.score(drawn.flip(2), wanted).values():
        assert figures.digit >= 0.9
        assert figures.direction == 0


def test_the_halves_may_be_in_either_order(drawn, wanted):
    assert benchmark.score(drawn.roll(12, 4), wanted) == benchmark.score(drawn, wanted)


def test_the_direction_of_the_other_digit_is_wrong(drawn, wanted):
    """Only clips of two directions tell them apart."""
    kept = [
        number
        for number, (caption, _) in enumerate(wanted)
        if caption.first.direction != caption.second.direction
    ]
    swapped = [
        (
            benchmark.Caption(
                caption.first._replace(direction=caption.second.direction),
                caption.second._replace(direction=caption.first.direction),
            ),
            is_held_out,
        )
        for caption, is_held_out in (wanted[number] for number in kept)
    ]
    for figures in benchmark.score(drawn[kept], swapped).values():
        assert figures.digit >= 0.9
        assert figures.direction == 0


def test_a_clip_with_one_digit_twice_is_half_right(drawn, wanted):
    """Of two white halves the brighter one is read as black: its digit is lost."""
    twice = torch.cat((drawn[..., :12], drawn[..., :12]), 4)
    for figures in benchmark.score(twice, wanted).values():
        assert 0.4 < figures.digit < 0.7


def test_noise_scores_as_chance_does(wanted):
    rng = torch.Generator().manual_seed(0)
    noise = 255 * torch.rand(len(wanted), 3, 9, 12, 24, generator=rng)
    for figures in benchmark.score(noise, wanted).values():
        assert np.array(figures).max() < 0.6


def test_seen_and_held_out_captions_are_drawn_as_often_as_it_says():
    drawn = benchmark.drawn_captions()
    assert len(drawn) == len({str(caption) for caption, _ in drawn}) == 320
    assert sum(is_held_out for _, is_held_out in drawn) == 160
