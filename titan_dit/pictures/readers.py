"""List the pictures of folders, metadata files, parquet files and tar files.

The bytes of a picture are read when it is encoded.
"""

from __future__ import annotations

import os
import re
import tarfile
import unicodedata
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, NamedTuple

from titan_dit.config import limits, user_text
from titan_dit.config.section import UserError, few
from titan_dit.config.user_text import BadTextError, decode, parse_json
from titan_dit.data.files import NO_FILE, BadFileError, read_whole, stamp_of
from titan_dit.data.listing import (
    IMAGE_SUFFIXES,
    check_path,
    entries,
    holds_samples,
    list_folder,
)
from titan_dit.data.tar_members import BoundedMember, refuse_sparse
from titan_dit.pictures.captioned_folder import (
    apply_caption_rule,
    files_of,
    open_captioned,
    with_prefix,
)
from titan_dit.pictures.companions import KINDS, check_references, with_companions
from titan_dit.pictures.library import parquet
from titan_dit.pictures.picture_set import (
    BYTES_PER_ROW,
    MAX_ROWS,
    Caption,
    Label,
    ListingOptions,
    PictureSet,
    Stamp,
    caption_of,
    first_caption,
    is_number,
    label_of,
    make_set,
    numbers_if_decimal,
)
from titan_dit.ranks import open_files
from titan_dit.system.progress import ProgressLine


def open_folder(root: Path, asked: ListingOptions) -> PictureSet:
    """List the pictures; classes are folders, numbered as `data pack` does."""
    listing = list_folder(root, asked.num_classes, asked.classes)
    if listing.kind != "images":
        raise UserError(
            f"{asked.where}{root} holds latents, which are encoded already. Use `data pack`."
        )

    def path(row: int) -> Path:
        return root / listing.names[row]

    def read(row: int) -> bytes:
        return bytes(read_whole(path(row), asked.check_size))

    def stamp(row: int) -> Stamp:
        return stamp_of(path(row))

    return PictureSet(
        root,
        "a folder per class",
        listing.names,
        listing.labels,
        listing.num_classes,
        listing.class_names,
        [],
        read,
        stamp,
        asked.max_file_bytes,
        path=path,
    )


BATCH = 4096
"""Rows of texts and labels per read."""
MAX_GROUP_BYTES = 512 << 20
"""Maximum bytes of an unpacked row group: hubs have up to 500 MB. Reading one takes three times
that."""
SMALL_GROUP, GROUP_RATIO = 64 << 20, 20
"""Maximum bytes of a row group: SMALL_GROUP in any file, or GROUP_RATIO times the file's bytes."""
READING = {"pre_buffer": False, "buffer_size": 1 << 20}
"""Arguments of ParquetFile: by default it holds the packed bytes of everything that it reads."""
MAX_RATIO = 200
"""Maximum ratio of all texts' bytes to the file's."""


