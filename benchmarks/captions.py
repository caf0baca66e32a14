"""Do drawn digits show what their captions say? `python benchmarks/captions.py --run RUN`.

Draws the captions of `data example digits_captioned` from the EMA weights, at guidance 2 in 25
steps: each of the 270 seen ones twice, each of the 30 held-out ones ten times. Two metrics of both,
read from the pictures alone: the share whose digit, by a 3-nearest-neighbour classifier fitted on
all real digits, is that of the caption, and the share whose two colours are. `--sizes 8x8 8x12`
draws on several canvases.
"""

from __future__ import annotations

import argparse
import itertools
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

from titan_dit.pictures.captioned_digits import COLOURS, SIDE, Caption, captions, strokes

TIMES = {False: 2, True: 10}
"""Pictures of each caption: of seen ones, of held-out ones."""
CFG_SCALE, SAMPLER_STEPS, SEED = 2.0, 25, 0
PAIRS = tuple(itertools.combinations(COLOURS, 2))


class Seen(NamedTuple):
    """What pictures show."""

    digits: list[int]
    colours: list[tuple[str, str]]
    """(colour of the digit, background)."""


class Figures(NamedTuple):
    """Share of pictures that show what their captions say."""

    digit: float
    colours: float


def prompts() -> list[str]:
    """The captions to draw."""
    return [
        str(caption)
        for held_out, times in TIMES.items()
        for caption in captions(held_out)
        for _ in range(times)
    ]


def recognise(samples: Float[Tensor, "n 3 h w"]) -> Seen:
    """Digit and colours of pictures with values from 0 to 255."""
    ends = torch.tensor([[COLOURS[name] for name in pair] for pair in PAIRS]).float()
    start, line = ends[:, 0], ends[:, 1] - ends[:, 0]
    pixels = samples.float().flatten(2).transpose(1, 2)[:, None]
    # The nearest mixture of each pair's two colours; the pair that explains the picture best.
    along = (pixels - start[:, None]) @ line[..., None] / line.square().sum(-1)[:, None, None]
    along = along.clamp(0, 1)
    mixed = start[:, None] + along * line[:, None]
    best = (pixels - mixed).square().sum((2, 3)).argmin(1)
    ink = along[torch.arange(len(samples)), best, :, 0].unflatten(1, samples.shape[2:])
    # No digit reaches far into the first and last column.
    inverted = ink[..., [0, -1]].mean((1, 2)) > 0.5
    ink = torch.where(inverted[:, None, None], 1 - ink, ink)
    colours = [
        PAIRS[pair] if turned else PAIRS[pair][::-1]
        for pair, turned in zip(best.tolist(), inverted.tolist(), strict=True)
    ]
    top, left = ((side - SIDE) // 2 for side in samples.shape[2:])
    middle = ink[:, top : top + SIDE, left : left + SIDE]
    real, labels = strokes()
    classifier = KNeighborsClassifier(3).fit(real.flatten(1).numpy(), labels)
    return Seen(classifier.predict(middle.flatten(1).numpy()).tolist(), colours)


def score(
    samples: Float[Tensor, "n 3 h w"], texts: Sequence[str]
) -> tuple[Figures | None, Figures | None]:
    """The figures of seen and of held-out captions; None if there are none."""
    by_text = {str(c): (c, held) for held in (False, True) for c in captions(held)}
    digits, colours = recognise(samples)
    right: dict[bool, list[tuple[bool, bool]]] = {False: [], True: []}
    for text, digit, pair in zip(texts, digits, colours, strict=True):
        caption, is_held_out = by_text[text]
        right[is_held_out].append(judged(caption, digit, pair))
    seen, held_out = (
        Figures(*(sum(each) / len(of_kind) for each in zip(*of_kind, strict=True)))
        if of_kind
        else None
        for of_kind in right.values()
    )
    return seen, held_out


def judged(caption: Caption, digit: int, pair: tuple[str, str]) -> tuple[bool, bool]:
    """Whether the digit is the caption's, and both colours are."""
    return digit == caption.digit, pair == (caption.colour, caption.background)


def draw(run: str, size: str, step: int | None, folder: Path) -> Float[Tensor, "n 3 h w"]:
    """Pictures of `prompts`, in their order."""
    listed, out = folder / "prompts.txt", folder / f"{size}.safetensors"
    listed.write_text("".join(f"{text}\n" for text in prompts()))
    command = [sys.executable, "-m", "titan_dit", "sample", "--run", run, "--out", out]
    command += ["--prompts", listed, "--size", size, "--seed", SEED]
    command += ["--cfg-scale", CFG_SCALE, "--steps", SAMPLER_STEPS]
    command += [] if step is None else ["--step", step]
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)
    return load_file(out)["samples"]


def main() -> None:
    """Draw, score, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--sizes", nargs="+", default=["8x8"])
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            samples = draw(options.run, size, options.step, Path(folder))
            kinds = zip(("seen", "held out"), score(samples, prompts()), strict=True)
            rows.append(
                {"canvas": size}
                | {
                    f"{kind}: {name}": f"{value:.3f}"
                    for kind, found in kinds
                    if found is not None
                    for name, value in found._asdict().items()
                }
            )
    finish("captions", rows, options.out)


if __name__ == "__main__":
    main()
