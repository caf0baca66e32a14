"""Pictures to encode: how many, their classes and captions, and the bytes of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.class_labels import few, missing_below
from titan_dit.data.files import LABEL_LIMIT
from titan_dit.data.listing import Names

Label = str | int | None

UNLABELLED = "no label"
"""Why a picture without a class is dropped from a set that has classes."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command asks of a listing."""

    classes: Sequence[str] | None = None
    """The user's names of all classes, in label order."""
    num_classes: int | None = None
    """Set: classes may be missing."""
    split: str | None = None
    """Of parquet or tar files: only those whose name, or a folder's below the input, begins so."""
    gaps: bool = False
    """Pictures to score, not to train on: class numbers may have gaps, and labels may be missing.
    The command has no flags to say so."""
    where: str = "[data encode] input="
    """Begins an error, before a path."""


@dataclass(frozen=True)
class PictureSet:
    """A listing of pictures in a stable order; picture i is row i."""

    root: Path
    kind: str
    """What was found, for the console."""
    names: Names
    labels: Int64[Tensor, " n"]
    """-1: it has none; `data encode` drops it."""
    num_classes: int
    class_names: tuple[str, ...]
    """In label order; empty if classes are numbers."""
    texts: Sequence[str]
    """Captions; "" where there is none. Empty if the set has no captions."""
    read: Callable[[int], bytes]
    """The file of a picture. Raises BadFileError or OSError."""

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self.names)


def make_set(
    root: Path,
    kind: str,
    names: Sequence[str],
    labels: Sequence[Label],
    texts: Sequence[str],
    read: Callable[[int], bytes],
    asked: Asked,
    class_names: Sequence[str] = (),
) -> PictureSet:
    """Number the classes. `class_names`: of labels that are numbers.

    Raises UserError for a label outside the classes, for two pictures of one name, and if some
    labels are numbers and others names, which a wrong one would turn all numbers into.
    """
    where, classes, num_classes = f"{asked.where}{root}", asked.classes, asked.num_classes
    if not names:
        raise UserError(f"{where}: {kind} lists no pictures.")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{where}: {few(twice)} is listed twice. Keep one line of each.")
    given = {label for label in labels if label is not None}
    found_names: tuple[str, ...] = ()
    if not given:
        numbers = [-1 if asked.gaps else 0] * len(names)
    elif all(isinstance(label, int) for label in given):
        numbers = [-1 if label is None else int(label) for label in labels]
        if asked.gaps:  # `sample` writes -1 for an unconditional picture.
            numbers = [max(number, -1) for number in numbers]
        found_names = tuple(classes or class_names)
    else:
        refuse_mixture(where, names, labels, asked)
        numbers, found_names = by_name(where, [as_name(label) for label in labels], classes)
    lowest = min([label for label in given if isinstance(label, int)], default=0)
    highest = max(numbers)
    most = num_classes or len(found_names) or highest + 1
    if found_names and len(found_names) != most:
        raise UserError(
            f"{where}: --num-classes {most}, but there are {len(found_names)} names of classes. "
            "List all of them in label order: --classes FILE."
        )
    if (lowest < 0 and not asked.gaps) or highest >= min(most, LABEL_LIMIT):
        bad = lowest if lowest < 0 and not asked.gaps else highest
        name = names[list(labels).index(bad)]
        raised = "list all classes: --classes FILE" if found_names else "raise --num-classes"
        fix = "Correct it." if asked.gaps else f"Correct it, or {raised}."
        last = min(most, LABEL_LIMIT) - 1
        raise UserError(f"{where}: {name} has the label {bad}, outside 0 to {last}. {fix}")
    may_lack = asked.gaps or num_classes is not None
    had, empty = set(numbers), list[object]()
    if found_names:
        empty += [name for i, name in enumerate(found_names) if i not in had]
        lacks = len(empty)
    else:
        lacks, missing = missing_below([number for number in numbers if number >= 0] or [0])
        empty += missing
    if not may_lack and lacks:
        raise UserError(
            f"{where}: no pictures of {lacks:,} classes: {few(empty, total=lacks)}. Add some. If "
            f"they are missing on purpose: --num-classes {most}."
        )
    kept = list(texts) if any(texts) else []
    return PictureSet(
        root, kind, Names(names), torch.tensor(numbers), most, found_names, kept, read
    )


def refuse_mixture(where: str, names: Sequence[str], labels: Sequence[Label], asked: Asked) -> None:
    """Raise UserError if some labels are numbers, or text of digits, and others are names."""
    if asked.classes or asked.gaps:
        return
    first: dict[bool, int] = {}
    for row, label in enumerate(labels):
        if label is not None:
            first.setdefault(is_number(label), row)
    if len(first) > 1:
        number, name = first[True], first[False]
        raise UserError(
            f"{where}: {names[number]} has the label {labels[number]}, a number, and {names[name]} "
            f"has {labels[name]}, a name. Correct them, or list all names: --classes FILE."
        )


def is_number(label: Label) -> bool:
    """True for an integer and for its text."""
    return str(label).removeprefix("-").isdecimal()


def as_name(label: Label) -> str | None:
    """A label as the name of a class."""
    return None if label is None else str(label)


def by_name(
    where: str, labels: Sequence[str | None], classes: Sequence[str] | None
) -> tuple[list[int], tuple[str, ...]]:
    """Number names in the order of `classes`, else sorted."""
    found = sorted({label for label in labels if label is not None})
    names = tuple(classes or found)
    if unknown := [name for name in found if name not in set(names)]:
        raise UserError(
            f"{where}: the labels {few(unknown)} are not among the {len(names)} listed classes. "
            "Add them to --classes, or correct them."
        )
    numbers = {name: number for number, name in enumerate(names)}
    return [-1 if label is None else numbers[label] for label in labels], names


def label_of(value: object) -> Label:
    """A label as a file holds it: an integer, decimal text, the name of a class, or nothing."""
    if value is None or value == "" or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        return str(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else str(value)
    return value


def numbers_if_decimal(labels: Sequence[Label]) -> list[Label]:
    """Labels of a file: integers if all of them are text of digits."""
    if not all(is_number(label) for label in labels if label is not None):
        return list(labels)
    return [None if label is None else int(label) for label in labels]
