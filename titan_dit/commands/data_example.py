"""`python -m titan_dit data example NAME --out DIR`: pictures or clips as a user has his own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from titan_dit.commands.flags import DataExampleFlags
from titan_dit.config.section import UserError
from titan_dit.observe import console
from titan_dit.pictures import captioned_digits, moving_digits, output
from titan_dit.pictures.captioned_folder import CAPTION
from titan_dit.pictures.library import transformers
from titan_dit.pictures.output import METADATA
from titan_dit.ranks.disk_errors import writing
from titan_dit.system.files import new_path, write_whole
from titan_dit.system.progress import ProgressLine

SOURCE = Path(__file__).resolve().parents[2] / "examples"
SHEETS, OF_SHEETS = "pictures", ("pictures", "emoji_captioned")
"""Folder of the sheets of emoji, and the examples that are made of them."""
SKIN_TONE = "skin tone"
"""Part of the captions of emoji with one."""


def main(options: DataExampleFlags) -> None:
    """Write an example into a new folder; whole, or not at all."""
    out = Path(options.out)
    if options.name in OF_SHEETS and not (SOURCE / SHEETS).is_dir():
        raise UserError(
            f"data example {options.name}: the installed package is without these pictures. Clone "
            "the repository and run the command there."
        )
    if out.exists():
        raise UserError(f"--out {out} exists. Choose another folder, or delete it.")
    with writing(f"--out {out}"), new_path(out) as place:
        about = WRITERS[options.name](place)
    console.say(f"wrote {out}: {about}")


def write_pictures(place: Path) -> str:
    """A folder of PNG files for each class, and `metadata.jsonl`."""
    source = SOURCE / SHEETS
    lines = (source / output.SHEET_CAPTIONS).read_text().splitlines()
    with ProgressLine(len(lines), "pictures") as progress:
        for line, picture in output.read_sheet(source):
            file = place / line["file_name"]
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
            progress.add(1)
        write_whole(place / METADATA, "".join(f"{line}\n" for line in lines))
        notice = source / "NOTICE"
        shutil.copy(notice, place / notice.name)
    classes = {json.loads(line)["label"] for line in lines}
    return f"{len(lines):,} pictures of {len(classes)} classes, {METADATA}"


def write_captioned_emoji(place: Path) -> str:
    """A flat folder of PNG files with captions, without variants of a skin tone.

    The names of the variants differ in the tone alone.
    """
    source = SOURCE / SHEETS
    total = len((source / output.SHEET_CAPTIONS).read_text().splitlines())
    with ProgressLine(total, "pictures") as progress:
        for line, picture in output.read_sheet(source):
            progress.add(1)
            if SKIN_TONE in line["text"]:
                continue
            file = place / Path(line["file_name"]).name
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
            file.with_suffix(CAPTION).write_text(f"{line['text']}\n")
    notice = source / "NOTICE"
    shutil.copy(notice, place / notice.name)
    return f"{sum(1 for _ in place.glob('*.png')):,} pictures with captions"


def write_captioned_digits(place: Path) -> str:
    """See `pictures.captioned_digits`."""
    library = transformers("data example digits_captioned")
    total = captioned_digits.num_pictures()
    with ProgressLine(total, "pictures") as progress:
        captioned_digits.write(place, progress.add)
    captioned_digits.save_text_encoder(library, place / captioned_digits.ENCODER)
    return (
        f"{total:,} pictures with captions ({captioned_digits.PICTURES}), a text encoder "
        f"({captioned_digits.ENCODER}), {captioned_digits.PROMPTS}, {captioned_digits.HELD_OUT}"
    )


def write_moving_digits(place: Path) -> str:
    """See `pictures.moving_digits`."""
    library = transformers("data example digits_moving")
    total = moving_digits.num_clips()
    with ProgressLine(total, "clips") as progress:
        moving_digits.write(place, progress.add)
    encoder = place / moving_digits.ENCODER
    words, bias_std = moving_digits.WORDS, moving_digits.BIAS_STD
    captioned_digits.save_text_encoder(library, encoder, words, bias_std)
    return (
        f"{total:,} clips with captions ({moving_digits.CLIPS}), a text encoder "
        f"({encoder.name}), {moving_digits.ABOUT}, {captioned_digits.PROMPTS}, "
        f"{captioned_digits.HELD_OUT}"
    )


WRITERS = {
    "pictures": write_pictures,
    "emoji_captioned": write_captioned_emoji,
    "digits_captioned": write_captioned_digits,
    "digits_moving": write_moving_digits,
}
"""Name of an example -> the function that writes it."""
