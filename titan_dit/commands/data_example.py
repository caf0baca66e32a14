"""`python -m titan_dit data example NAME --out DIR`: example pictures as a user has his own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from titan_dit.commands.flags import DataExampleFlags
from titan_dit.config.section import UserError
from titan_dit.observe import console
from titan_dit.pictures import captioned_digits, output
from titan_dit.pictures.library import transformers
from titan_dit.pictures.output import METADATA
from titan_dit.ranks.disk_errors import writing
from titan_dit.system.files import new_path, write_whole
from titan_dit.system.progress import ProgressLine

SOURCE = Path(__file__).resolve().parents[2] / "examples"


def main(options: DataExampleFlags) -> None:
    """Write an example into a new folder; whole, or not at all."""
    out = Path(options.out)
    if options.name == "pictures" and not (SOURCE / options.name).is_dir():
        raise UserError(
            f"data example {options.name}: the installed package is without these pictures. Clone "
            "the repository and run the command there."
        )
    if out.exists():
        raise UserError(f"--out {out} exists. Choose another folder, or delete it.")
    write = write_pictures if options.name == "pictures" else write_captioned_digits
    with writing(f"--out {out}"), new_path(out) as place:
        about = write(place)
    console.say(f"wrote {out}: {about}")


def write_pictures(place: Path) -> str:
    """A folder of PNG files for each class, and `metadata.jsonl`."""
    source = SOURCE / "pictures"
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