class ParquetTable:
    """A parquet file. Texts and labels are read in batches, pictures by row group."""

    def __init__(self, file: Path, where: str, asked: ListingOptions) -> None:
        """Open the file. Raises UserError, which begins with `where`, if it is not readable."""
        self.file, self.where, self.asked = file, where, asked
        self.library = parquet(where)
        try:
            self.opened: Any = self.library.ParquetFile(file, **READING)
            self.schema: Any = self.opened.schema_arrow
        except Exception as error:  # pyarrow raises any exception on a damaged file.
            raise self.unreadable(error) from None
        self.names: list[str] = self.schema.names
        about = self.opened.metadata
        self.count: int = about.num_rows
        """Number of rows; `check_rows` checks it."""
        stored = sum(about.row_group(group).num_rows for group in range(about.num_row_groups))
        if stored != self.count:
            raise self.unreadable(ValueError(f"it names {self.count:,} rows and holds {stored:,}"))

    def unreadable(self, error: Exception) -> UserError:
        """The error for a damaged file."""
        reason = " ".join(str(error).split()).rstrip(".")
        return UserError(f"{self.where} is not readable parquet: {reason}. Restore the file.")

    def check_rows(self, rows: int, size: int) -> None:
        """Raise UserError if files of `size` bytes list too many `rows`."""
        most = self.asked.max_rows or limits.raised(max(MAX_ROWS, size // BYTES_PER_ROW))
        if rows > most:
            raise UserError(
                f"{self.where} lists {rows:,} rows in {size:,} bytes, more than {most:,}. "
                f"{self.asked.fix('--max-rows')}"
            )

    def rows(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The values of some columns, row by row; missing columns are left out."""
        columns = [name for name in wanted if name in self.names]
        if not columns:
            yield from ({} for _ in range(self.count))
            return
        self.check_once(columns)
        texts = [name for name in columns if self.is_text(name)]
        read, most = 0, limits.raised(64 * 2**20 + MAX_RATIO * self.file.stat().st_size)
        try:
            # As a dictionary a text that a million rows repeat is there once.
            opened = self.library.ParquetFile(self.file, read_dictionary=texts, **READING)
            for group in range(opened.num_row_groups):
                self.check_group(group)
            for batch in opened.iter_batches(BATCH, columns=columns):
                found = {
                    name: self.values(column, name, texts)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                for row in range(batch.num_rows):
                    values = {name: column[row] for name, column in found.items()}
                    read += sum(len(x) for x in values.values() if isinstance(x, str))
                    if read > most:
                        raise UserError(
                            f"{self.where}: its texts unpack to more than {MAX_RATIO} times its "
                            f"size. Correct it, or {limits.advice()}."
                        )
                    yield values
        except UserError:
            raise
        except Exception as error:  # As above.
            raise self.unreadable(error) from None

    def check_once(self, columns: Sequence[str]) -> None:
        """Raise UserError for a column that occurs twice."""
        if twice := [name for name in columns if self.names.count(name) > 1]:
            raise UserError(f"{self.where} has several columns {twice[0]}. Keep one of them.")

    def leaves(self, column: str) -> list[str]:
        """Paths of a column's stored columns: a struct has one for each field."""
        stored = self.opened.schema
        paths = [stored.column(number).path for number in range(len(stored))]
        return [path for path in paths if path.partition(".")[0] == column]

    def is_text(self, name: str) -> bool:
        """True for text and bytes, False for numbers. Raises UserError for other types."""
        import pyarrow

        kind, of = self.schema.field(name).type, pyarrow.types
        if of.is_dictionary(kind):
            kind = kind.value_type
        if of.is_string(kind) or of.is_large_string(kind):
            return True
        if of.is_binary(kind) or of.is_large_binary(kind):
            return True
        if not (of.is_integer(kind) or of.is_floating(kind) or of.is_null(kind)):
            raise UserError(
                f"{self.where}: column {name} is {kind}, not text or numbers. Cast it to one of "
                "them."
            )
        return False

    def values(self, column: Any, name: str, texts: Sequence[str]) -> list[Any]:
        """The values of a batch's column. Text may be stored as bytes."""
        if name not in texts:
            found: list[Any] = column.to_pylist()
            return found
        import pyarrow.compute as compute

        longest = compute.max(compute.binary_length(column.dictionary)).as_py() or 0
        if longest > self.asked.max_text_bytes:
            raise UserError(
                f"{self.where}: a {name} has {longest:,} bytes, more than "
                f"{self.asked.max_text_bytes:,}. {self.asked.fix('--max-text-bytes')}"
            )
        try:
            values = [
                decode(x) if isinstance(x, bytes) else x for x in column.dictionary.to_pylist()
            ]
        except BadTextError as error:
            raise UserError(f"{self.where}: a {name} is {error}. Save it as UTF-8.") from None
        return [None if number is None else values[number] for number in column.indices.to_pylist()]

    def check_group(self, group: int) -> int:
        """Unpacked bytes of a row group; UserError if they are too many.

        The bytes of single columns are not read: pyarrow aborts the process if a column's
        statistics in the footer are damaged.
        """
        size: int = self.opened.metadata.row_group(group).total_byte_size
        of_file = max(SMALL_GROUP, GROUP_RATIO * self.file.stat().st_size)
        most = limits.raised(min(MAX_GROUP_BYTES, of_file))
        if not 0 <= size <= most:
            raise UserError(
                f"{self.where}: row group {group} holds {size:,} bytes, more than {most:,}. Write "
                f"it with smaller row groups: row_group_size=1000. {limits.fix(size, most)}"
            )
        return size


FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
NAME, METADATA_LABELS, METADATA_TEXTS = "file_name", ("label", "class"), ("text", "caption")
COLUMNS = (NAME, *METADATA_LABELS, *METADATA_TEXTS)


def open_metadata(root: Path, file: Path, asked: ListingOptions) -> PictureSet:
    """List the rows of a metadata file."""
    where = f"{asked.where}{file}"
    names: list[str] = []
    labels: list[tuple[Label, ...]] = []
    texts: list[Caption] = []
    for number, row in enumerate(rows_of(file, where, asked), 1):
        at = f"{where}, row {number}"
        names.append(name_of(row, at, root))
        labels.append(tuple(label_of(row.get(key), at) for key in METADATA_LABELS))
        texts.append(first_caption([row.get(key) for key in METADATA_TEXTS], at))

    def read(row: int) -> bytes:
        path = found_file(root, names[row])
        if path is None:
            backslash = ": write / between folders" if "\\" in names[row] else ""
            raise BadFileError(f"no such file{backslash}")
        return bytes(read_whole(path, asked.check_size))

    def stamp(row: int) -> Stamp:
        found = stamp_of(root / names[row])
        if found != NO_FILE or names[row].isascii():
            return found
        return stamp_of(found_file(root, names[row]) or root / names[row])

    def path(row: int) -> Path:
        return found_file(root, names[row]) or root / names[row]

    numbers = numbers_if_decimal(chosen(labels, where))
    return make_set(root, file.name, names, numbers, texts, read, stamp, asked, path=path)


def rows_of(file: Path, where: str, asked: ListingOptions) -> Iterator[Mapping[str, Any]]:
    """The rows of a metadata file."""
    most, fix = asked.max_text_bytes, asked.fix("--max-text-bytes")
    if file.suffix == ".parquet":
        table = ParquetTable(file, where, asked)
        table.check_rows(table.count, file.stat().st_size)
        yield from table.rows(COLUMNS)
    elif file.suffix == ".csv":
        for _, fields in user_text.read_csv(file, where, most, fix, COLUMNS):
            yield fields
    else:
        for number, line in user_text.lines(file, where, most, fix):
            try:
                row = user_text.parse_json(line, unique=True)
            except user_text.BadTextError as error:
                raise UserError(f"{where}, line {number}: {error}.") from None
            if not isinstance(row, dict):
                raise UserError(
                    f'{where}, line {number}: no JSON object. Write {{"{NAME}": "a.png", ...}}.'
                )
            # Only these: other columns, such as embeddings, may be large.
            yield {key: row[key] for key in COLUMNS if key in row}


def name_of(row: Mapping[str, Any], at: str, root: Path) -> str:
    """The file name in a metadata row, relative to `root`. Raises UserError."""
    name = row.get(NAME)
    if not isinstance(name, str) or not name:
        raise UserError(f"{at}: {NAME} is missing. Name the picture of every row.")
    if "\0" in name or not user_text.is_utf8(name):
        raise UserError(f"{at}: {NAME} {name!a} is no name of a file. Correct it.")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise UserError(f"{at}: {NAME} {name} is outside {root}. Name files relative to it.")
    return name


def found_file(root: Path, name: str) -> Path | None:
    """The file of that name, in either normalization of Unicode; None if there is none.

    macOS packs names in another normalization than most metadata has.
    """
    forms = [name]
    if not name.isascii():
        forms += [unicodedata.normalize(form, name) for form in ("NFC", "NFD")]
    return next((root / form for form in forms if (root / form).is_file()), None)


def chosen(labels: Sequence[tuple[Label, ...]], where: str) -> list[Label]:
    """The `label` of each row; where it is missing, the `class`.

    Raises UserError if some rows have a number as label and others a name as class.
    """
    found = [a if a is not None else b for a, b in labels]
    filled = [a is not None for a, _ in labels]
    kinds = {
        (is_first, is_number(label))
        for is_first, label in zip(filled, found, strict=True)
        if label is not None
    }
    if {(True, True), (False, False)} <= kinds:
        row = next(i for i, x in enumerate(found) if not filled[i] and x is not None)
        raise UserError(
            f"{where}, row {row + 1}: {METADATA_LABELS[1]} {found[row]} without a "
            f"{METADATA_LABELS[0]}, which is a number"
            f" in other rows. Give it one, or leave its {METADATA_LABELS[1]} out."
        )
    return found


IMAGES, PARQUET_LABELS, PARQUET_TEXTS = (
    ("image", "img", "png", "jpg"),
    ("label", "labels"),
    ("text", "caption"),
)
KEPT_GROUPS = 3
"""Row groups in memory: threads read ahead into the next one."""
KEPT_BYTES = MAX_GROUP_BYTES // 2
"""If KEPT_GROUPS groups would exceed these bytes, two are kept: the current and the next one."""


class RowGroup(NamedTuple):
    """A row group of a parquet file."""

    table: ParquetTable
    image: str
    number: int
    rows: int
    bytes: int
    """Unpacked bytes of the whole group."""


def open_parquet(root: Path, files: Sequence[Path], asked: ListingOptions) -> PictureSet:
    """List the rows of parquet files, one after another. Reads no pictures."""
    names: list[str] = []
    labels: list[Label] = []
    texts: list[Caption] = []
    groups: list[RowGroup] = []
    class_names: Sequence[str] = ()
    total = sum(file.stat().st_size for file in files)
    for file in files:
        table = ParquetTable(file, f"{asked.where}{file}", asked)
        table.check_rows(len(names) + table.count, total)
        groups += groups_of(table)
        label, text = (
            next((k for k in keys if k in table.names), "")
            for keys in (PARQUET_LABELS, PARQUET_TEXTS)
        )
        for row, values in enumerate(table.rows([name for name in (label, text) if name])):
            at = f"{table.where}, row {row + 1}"
            names.append(f"{file.relative_to(root)}:{row}")
            labels.append(label_of(values.get(label), at))
            texts.append(caption_of(values.get(text), at))
        more = names_of(table.schema.metadata or {}, label)
        if class_names and more and more != class_names:
            raise UserError(
                f"{asked.where}{file} names the classes {few(more)}, but the files before it "
                f"{few(class_names)}: their numbers differ. Give the files of one of them."
            )
        class_names = class_names or more
    ends = list(accumulate(group.rows for group in groups))
    held = HeldGroups(groups)

    def read(row: int) -> bytes:
        number = bisect_right(ends, row)
        column = held.column(number)
        try:
            value = column[row - (ends[number] - groups[number].rows)].as_py()
        except UnicodeDecodeError:
            raise BadFileError("has a path that is not UTF-8") from None
        data = value.get("bytes") if isinstance(value, Mapping) else value
        if not isinstance(data, bytes) or not data:
            raise BadFileError("holds no bytes of a picture")
        asked.check_size(len(data))
        return data

    stamps = {id(group.table): stamp_of(group.table.file) for group in groups}

    def stamp(row: int) -> Stamp:
        return stamps[id(groups[bisect_right(ends, row)].table)]

    kind = f"{len(files)} parquet files"
    numbered = numbers_if_decimal(labels)
    return make_set(root, kind, names, numbered, texts, read, stamp, asked, class_names)


def groups_of(table: ParquetTable) -> list[RowGroup]:
    """The row groups of a file; UserError if it has no pictures, or too large a group."""
    image = next((name for name in IMAGES if name in table.names), None)
    if image is None:
        raise UserError(
            f"{table.where} has the columns {few(table.names)}, but none of {', '.join(IMAGES)} "
            "with pictures. Rename the column of pictures."
        )
    table.check_once([image])
    about = table.opened.metadata
    return [
        RowGroup(
            table,
            image,
            number,
            about.row_group(number).num_rows,
            table.check_group(number),
        )
        for number in range(table.opened.num_row_groups)
    ]


class HeldGroups:
    """The pictures of the row groups that were read last."""

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self.groups = groups
        self.held: OrderedDict[int, Any] = OrderedDict()
        self.lock = Lock()
        """One thread at a time reads a file."""

    def column(self, number: int) -> Any:
        """The pictures of a row group. Raises BadFileError if it is damaged."""
        with self.lock:
            if number not in self.held:
                large = self.groups[number].bytes > KEPT_BYTES // KEPT_GROUPS
                while len(self.held) >= (2 if large else KEPT_GROUPS):
                    self.held.popitem(last=False)
                self.held[number] = self.read(self.groups[number])
            self.held.move_to_end(number)
            return self.held[number]

    def read(self, group: RowGroup) -> Any:
        """Read the pictures of a row group."""
        opened = group.table.opened
        try:
            if group.rows * group.bytes > MAX_GROUP_BYTES:
                # Rows may repeat a picture, which is there once in a dictionary.
                leaves = group.table.leaves(group.image)
                opened = group.table.library.ParquetFile(
                    group.table.file, read_dictionary=leaves, **READING
                )
            return opened.read_row_group(group.number, columns=[group.image]).column(0)
        except Exception as error:  # pyarrow raises any exception on a damaged file.
            if isinstance(error, OSError) and error.errno:
                raise  # Of the disk, not of what the file holds.
            raise BadFileError("in a damaged row group") from None


def names_of(metadata: Mapping[bytes, bytes], label: str) -> Sequence[str]:
    """Class names in the schema's metadata; () if there are none."""
    try:
        features = parse_json(metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


LABEL, TEXT, BOTH = ".cls", ".txt", ".json"
OTHER = "other"
"""Key, in a sample, of a picture whose suffix has two dots."""
PICTURE = "picture"
"""Key, in a sample, of its picture; those of its reference and its mask are their kinds."""
FORMS = {
    f"{before}{suffix}": kind
    for before, kind in (("", PICTURE), *((f".{kind}", kind) for kind in KINDS))
    for suffix in IMAGE_SUFFIXES
}
"""Suffix -> key in a sample."""


class TarPicture(NamedTuple):
    """A picture in a tar file, or a reference or a mask."""

    name: str
    file: int
    offset: int
    size: int


def open_tars(root: Path, files: Sequence[Path], asked: ListingOptions) -> PictureSet:
    """List the samples of tar files, one after another. Reads headers and texts, not pictures."""
    samples = TarSamples(asked, f"{asked.where}{root}/")
    progress = ProgressLine(len(files), "tar files", what="listed")
    for number, file in enumerate(files):
        try:
            with tarfile.open(file, "r:", tarinfo=BoundedMember) as archive:
                for member in archive:
                    if member.isfile() or member.issym() or member.islnk():
                        samples.add(archive, member, number, file.relative_to(root))
        except UserError:
            raise
        except Exception as error:  # tarfile raises any exception on a damaged file.
            raise UserError(
                f"{asked.where}{file} is not a readable tar file ({error}). Compressed ones must "
                "be unpacked: gunzip."
            ) from None
        progress.add(1)
    progress.end()
    refuse_other_names(samples.found, f"{asked.where}{root}")
    found = {key: sample for key, sample in samples.found.items() if PICTURE in sample}
    labels: list[Label] = [sample.get("label") for sample in found.values()]
    texts = [sample.get("text", "") for sample in found.values()]
    members: list[dict[str, TarPicture]] = [
        {kind: sample[kind] for kind in (PICTURE, *KINDS) if kind in sample}
        for sample in found.values()
    ]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    stamps = [stamp_of(file) for file in files]

    def read_member(kind: str, row: int) -> bytes:
        member = members[row][kind]
        asked.check_size(member.size)
        data = os.pread(descriptors[member.file], member.size, member.offset)
        if len(data) != member.size:
            raise BadFileError("cut off with its tar file")
        return data

    def read(row: int) -> bytes:
        return read_member(PICTURE, row)

    def stamp(row: int) -> Stamp:
        return stamps[members[row][PICTURE].file]

    kind = f"{len(files)} tar files"
    numbers = numbers_if_decimal(labels)
    pictures = make_set(root, kind, list(found), numbers, texts, read, stamp, asked)
    companions = {
        kind: {row: of_row[kind].name for row, of_row in enumerate(members) if kind in of_row}
        for kind in KINDS
    }
    check_references(f"{asked.where}{root}", pictures, companions["reference"])
    companions = {kind: names for kind, names in companions.items() if names}
    return replace(pictures, companions=companions, read_member=read_member)


@dataclass
class TarSamples:
    """The samples of tar files, by name."""

    asked: ListingOptions
    where: str
    """Beginning of an error, before the tar file's name."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, number: int, path: Path
    ) -> None:
        """Add a member of a tar file to its sample."""
        folder, _, name = member.name.rpartition("/")
        stem, dot, rest = name.partition(".")
        suffix = f"{dot}{rest}".lower()
        key = f"{path}:{folder}/{stem}" if folder else f"{path}:{stem}"
        at = f"{self.where}{path}: {member.name}"
        kind = FORMS.get(suffix)
        if kind == PICTURE or (kind and stem and not self.asked.gaps):
            refuse_sparse(member, at)
            sample = self.found.setdefault(key, {})
            if kind in sample:
                raise UserError(f"{at} is the second {kind} of {stem}. Keep one.")
            if not member.isfile():
                raise UserError(
                    f"{at} is a link. Make the tar file with --dereference --hard-dereference."
                )
            name = f"{path}:{member.name}"
            sample[kind] = TarPicture(name, number, member.offset_data, member.size)
        elif suffix in (LABEL, TEXT, BOTH):
            said = described(suffix, self.text_of(archive, member, at), at)
            sample = self.found.setdefault(key, {})
            # In whatever order they come.
            sample.update({**said, **sample} if suffix == BOTH else said)
        elif suffix.endswith(IMAGE_SUFFIXES) and stem:
            self.found.setdefault(key, {})[OTHER] = f"{path}: {member.name}"

    def text_of(self, archive: tarfile.TarFile, member: tarfile.TarInfo, at: str) -> str:
        """The text of a member; of a link, that of its target."""
        refuse_sparse(member, at)
        most = self.asked.max_text_bytes
        try:
            opened = archive.extractfile(member)
            data = opened.read(most + 1) if opened else b""
        except (KeyError, RecursionError):
            raise UserError(f"{at} is a link to nothing, or to itself. Correct it.") from None
        if len(data) > most:
            fix = self.asked.fix("--max-text-bytes")
            raise UserError(f"{at} is longer than {most:,} bytes. {fix}")
        try:
            return decode(data).strip()
        except BadTextError as error:
            raise UserError(f"{at} is {error}. Save it as UTF-8.") from None


def refuse_other_names(samples: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Raise UserError for a picture whose name has a dot before its suffix: `a.5.jpg`.

    Beside the sample's own picture it is allowed: `a.depth.png` beside `a.jpg` is another kind of
    it, and is not read. Raises UserError for a reference or a mask without a picture, too.
    """
    without = {key: sample for key, sample in samples.items() if PICTURE not in sample}
    for key, sample in without.items():
        for kind in KINDS:
            if kind in sample:
                raise UserError(
                    f"{where}: {sample[kind].name} is the {kind} of no picture: there is no "
                    f"{key}.jpg. Add the picture, or remove the member."
                )
    alone = [sample[OTHER] for sample in without.values() if OTHER in sample]
    if alone:
        raise UserError(
            f"{where}: {few(alone)} would not be read: in tar files a sample's name ends at the "
            "first dot. Rename such pictures, or unpack the files into a folder for each class."
        )


def described(suffix: str, content: str, at: str) -> dict[str, Any]:
    """The label and the caption in the text beside a picture, if it has them."""
    label: Label = None
    text: Caption = ""
    if suffix == LABEL:
        return {"label": label_of(content, at)}
    if suffix == TEXT:
        return {"text": content}
    try:
        values = parse_json(content, unique=True)
    except BadTextError as error:
        raise UserError(f"{at} is {error}.") from None
    if isinstance(values, dict):
        labels = (label_of(values.get(key), at) for key in ("label", "class"))
        label = next((found for found in labels if found is not None), None)
        text = first_caption([values.get(key) for key in METADATA_TEXTS], at)
    return ({} if label is None else {"label": label}) | ({"text": text} if text else {})


SPLITS = {
    "train": ("train", "training"),
    "test": ("test",),
    "val": ("val", "valid", "validation"),
}
"""Split -> names that its files may begin with."""
READERS = {".parquet": open_parquet, ".tar": open_tars}


def open_input(path: Path, asked: ListingOptions) -> PictureSet:
    """List the pictures of a folder, or of one parquet or tar file.

    In a folder the first of these is read: a metadata file; parquet or tar files in it or below;
    pictures with captions beside them; a folder per class. References and masks may lie beside the
    pictures of folders, and in tar files.
    """
    found = with_companions(open_any(path, asked), asked)
    return with_prefix(apply_caption_rule(found, asked), asked)


def open_any(path: Path, asked: ListingOptions) -> PictureSet:
    """As `open_input`, with pictures that have no caption."""
    if path.is_file():
        reader = READERS.get(path.suffix)
        if reader is None:
            raise UserError(f"{asked.where}{path}: give a folder, a .parquet or a .tar file.")
        refuse_split(asked, f"{path} is one file")
        return reader(path.parent, [path], asked)
    check_path(path, asked.where)
    if (found := open_listed(path, asked)) is not None:
        return found
    refuse_split(asked, f"{path} holds no parquet or tar files")
    if (files := files_of(path, asked.clips)).is_captioned:
        return open_captioned(path, files, asked)
    return open_folder(path, asked)


def refuse_split(asked: ListingOptions, reason: str) -> None:
    """Raise UserError if a split is given for an input without splits."""
    if asked.split:
        raise UserError(f"[data encode] split={asked.split}: {reason}. Leave --split out.")


def open_listed(folder: Path, asked: ListingOptions) -> PictureSet | None:
    """The pictures listed by a folder's metadata, parquet or tar files; None if it has none.

    Raises UserError for parquet or tar files beside class folders: one of the two would be left
    out.
    """
    if listed := [folder / name for name in FILES if (folder / name).is_file()]:
        if len(listed) > 1:
            names = few([file.name for file in listed])
            raise UserError(f"{asked.where}{folder} holds {names}. Keep one of them.")
        refuse_split(asked, f"{listed[0]} lists the pictures")
        return open_metadata(folder, listed[0], asked)
    found = {
        suffix: sorted(file for file in folder.rglob(f"*{suffix}") if file.name[0] != ".")
        for suffix in READERS
    }
    # img2dataset writes a table of the same name beside each tar file.
    if all(file.with_suffix(".tar") in found[".tar"] for file in found[".parquet"]):
        found[".parquet"] = []
    kinds = [suffix for suffix, files in found.items() if files]
    if not kinds:
        return None
    classes = [name for name in entries(folder)[0] if holds_samples(folder / name)]
    both = [*(found[suffix][0].relative_to(folder) for suffix in kinds), *classes]
    if len(kinds) > 1 or classes:
        raise UserError(
            f"{asked.where}{folder} holds {few(both)}: two datasets in one folder. Give one of "
            "them, or move each to its own folder."
        )
    files = of_split(folder, found[kinds[0]], asked)
    open_files.raise_limit(open_files.OTHERS["cpu"] + len(files), f"{asked.where}{folder}")
    return READERS[kinds[0]](folder, files, asked)


def of_split(folder: Path, files: Sequence[Path], asked: ListingOptions) -> list[Path]:
    """The files of a split. UserError if there are several splits and none is named."""
    if split := asked.split:
        found = [file for file in files if is_of(split, file, folder)]
        if not found:
            names = few([str(file.relative_to(folder)) for file in files])
            raise UserError(
                f"[data encode] split={split}: {folder} holds {names}. Give the split of one of "
                "them, or leave --split out."
            )
        return found
    known = {name for name in SPLITS for file in files if is_of(name, file, folder)}
    if len(known) > 1:
        fix = "Give a folder of one of them." if asked.gaps else "Choose one: --split train."
        splits = ", ".join(sorted(known))
        raise UserError(f"{asked.where}{folder} holds the splits {splits}. {fix}")
    return list(files)


def is_of(split: str, file: Path, folder: Path) -> bool:
    """True if the file, or a folder above it, begins with the split: train-0, not trainee-0."""
    names = map(re.escape, SPLITS.get(split, (split,)))
    begins = re.compile(rf"({'|'.join(names)})(?![^\W_])")
    return any(begins.match(part) for part in file.relative_to(folder).parts)
