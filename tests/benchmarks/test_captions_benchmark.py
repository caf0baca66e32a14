"""benchmarks/captions.py recognises digits and colours from the pictures alone."""

import sys

import pytest
import torch
from commands import ROOT

pytest.importorskip("sklearn")
sys.path.insert(0, str(ROOT / "benchmarks"))
import captions as benchmark

from titan_dit.pictures.captioned_digits import SIZES, captions, paint, strokes

EVERY = 7
"""Every so many of the handwritten digits is drawn."""


@pytest.fixture(scope="module", params=SIZES, ids=str)
def drawn(request):
    """Real digits in colours of both kinds, and their captions."""
    found = []
    by_digit = {held: [[] for _ in range(10)] for held in (False, True)}
    for held, lists in by_digit.items():
        for caption in captions(held):
            lists[caption.digit].append(caption)
    for number, (ink, digit) in enumerate(zip(*strokes(), strict=True)):
        if number % EVERY == 0:
            of_digit = by_digit[number % 2 == 0][digit]
            caption = of_digit[number % len(of_digit)]
            found.append((paint(ink, caption, request.param), str(caption)))
    pixels, texts = zip(*found, strict=True)
    return torch.stack(pixels).float(), texts


def test_real_digits_show_what_their_captions_say(drawn):
    for figures in benchmark.score(*drawn):
        # Of 1,797 digits the nearest neighbours see 12 as another one.
        assert figures.digit > 0.98
        assert figures.colours == 1


def test_noise_of_a_drawing_changes_no_colour(drawn):
    samples, texts = drawn
    noise = torch.randn(samples.shape, generator=torch.Generator().manual_seed(0))
    for figures in benchmark.score((samples + 20 * noise).clamp(0, 255), texts):
        assert figures.colours > 0.97
        assert figures.digit > 0.9


def test_captions_of_other_pictures_score_low(drawn):
    samples, texts = drawn
    for figures in benchmark.score(samples, texts[1:] + texts[:1]):
        assert figures.digit < 0.25
        assert figures.colours < 0.15


def test_exchanged_colours_are_a_wrong_pair_of_a_right_digit():
    ink, digits = strokes()
    asked = [captions(held_out=False)[27 * digit] for digit in digits[:100]]
    turned = [c._replace(colour=c.background, background=c.colour) for c in asked]
    drawn = torch.stack([paint(*pair, SIZES[0]) for pair in zip(ink[:100], turned, strict=True)])
    figures, _ = benchmark.score(drawn, list(map(str, asked)))
    assert figures.digit > 0.95
    assert figures.colours == 0


def test_seen_and_held_out_captions_are_drawn_as_often_as_it_says():
    texts = benchmark.prompts()
    held_out = {str(caption) for caption in captions(held_out=True)}
    assert (len(texts), sum(text in held_out for text in texts)) == (540 + 300, 300)
    seen, absent = benchmark.score(torch.zeros(1, 3, 8, 8), texts[:1])
    assert absent is None
    assert 0 <= seen.digit <= 1
