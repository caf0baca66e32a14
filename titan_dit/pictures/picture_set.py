"""Pictures to encode: how many, their classes and captions, and the bytes of each."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from titan_dit.config import limits
from titan_dit.config.section import UserError, few
from titan_dit.config.user_text import is_utf8
from titan_dit.data.files import LABEL_LIMIT, BadFileError, read_whole
from titan_dit.data.listing import Names, missing_below

Label = str | int | None
Caption = str | tuple[str, ...]
"""The caption of a picture, or several of them; "" is none."""
Stamp = tuple[int, int]
"""Length and time of modification (ns) of a file."""
MAX_ROWS, BYTES_PER_ROW = 1_000_000, 16
MAX_DIGITS = 19
UNLABELLED = "no label"
"""The reason for dropping a picture without a class from a set with classes."""


@dataclass(frozen=True, kw_only=True)
class ListingOptions:
    """Options of a command that lists pictures."""

    classes: Sequence[str] | None = None
    """Names of all classes in label order; None: as found."""
    num_classes: int | None = None
    """Number of classes, some of which may have no pictures; None: as found, without gaps."""
    split: str | None = None
    """Read only the parquet or tar files of this split: the file's name, or a folder's below the
    input, begins with it."""
    gaps: bool = False
    """True for pictures to score: class numbers may have gaps, and labels may be missing. The
    scoring commands have no flags that allow it."""
    where: str = "[data encode] input="
    """Beginning of an error, before a path."""
    max_text_bytes: int = 1 << 20
    """Maximum bytes of a metadata row, or of a text beside a picture."""
    max_file_bytes: int = 256 << 20
    """Maximum bytes of a picture's file."""
    no_caption: Literal["skip", "empty"] | None = None
    """How `data encode` treats pictures without a caption: leave them out, or keep them. None:
    refuse them if captions are all that the pictures have."""
    caption_prefix: str = ""
    """Text in front of every caption, such as a trigger word. It stands alone where `no_caption`
    keeps a picture without a caption."""
    clips: bool = False
    """True: video files are listed, too."""
    max_rows: int | None = None
    """Maximum rows of parquet files. None: MAX_ROWS, or one row per BYTES_PER_ROW bytes if more."""

    @classmethod
    def to_score(cls, where: str) -> ListingOptions:
        """Options for pictures to score. An environment variable raises their limits."""
        return cls(
            gaps=True,
            where=where,
            max_text_bytes=limits.raised(cls.max_text_bytes),
            max_file_bytes=limits.raised(cls.max_file_bytes),
        )

    def fix(self, flag: str) -> str:
        """The advice for something above a flag's limit, as a sentence."""
        return f"Correct it, or {limits.advice('' if self.gaps else flag)}."

    def check_size(self, size: int) -> None:
        """Raise BadFileError for a picture's file above the limit."""
        if size > self.max_file_bytes:
            fix = self.fix("--max-file-bytes").rstrip(".")
            raise BadFileError(f"{size:,} bytes, more than {self.max_file_bytes:,}. {fix}")


