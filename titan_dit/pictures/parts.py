"""Finished parts of a long job, as files beside its output; the same command resumes them.

Ranks share the folder. It holds `plan.json`, which determines every bit of the parts, and one file
per part. A file appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.ranks.disk_errors import writing
from titan_dit.system.files import write_json, write_whole

PLAN = "plan.json"


def shown(value: object) -> str:
    """A plan's value as text; for a list of a name and its digest, the name."""
    names = isinstance(value, list) and value and isinstance(value[0], str)
    return str(value[0] if names else value)  # type: ignore[index]


@dataclass(frozen=True)
class FinishedParts:
    """The parts of one output."""

    folder: Path
    plan: Mapping[str, Any]
    """JSON values that determine the parts' bits."""
    count: int
    flag: str = "--out"
    """Names the output in errors."""

    @property
    def digest(self) -> str:
        """SHA-256 of the plan."""
        return hashlib.sha256(json.dumps(self.plan, sort_keys=True).encode()).hexdigest()

    def open(self) -> None:
        """Make the folder. One rank calls it, first. Raises UserError if it holds another plan."""
        file = self.folder / PLAN
        if file.is_file():
            before: dict[str, Any] = {}
            with suppress(ValueError):
                before = dict(user_text.read_json(file, str(file)))
            if before.get("digest") == self.digest:
                return
            changes = [
                f"{key}: {shown(before.get(key))} -> {shown(value)}"
                for key, value in self.plan.items()
                if json.dumps(value) != json.dumps(before.get(key))
            ]
            raise UserError(
                f"{self.flag}: {self.folder} holds parts of another command "
                f"({', '.join(changes)}). Repeat that command to finish it, or delete the folder."
            )
        with self.writing(file):
            write_json(file, {"digest": self.digest, **self.plan})

    def missing(self, rank: int = 0, num_ranks: int = 1) -> list[int]:
        """Numbers of a rank's parts that are not written yet."""
        return [i for i in range(rank, self.count, num_ranks) if not self.file(i).is_file()]

    def file(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"{number:06d}.safetensors"

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a part, whole or not at all."""
        data = safetensors.save({name: tensor.contiguous() for name, tensor in tensors.items()})
        with self.writing(self.file(number)):
            write_whole(self.file(number), data)

    def read(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of every part, in order."""
        return map(self.part, range(self.count))

    def part(self, number: int) -> dict[str, Tensor]:
        """Tensors of a part. Raises UserError if its file cannot be read."""
        try:
            tensors: dict[str, Tensor] = safetensors.load_file(self.file(number))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{self.flag}: {self.file(number)} cannot be read ({error}). Delete it and "
                "repeat the command."
            ) from None
        return tensors

    def delete(self) -> None:
        """Delete the folder once the output is whole.

        The plan goes last: without it another command would take the remaining parts for its own.
        """
        with suppress(OSError):
            for number in range(self.count):
                self.file(number).unlink(missing_ok=True)
            shutil.rmtree(self.folder)

    def writing(self, file: Path) -> AbstractContextManager[None]:
        """Raise an OSError of the block as one line that names the file and the fix."""
        return writing(f"{self.flag}: {file}", "Repeat the command: it goes on.")
