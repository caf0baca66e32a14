"""`python -m titan_dit data example pictures --out DIR`: example pictures as a user has his own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from titan_dit.commands.flags import DataExampleFlags
from titan_dit.config.section import UserError
from titan_dit.observe import console
from titan_dit.pictures import output
from titan_dit.pictures.output import METADATA
from titan_dit.ranks.disk_errors import writing
from titan_dit.system.files import new_path, write_whole
from titan_dit.system.progress import ProgressLine

SOURCE = Path(__file__).resolve().parents[2] / "examples"


def main(options: DataExampleFlags) -> None:
    """Write a folder of PNG files for each class, and `metadata.jsonl`; whole, or not at all."""
    source, out = SOURCE / options.name, Path(options.out)
    if not source.is_dir():
        raise UserError(
            f"data example {options.name}: the installed package is without these pictures. Clone "
            "the repository and run the command there."
        )
    if out.exists():
        raise UserError(f"--out {out} exists. Choose another folder, or delete it.")
    lines = (source / output.SHEET_CAPTIONS).read_text().splitlines()
    with (
        writing(f"--out {out}"),
        new_path(out) as place,
        ProgressLine(len(lines), "pictures") as progress,
    ):
        for line, picture in output.read_sheet(source):
            file = place / line["file_name"]
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
            progress.add(1)
        write_whole(place / METADATA, "".join(f"{line}\n" for line in lines))
        notice = source / "NOTICE"
        shutil.copy(notice, place / notice.name)
    classes = {json.loads(line)["label"] for line in lines}
    console.say(f"wrote {out}: {len(lines):,} pictures of {len(classes)} classes, {METADATA}")