@dataclass(frozen=True, kw_only=True)
class PictureSet:
    """A listing of pictures in a stable order; picture i is row i."""

    root: Path
    kind: str
    """The form of the input, for the console: "3 tar files"."""
    names: Names
    labels: Int64[Tensor, " n"]
    """Class of each picture; -1: none, and `data encode` drops the picture."""
    num_classes: int
    class_names: tuple[str, ...]
    """Names in label order; empty if classes are numbers."""
    texts: Sequence[Caption]
    """Captions; "" for a picture without one. Empty if the set has none."""
    read: Callable[[int], bytes]
    """Bytes of a picture's file by its row. Raises BadFileError or OSError."""
    stamp: Callable[[int], Stamp]
    """(length, modification time) of the file that holds a picture, by its row."""
    max_file_bytes: int = ListingOptions.max_file_bytes
    """Maximum bytes of a picture's file; larger ones are dropped."""
    captioned: bool = False
    """True if there are captions and no labels: captions are the only condition."""
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Pictures that are not encoded -> the reason."""
    beside: tuple[tuple[str, str], ...] = ()
    """(name, reason) of files of the input that are not read."""
    path: Callable[[int], Path] | None = None
    """The file of a picture by its row, which may be missing. None if files hold several."""

    companions: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """"reference" or "mask" -> row -> the file beside the picture, relative to `root`; without
    `path` the name of a member of its file."""
    read_member: Callable[[str, int], bytes] | None = None
    """Bytes of a reference or mask by its kind and the picture's row, without `path`. Raises as
    `read`."""

    def read_companion(self, kind: str, row: int) -> bytes | None:
        """Bytes of a picture's reference or mask; None without one.

        Raises BadFileError or OSError.
        """
        name = self.companions.get(kind, {}).get(row)
        if name is None:
            return None
        check = ListingOptions(max_file_bytes=self.max_file_bytes).check_size
        try:
            if self.read_member is not None:
                return self.read_member(kind, row)
            return bytes(read_whole(self.root / name, check))
        except BadFileError as error:
            raise BadFileError(f"{name}: {error}") from None

    @property
    def num_uncaptioned(self) -> int:
        """Pictures without a caption that are not left out."""
        empty = (row for row, text in enumerate(self.texts) if is_empty(text))
        return sum(row not in self.left_out for row in empty)

    def without(self, rows: Sequence[int], reason: str) -> PictureSet:
        """The set with some pictures left out; the rows of the others stay."""
        return replace(self, left_out={**dict.fromkeys(rows, reason), **self.left_out})

    def of_rows(self, rows: Sequence[int], names: Sequence[str] | None = None) -> PictureSet:
        """The set of some rows, of which each may come several times; `names`: new ones."""
        path, read_member = self.path, self.read_member

        def of_kept(values: Mapping[int, str]) -> dict[int, str]:
            return {place: values[row] for place, row in enumerate(rows) if row in values}

        return replace(
            self,
            names=Names(names or [self.names[row] for row in rows]),
            labels=self.labels[list(rows)],
            texts=[self.texts[row] for row in rows] if self.texts else [],
            read=lambda place: self.read(rows[place]),
            stamp=lambda place: self.stamp(rows[place]),
            path=None if path is None else lambda place: path(rows[place]),
            left_out=of_kept(self.left_out),
            companions={kind: of_kept(found) for kind, found in self.companions.items()},
            read_member=(
                None if read_member is None else lambda kind, at: read_member(kind, rows[at])
            ),
        )

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self.names)


def make_set(
    root: Path,
    asked: ListingOptions,
    *,
    kind: str,
    names: Sequence[str],
    labels: Sequence[Label],
    texts: Sequence[Caption],
    read: Callable[[int], bytes],
    stamp: Callable[[int], Stamp],
    class_names: Sequence[str] = (),
    captioned: bool = False,
    beside: Sequence[tuple[str, str]] = (),
    path: Callable[[int], Path] | None = None,
) -> PictureSet:
    """Number the classes and make the set. `class_names`: names of labels that are numbers.

    `captioned`: its pictures should have captions. `beside`: (name, reason) of files not read.

    Raises UserError for a label outside the classes and for two pictures of one name. It also
    refuses labels of which some are numbers and others names: one wrong label would turn all
    numbers into names.
    """
    where, classes, num_classes = f"{asked.where}{root}", asked.classes, asked.num_classes
    if not names:
        raise UserError(f"{where}: {kind} lists no pictures. Add some.")
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
        root=root,
        kind=kind,
        names=Names(names),
        labels=torch.tensor(numbers),
        num_classes=most,
        class_names=found_names,
        texts=kept,
        read=read,
        stamp=stamp,
        max_file_bytes=asked.max_file_bytes,
        captioned=captioned or (bool(kept) and not given),
        beside=tuple(beside),
        path=path,
    )


def refuse_mixture(
    where: str, names: Sequence[str], labels: Sequence[Label], asked: ListingOptions
) -> None:
    """Raise UserError if some labels are numbers, or digits as text, and others are names."""
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


def is_number(label: object) -> bool:
    """True for an integer, and for one written as text."""
    return str(label).removeprefix("-").isdecimal()


def as_name(label: Label) -> str | None:
    """A label as the name of a class."""
    return None if label is None else str(label)


def by_name(
    where: str, labels: Sequence[str | None], classes: Sequence[str] | None
) -> tuple[list[int], tuple[str, ...]]:
    """Class numbers of labels that are names, in the order of `classes`, else sorted.

    Raises UserError for a name that is not among `classes`.
    """
    found = sorted({label for label in labels if label is not None})
    names = tuple(classes or found)
    refuse_other_forms(where, found)
    if unknown := [name for name in found if name not in set(names)]:
        raise UserError(
            f"{where}: the labels {few(unknown)} are not among the {len(names)} listed classes. "
            "Add them to --classes, or correct them."
        )
    numbers = {name: number for number, name in enumerate(names)}
    return [-1 if label is None else numbers[label] for label in labels], names


def refuse_other_forms(where: str, labels: Sequence[str]) -> None:
    """Raise UserError for labels that differ in Unicode normalization only: they look alike."""
    forms: dict[str, str] = {}
    for label in labels:
        if (other := forms.setdefault(unicodedata.normalize("NFC", label), label)) != label:
            raise UserError(
                f"{where}: the labels {other!a} and {label!a} are one word in two forms of "
                "Unicode. Write it in one of them."
            )


def label_of(value: object, where: str) -> Label:
    """The label in a value of a file: an integer, decimal text, a class name, or None.

    Raises UserError, which begins with `where`, for anything else.
    """
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    check_scalar(value, "label", where)
    if is_number(value) and len(str(value)) > MAX_DIGITS:
        raise UserError(f"{where}: the label is a number of {len(str(value))} digits. Correct it.")
    if isinstance(value, float):
        if not value.is_integer():
            raise UserError(f"{where}: the label is {value}. Give a whole number or a name.")
        return int(value)
    assert isinstance(value, int | str)
    return value


def captions_in(caption: Caption) -> tuple[str, ...]:
    """The captions of a picture; one of them is ""."""
    return (caption,) if isinstance(caption, str) else caption


def is_empty(caption: Caption) -> bool:
    """True if a picture has no caption."""
    return not any(text.strip() for text in captions_in(caption))


def caption_of(value: object, where: str) -> Caption:
    """The caption in a value of a file: text, a number as text, "", or those of a list.

    Raises UserError for another value.
    """
    if isinstance(value, list):
        found = tuple(filter(str.strip, (one_caption(each, where) for each in value)))
        return found if len(found) > 1 else "".join(found)
    return one_caption(value, where)


def first_caption(values: Sequence[object], where: str) -> Caption:
    """The first of several values that holds a caption; "" if none does."""
    for found in (caption_of(value, where) for value in values):
        if found:
            return found
    return ""


def one_caption(value: object, where: str) -> str:
    """The caption in a value that is no list."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    check_scalar(value, "caption", where)
    return str(value)


def check_scalar(value: object, what: str, where: str) -> None:
    """Raise UserError unless a value of a row is text or a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        raise UserError(
            f"{where}: the {what} is a {type(value).__name__}, {str(value)[:40]!r}. Give a text "
            "or a number."
        )
    if isinstance(value, float) and math.isinf(value):
        raise UserError(f"{where}: the {what} is {value}. Give a text or a finite number.")
    if isinstance(value, str) and not is_utf8(value):
        raise UserError(
            f"{where}: the {what} {value[:40]!a} has half a surrogate pair. Write it in UTF-8."
        )


def numbers_if_decimal(labels: Sequence[Label]) -> list[Label]:
    """The labels as integers if all of them are decimal text; else unchanged."""
    if not all(is_number(label) for label in labels if label is not None):
        return list(labels)
    return [None if label is None else int(label) for label in labels]
