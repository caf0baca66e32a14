"""The digits of `[data] name = "digits"` in two colours each, with captions: "a red seven on blue".

Every handwritten digit is drawn once on each canvas. Three ordered pairs of colours of each digit
are held out: no picture has them, so a network that draws them has understood the caption's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from titan_dit.data.sections import Digits
from titan_dit.pictures.picture_sizes import Size
from titan_dit.pictures.text_encoder import INSIDE

PICTURES, ENCODER = "pictures", INSIDE
"""Folders of the example."""
PROMPTS, HELD_OUT = "prompts.txt", "held_out.txt"
"""Files of all captions, one per line: those that pictures may have, and those held out."""
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {
    "red": (255, 26, 26),
    "green": (26, 230, 26),
    "blue": (38, 64, 255),
    "yellow": (255, 242, 26),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
}
SIZES = (Size(8, 8), Size(8, 12), Size(12, 8))
SIDE = 8
"""Pixels of a digit's side. It is in the middle of a canvas."""
NUM_HELD_OUT = 3
"""Pairs of colours of each digit that are held out."""
SEED = 0
WORDS = ("a", *COLOURS, *DIGITS, "on")
"""The words of captions."""
SPECIAL = ("<pad>", "</s>", "<unk>")
WIDTH = 64
"""Elements of a token's embedding."""


class Caption(NamedTuple):
    """A digit and its colours, which a picture shows."""

    digit: int
    colour: str
    """Colour of the digit."""
    background: str

    def __str__(self) -> str:
        """The words."""
        return f"a {self.colour} {DIGITS[self.digit]} on {self.background}"


@cache
def pairs(held_out: bool) -> tuple[tuple[tuple[str, str], ...], ...]:
    """By digit: its held-out (colour, background) pairs, else the pairs that pictures may have."""
    every = [(one, other) for one in COLOURS for other in COLOURS if one != other]
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for _ in DIGITS:
        order = torch.randperm(len(every), generator=generator).tolist()
        kept = order[:NUM_HELD_OUT] if held_out else order[NUM_HELD_OUT:]
        found.append(tuple(every[i] for i in sorted(kept)))
    return tuple(found)


def captions(held_out: bool) -> list[Caption]:
    """The held-out captions, else the captions that pictures may have, digit by digit."""
    return [
        Caption(digit, *pair) for digit, of_digit in enumerate(pairs(held_out)) for pair in of_digit
    ]


def strokes() -> tuple[Float[Tensor, "n h w"], list[int]]:
    """Ink of every handwritten digit, 0 to 1, and its class."""
    source = Digits().open()
    found = source.read(range(len(source)))
    return (found["latent"][:, 0].float() + 1) / 2, found["label"].tolist()


def paint(ink: Float[Tensor, "h w"], caption: Caption, size: Size) -> UInt8[Tensor, "3 p q"]:
    """A digit in its colour, in the middle of a canvas of the background's."""
    canvas = torch.zeros(size.height, size.width)
    top, left = (size.height - SIDE) // 2, (size.width - SIDE) // 2
    canvas[top : top + SIDE, left : left + SIDE] = ink
    colour, background = (
        torch.tensor(COLOURS[name], dtype=torch.float32)[:, None, None]
        for name in (caption.colour, caption.background)
    )
    return torch.lerp(background, colour, canvas).round().byte()


def pictures() -> Iterator[tuple[str, Caption, UInt8[Tensor, "3 h w"]]]:
    """Yield (name, caption, pixels) of every picture; its colours are drawn by SEED."""
    generator = torch.Generator().manual_seed(SEED)
    allowed = pairs(held_out=False)
    for number, (ink, digit) in enumerate(zip(*strokes(), strict=True)):
        for size in SIZES:
            of_digit = allowed[digit]
            drawn = int(torch.randint(len(of_digit), (), generator=generator))
            caption = Caption(digit, *of_digit[drawn])
            yield f"{number:04d}-{size}", caption, paint(ink, caption, size)


def num_pictures() -> int:
    """Pictures of the example."""
    return len(SIZES) * len(Digits().open())


def write(folder: Path, report: Callable[[int], None]) -> None:
    """Write the pictures, a caption beside each, and the lists of captions. Raises OSError.

    `report` gets increments of pictures.
    """
    (folder / PICTURES).mkdir(parents=True)
    for name, caption, pixels in pictures():
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        image.save(folder / PICTURES / f"{name}.png")
        (folder / PICTURES / f"{name}.txt").write_text(f"{caption}\n")
        report(1)
    for file, held_out in ((PROMPTS, False), (HELD_OUT, True)):
        (folder / file).write_text("".join(f"{caption}\n" for caption in captions(held_out)))


def save_text_encoder(
    library: Any, folder: Path, words: Sequence[str] = WORDS, bias_std: float | None = None
) -> None:
    """Write a T5 encoder of random weights, and a tokenizer whose tokens are the captions' words.

    Random weights tell words and their places apart, which is all that a network needs here.
    `bias_std`: of attention's biases by distance; None: T5's 0.125, by which a word in two places
    differs by a thirtieth of what two words differ. That is too little for a network that gives
    tokens of text no places of its own.
    """
    import tokenizers

    ids = {word: number for number, word in enumerate([*SPECIAL, *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", ids["</s>"])]
    )
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    config = library.T5Config(
        vocab_size=len(ids),
        d_model=WIDTH,
        d_kv=16,
        num_heads=4,
        d_ff=2 * WIDTH,
        num_layers=2,
        feed_forward_proj="gated-gelu",
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        encoder = library.T5EncoderModel(config)
        if bias_std is not None:
            attention = encoder.encoder.block[0].layer[0].SelfAttention
            torch.nn.init.normal_(attention.relative_attention_bias.weight, std=bias_std)
        encoder.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
