"""Sizes and clips of videos, kept in the output of `data encode`: to look at one is to decode it.

A line of JSON for each video, by its name, length, time of modification and the options. Ranks
append to files of their own, so that a command that is killed goes on; the first one joins them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

from titan_dit.config import schema, user_text
from titan_dit.config.schema import COUNT, Many, Maybe, Row, Rows
from titan_dit.config.section import Finite, PositiveInt, UserError
from titan_dit.data.manifest import CLAIM, MANIFEST
from titan_dit.data.packing.output import LOOKS, writing
from titan_dit.pictures.clips import Clip
from titan_dit.pictures.picture_sizes import Size
from titan_dit.pictures.survey import FoundClips, Stamp
from titan_dit.system.files import write_whole

Look: TypeAlias = tuple[Size, FoundClips] | str
"""The size of a video and its clips, or why it has none."""
PARTS = f"{Path(LOOKS).stem}-*.jsonl"
SCHEMA = {
    "options": str,
    "file_name": str,
    "stamp": Row((COUNT, int)),
    "reason": Maybe(str),
    "size": Maybe(Row((PositiveInt, PositiveInt))),
    "clips": Maybe(Rows((int, COUNT, PositiveInt, int, bool))),
    "starts": Maybe(Many(Finite)),
    "decoded": Maybe(PositiveInt),
    "used": Maybe(PositiveInt),
    "notes": Maybe(Many(str)),
}
"""Schema of a line: `reason`, or all of the keys behind it."""


@dataclass(frozen=True)
class KeptLooks:
    """The videos of an output that were looked at with the same options."""

    folder: Path
    options: str
    """Key of the options that looks depend on: `ClipOptions.key`."""
    rank: int = 0
    lines: dict[tuple[str, Stamp], dict[str, Any]] = field(default_factory=dict)
    """By name, length and time of modification."""
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def opened(cls, folder: Path, root: Path, options: str, rank: int = 0) -> KeptLooks | None:
        """The looks kept in an output folder.

        None if `data encode` will refuse the folder (inside the input, or with other files);
        nothing is written then.
        """
        if root.resolve() in (folder.resolve(), *folder.resolve().parents):
            return None
        is_own = any((folder / name).is_file() for name in (CLAIM, MANIFEST, LOOKS))
        if folder.exists() and not is_own:
            is_new = folder.is_dir() and all(file.match(PARTS) for file in folder.iterdir())
            if not is_new:
                return None
        found = cls(folder, options, rank)
        found.read()
        return found

    def read(self) -> None:
        """Read all lines of the folder. One that is damaged, or of other options, is left out."""
        for file in (self.folder / LOOKS, *sorted(self.folder.glob(PARTS))):
            if not file.is_file():
                continue
            for text in file.read_bytes().split(b"\n"):
                with suppress(UserError, user_text.BadTextError):
                    line = user_text.parse_json(user_text.decode(text), unique=True)
                    schema.check(line, SCHEMA, LOOKS)
                    if line["options"] == self.options:
                        self.lines[line["file_name"], tuple(line["stamp"])] = line

    def get(self, name: str, stamp: Stamp) -> Look | None:
        """What was found in a file; None if not recorded for this name, stamp and options."""
        line = self.lines.get((name, stamp))
        if line is None:
            return None
        if "reason" in line:
            return str(line["reason"])
        cut = tuple(Clip(*clip) for clip in line["clips"])
        starts, notes = tuple(line["starts"]), tuple(line["notes"])
        return Size(*line["size"]), FoundClips(cut, starts, line["decoded"], line["used"], notes)

    def add(self, name: str, stamp: Stamp, look: Look) -> None:
        """Keep what was found in a file. Raises OSError."""
        line: dict[str, Any] = {"options": self.options, "file_name": name, "stamp": stamp}
        if isinstance(look, str):
            line["reason"] = look
        else:
            size, found = look
            line |= {"size": size, "clips": found.clips, "starts": found.starts}
            line |= {"decoded": found.num_frames, "used": found.used, "notes": found.notes}
        with self.lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / PARTS.replace("*", f"{self.rank:05d}")
            with part.open("ab") as file:
                # The first line break ends a line that was cut off.
                file.write(f"\n{json.dumps(line)}\n".encode())

    def join(self) -> None:
        """Write one file of all looks, in the order of names, and remove the ranks' files.

        Raises UserError if it cannot be written.
        """
        parts = sorted(self.folder.glob(PARTS))
        if not parts:
            return
        self.read()
        lines = [json.dumps(line) for _, line in sorted(self.lines.items())]
        with writing(self.folder / LOOKS, "data encode"):
            write_whole(self.folder / LOOKS, "".join(f"{line}\n" for line in lines))
            for part in parts:
                part.unlink()
