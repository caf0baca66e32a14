"""Do drawn clips show what their captions say? `python benchmarks/moving_digits.py --run RUN`.

Draws captions of `data example digits_moving` from the EMA weights, at guidance 2 in 25 steps:
every ninth of those that clips have, and all of those held out. Two metrics of both, read from the
pixels alone: the share of digits that are the caption's, by a 3-nearest-neighbour classifier of the
middle frame, fitted on all real digits; and the share of motions whose direction is, by the way of
the ink's centre from the first frame to the last. The half with the darker ground has the caption's
first digit; where no half is dark, or none is bright, one of the two is read as noise is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from report import finish
from safetensors.torch import load_file
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from titan_dit.pictures.captioned_digits import SIDE, strokes
from titan_dit.pictures.moving_digits import CELL, DIRECTIONS, TRAVEL, Caption, Motion, captions

EVERY = 9
"""One of so many captions that clips have is drawn."""
CFG_SCALE, SAMPLER_STEPS, SEED = 2.0, 25, 0
FAINT = 0.2
"""Ink below it does not move the centre."""


class Figures(NamedTuple):
    """Share of digits, and of motions, that are those of their captions."""

    digit: float
    direction: float


def drawn_captions() -> list[tuple[Caption, bool]]:
    """(caption, whether it was held out) of each clip to draw."""
    seen = captions(held_out=False)[::EVERY]
    return [(c, False) for c in seen] + [(c, True) for c in captions(held_out=True)]


def recognise(samples: Float[Tensor, "n 3 f h w"]) -> list[tuple[Motion, Motion]]:
    """The motions of the white and of the black digit, of clips with values from 0 to 255."""
    grey = samples.float().mean(1) / 255
    left, right = grey.split(CELL, dim=3)
    is_left_white = (left.mean((1, 2, 3)) < right.mean((1, 2, 3))).view(-1, 1, 1, 1)
    white = torch.where(is_left_white, left, right)
    black = 1 - torch.where(is_left_white, right, left)
    halves = torch.stack((white, black), 1).flatten(0, 1)
    middle = halves[:, halves.shape[1] // 2]
    edge = TRAVEL // 2
    cut = middle[:, edge : edge + SIDE, edge : edge + SIDE].flatten(1)
    real, labels = strokes()
    digits = KNeighborsClassifier(3).fit(real.flatten(1).numpy(), labels).predict(cut.numpy())
    way = centre(halves[:, -1]) - centre(halves[:, 0])
    aims = torch.tensor(list(DIRECTIONS.values())).float()
    directions = (way @ aims.T).argmax(1)
    words = list(DIRECTIONS)
    found = [Motion(int(digit), words[at]) for digit, at in zip(digits, directions, strict=True)]
    return list(zip(found[::2], found[1::2], strict=True))


def centre(ink: Float[Tensor, "n h w"]) -> Float[Tensor, "n 2"]:
    """(x, y) of the centre of the ink."""
    weight = torch.where(ink > FAINT, ink, 0)
    weight = weight / weight.sum((1, 2), keepdim=True).clamp(min=1e-6)
    places = torch.arange(CELL).float()
    return torch.stack([(weight.sum(1) * places).sum(1), (weight.sum(2) * places).sum(1)], 1)


def score(
    samples: Float[Tensor, "n 3 f h w"], wanted: Sequence[tuple[Caption, bool]]
) -> dict[bool, Figures]:
    """The figures of seen captions, by False, and of held-out ones, by True."""
    right: dict[bool, list[tuple[bool, bool]]] = {False: [], True: []}
    for found, (caption, is_held_out) in zip(recognise(samples), wanted, strict=True):
        right[is_held_out] += [
            (f.digit == asked.digit, f.direction == asked.direction)
            for f, asked in zip(found, caption, strict=True)
        ]
    return {
        kind: Figures(*(sum(each) / len(of_kind) for each in zip(*of_kind, strict=True)))
        for kind, of_kind in right.items()
        if of_kind
    }


def draw(run: str, step: int | None, folder: Path) -> Float[Tensor, "n 3 f h w"]:
    """Clips of `drawn_captions`, in their order."""
    listed, out = folder / "prompts.txt", folder / "clips.safetensors"
    listed.write_text("".join(f"{caption}\n" for caption, _ in drawn_captions()))
    command = [sys.executable, "-m", "titan_dit", "sample", "--run", run, "--out", out]
    command += ["--prompts", listed, "--seed", SEED]
    command += ["--cfg-scale", CFG_SCALE, "--steps", SAMPLER_STEPS]
    command += [] if step is None else ["--step", step]
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)
    return load_file(out)["samples"]


def main() -> None:
    """Draw, score, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = draw(options.run, options.step, Path(folder))
    rows = [
        {"captions": "held out" if is_held_out else "seen"}
        | {name: f"{value:.3f}" for name, value in figures._asdict().items()}
        for is_held_out, figures in score(samples, drawn_captions()).items()
    ]
    finish("moving digits", rows, options.out)


if __name__ == "__main__":
    main()
