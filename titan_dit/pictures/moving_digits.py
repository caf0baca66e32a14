"""Clips of two handwritten digits that drift: "a white seven moves left and a black two moves up".

One is in the left half and one in the right half, in either order: the caption does not say it.
The first is white on black, the second black on white. Each moves straight through the middle of
its half, which it reaches in the middle frame. Some captions are held out: no clip has them.

The two inks are there because Wan's network knows only how far apart two tokens are, and gives
words no places: of two white digits each half drew either one, so half of the clips had one twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from titan_dit.pictures.captioned_digits import DIGITS, HELD_OUT, PROMPTS, SEED, SIDE, strokes
from titan_dit.pictures.output import save_clip
from titan_dit.pictures.text_encoder import INSIDE

CLIPS, ENCODER = "clips", INSIDE
"""Folders of the example."""
ABOUT = "clips.jsonl"
"""File with a line for each clip: its digits, their rows of `[data] name = "digits"`, their
directions, and which of the two is in the left half (0 or 1)."""
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Word -> signs of the motion along x and y."""
FRAMES, FPS = 9, 16
TRAVEL = 4
"""Pixels from the first frame to the last."""
CELL = SIDE + TRAVEL
"""Side of a half."""
CLIPS_PER_DIGIT = 3
"""Clips in which each handwritten digit is the first one."""
NUM_HELD_OUT = 160
"""Captions that are held out, of 1,600."""
INKS = ("white", "black")
"""Colours of the first and second digit; each is drawn on a background of the other colour."""
WORDS = ("a", *INKS, *DIGITS, "moves", *DIRECTIONS, "and")
BIAS_STD = 3.0
"""See `captioned_digits.save_text_encoder`: Wan's network gives a caption no places."""


class Motion(NamedTuple):
    """A digit and where it goes."""

    digit: int
    direction: str

    def phrase(self, ink: str) -> str:
        """The words."""
        return f"a {ink} {DIGITS[self.digit]} moves {self.direction}"


class Caption(NamedTuple):
    """The digits and directions of a clip's halves."""

    first: Motion
    second: Motion

    def __str__(self) -> str:
        """The words."""
        return " and ".join(motion.phrase(ink) for motion, ink in zip(self, INKS, strict=True))


@cache
def captions(held_out: bool) -> tuple[Caption, ...]:
    """The held-out captions, else the captions that clips may have."""
    motions = [Motion(*of) for of in product(range(len(DIGITS)), DIRECTIONS)]
    every = [Caption(*of) for of in product(motions, motions)]
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(every), generator=generator).tolist()
    chosen = order[:NUM_HELD_OUT] if held_out else order[NUM_HELD_OUT:]
    return tuple(every[number] for number in sorted(chosen))


def moved(ink: Float[Tensor, "8 8"], direction: str) -> Float[Tensor, "f cell cell"]:
    """A digit on its way through a cell; between pixels it is interpolated."""
    canvas = functional.pad(ink, (TRAVEL // 2,) * 4)
    x, y = DIRECTIONS[direction]
    frames = []
    for number in range(FRAMES):
        way = TRAVEL * (number / (FRAMES - 1) - 0.5)
        low = int(way // 1)
        begin, end = (torch.roll(canvas, (y * by, x * by), (0, 1)) for by in (low, low + 1))
        frames.append(torch.lerp(begin, end, way - low))
    return torch.stack(frames)


class Clip(NamedTuple):
    """A clip of the example."""

    name: str
    caption: Caption
    rows: tuple[int, int]
    """Rows of the caption's digits."""
    left: int
    """Which of the caption's two motions is in the left half: 0 or 1."""
    frames: UInt8[Tensor, "f 3 h w"]


def clips() -> Iterator[Clip]:
    """Yield every clip, drawn by SEED."""
    inks, digits = strokes()
    of_digit = [[row for row, found in enumerate(digits) if found == digit] for digit in range(10)]
    allowed = {digit: [c for c in captions(False) if c.first.digit == digit] for digit in range(10)}
    generator = torch.Generator().manual_seed(SEED)

    def drawn(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    for row, digit in enumerate(digits):
        for number in range(CLIPS_PER_DIGIT):
            caption = allowed[digit][drawn(len(allowed[digit]))]
            others = of_digit[caption.second.digit]
            rows = row, others[drawn(len(others))]
            white, black = (
                moved(inks[at], of.direction) for at, of in zip(rows, caption, strict=True)
            )
            left = drawn(2)
            halves = (1 - black, white) if left else (white, 1 - black)
            grey = (torch.cat(halves, 2) * 255).round().byte()
            frames = grey[:, None].expand(-1, 3, -1, -1)
            yield Clip(f"{row:04d}-{number}", caption, rows, left, frames)


def num_clips() -> int:
    """Clips of the example."""
    return CLIPS_PER_DIGIT * len(strokes()[1])


def write(folder: Path, report: Callable[[int], None]) -> None:
    """Write the clips, a caption beside each, clips.jsonl and the lists of captions.

    `report` gets increments of clips. Raises OSError, and UserError without PyAV.
    """
    (folder / CLIPS).mkdir(parents=True)
    lines = []
    for name, caption, rows, left, frames in clips():
        save_clip(folder / CLIPS / f"{name}.mp4", frames, FPS)
        (folder / CLIPS / f"{name}.txt").write_text(f"{caption}\n")
        about = {
            "file_name": f"{name}.mp4",
            "digits": [of.digit for of in caption],
            "rows": rows,
            "directions": [of.direction for of in caption],
            "left": left,
        }
        lines.append(json.dumps(about) + "\n")
        report(1)
    (folder / ABOUT).write_text("".join(lines))
    for file, held_out in ((PROMPTS, False), (HELD_OUT, True)):
        (folder / file).write_text("".join(f"{caption}\n" for caption in captions(held_out)))
