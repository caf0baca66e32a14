"""`python -m titan_dit data example pictures --out DIR`: example pictures as a user has his own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from titan_dit.commands.flags.data_example import Options
from titan_dit.config.section import UserError
from titan_dit.observe import console
from titan_dit.pictures import sheets
from titan_dit.pictures.output import METADATA
from titan_dit.system.files import PARTIAL
from titan_dit.system.progress import ProgressLine

SOURCE = Path(__file__).resolve().parents[2] / "examples"


def main(options: Options) -> None:
    """Write a folder of PNG files for each class, and `metadata.jsonl`; whole, or not at all."""
    source, out = SOURCE / options.name, Path(options.out)
    if not source.is_dir():
        raise UserError(
            f"data example {options.name}: the installed package is without these pictures. Clone "
            "the repository and run the command there."
        )
    if out.exists():
        raise UserError(f"--out {out} exists. Choose another folder, or delete it.")
    aside = out.with_name(f"{out.name}{PARTIAL}")
    lines = (source / sheets.CAPTIONS).read_text().splitlines()
    progress = ProgressLine(len(lines), "pictures")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        for line, picture in sheets.read(source):
            file = aside / line["file_name"]
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
            progress.add(1)
        (aside / METADATA).write_text("".join(f"{line}\n" for line in lines))
        notice = source / "NOTICE"
        shutil.copy(notice, aside / notice.name)
        aside.rename(out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}.") from None
    progress.end()
    classes = {json.loads(line)["label"] for line in lines}
    console.say(f"wrote {out}: {len(lines):,} pictures of {len(classes)} classes, {METADATA}")
