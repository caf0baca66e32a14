"""Where checkpoints lie: in folders of a disk, or of an object store that fsspec reaches.

Both are used through `Store`. They differ in how a checkpoint becomes whole: a folder on a disk is
written aside and renamed; an object store cannot rename, so there the manifest, written last, is
what makes the files before it a checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from titan_dit.config.section import UserError
from titan_dit.system.files import PARTIAL, sync_folder

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class URL:
    """A place in an object store, such as s3://bucket/run; it is joined as a Path is."""

    text: str

    def __truediv__(self, name: str) -> URL:
        return URL(f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """What stands behind the last slash."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> URL:
        """The folder that it lies in."""
        return URL(self.text.rpartition("/")[0])

    def with_name(self, name: str) -> URL:
        """Another one in the same folder."""
        return self.parent / name

    def resolve(self) -> URL:
        """Itself: a URL is spelled in one way only."""
        return self


Place: TypeAlias = Path | URL


def place(text: str | Path | URL) -> Place:
    """A path, or a URL where there is a protocol before it."""
    if isinstance(text, str):
        return URL(text.rstrip("/")) if "://" in text else Path(text)
    return text


class Store(Protocol):
    """What checkpoints need of a disk or an object store. Errors are what the store raises."""

    renames: bool
    """Whether a folder can be renamed in one step that is done or not done."""

    def names(self, folder: Any) -> list[str]:
        """What lies in a folder, sorted; nothing if there is no folder."""

    def has(self, file: Any) -> bool:
        """Whether there is such a file."""

    def size(self, file: Any) -> int:
        """Bytes of a file."""

    def open(self, file: Any) -> IO[bytes]:
        """A file to read."""

    def write(self, file: Any, text: str) -> None:
        """Write a file; it is there for good when this returns."""

    def make(self, folder: Any) -> None:
        """Make a folder, if it is missing."""

    def modified(self, file: Any) -> float:
        """When a file was written or renewed, in seconds, by the clock of the store."""

    def renew(self, file: Any) -> None:
        """Give a file the time of now."""

    def delete(self, file: Any) -> None:
        """Delete a file, if it is there."""

    def aside(self, final: Any) -> Any:
        """The folder in which what will be the checkpoint `final` is written."""

    def begin(self, final: Any) -> Any:
        """Make that folder, empty, and return it."""

    def commit(self, aside: Any, final: Any) -> None:
        """Make what `begin` gave, its manifest written, the checkpoint `final`."""

    def rename(self, folder: Any, name: str) -> None:
        """Give a folder another name."""

    def remove(self, folder: Any) -> None:
        """Delete a folder, if it is there."""


class Disk:
    """Folders of a disk, which all ranks share. What is written is synced before it counts."""

    renames = True

    def names(self, folder: Path) -> list[str]:
        """As Store."""
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def has(self, file: Path) -> bool:
        """As Store."""
        return file.is_file()

    def size(self, file: Path) -> int:
        """As Store."""
        return file.stat().st_size

    def open(self, file: Path) -> IO[bytes]:
        """As Store."""
        return file.open("rb")

    def write(self, file: Path, text: str) -> None:
        """As Store."""
        with file.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())

    def make(self, folder: Path) -> None:
        """As Store."""
        folder.mkdir(parents=True, exist_ok=True)

    def modified(self, file: Path) -> float:
        """As Store."""
        return file.stat().st_mtime

    def renew(self, file: Path) -> None:
        """As Store."""
        os.utime(file)

    def delete(self, file: Path) -> None:
        """As Store."""
        file.unlink(missing_ok=True)

    def aside(self, final: Path) -> Path:
        """As Store. It has another name until it is whole."""
        return final.with_name(final.name + PARTIAL)

    def begin(self, final: Path) -> Path:
        """As Store."""
        aside = self.aside(final)
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        return aside

    def commit(self, aside: Path, final: Path) -> None:
        """As Store. One that is there already makes room first: it is never half deleted."""
        sync_folder(aside)
        before = final.with_name(f"{final.name}.before{PARTIAL}")
        shutil.rmtree(before, ignore_errors=True)
        if final.exists():
            final.rename(before)
        aside.rename(final)
        sync_folder(final.parent)
        shutil.rmtree(before, ignore_errors=True)

    def rename(self, folder: Path, name: str) -> None:
        """As Store."""
        folder.rename(folder.with_name(name))

    def remove(self, folder: Path) -> None:
        """As Store."""
        shutil.rmtree(folder, ignore_errors=True)


class ObjectStore:
    """Folders of an object store: s3://, gs://, memory://, and file:// for a try on a disk."""

    renames = False

    def __init__(self, url: URL) -> None:
        try:
            import fsspec

            # No listing is kept: other ranks write there, too.
            self.files, _ = fsspec.url_to_fs(str(url), use_listings_cache=False)
        except ImportError as error:
            extra = " ('titan_dit[s3]')" if str(url).startswith("s3://") else ""
            raise UserError(f"[checkpoint] {url}: {error}{extra}") from None
        except ValueError as error:
            raise UserError(f"[checkpoint] {url}: {error}") from None

    def names(self, folder: URL) -> list[str]:
        """As Store."""
        try:
            found = self.files.ls(str(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:  # Each store has errors of its own: no credentials, no network.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"[checkpoint] {folder} cannot be read: {reason}") from None
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
        # Some stores list the folder itself as an empty object.
        return sorted(names - {"", folder.name})

    def has(self, file: URL) -> bool:
        """As Store."""
        return bool(self.files.isfile(str(file)))

    def size(self, file: URL) -> int:
        """As Store."""
        return int(self.files.size(str(file)))

    def open(self, file: URL) -> IO[bytes]:
        """As Store."""
        stream: IO[bytes] = self.files.open(str(file), "rb")
        return stream

    def write(self, file: URL, text: str) -> None:
        """As Store."""
        with self.files.open(str(file), "wb") as stream:
            stream.write(text.encode())

    def make(self, folder: URL) -> None:
        """As Store."""
        self.files.makedirs(str(folder), exist_ok=True)

    def modified(self, file: URL) -> float:
        """As Store."""
        return float(self.files.modified(str(file)).timestamp())

    def renew(self, file: URL) -> None:
        """As Store."""
        with self.files.open(str(file), "rb") as stream:
            data = stream.read()
        with self.files.open(str(file), "wb") as stream:
            stream.write(data)

    def delete(self, file: URL) -> None:
        """As Store."""
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(str(file))

    def aside(self, final: URL) -> URL:
        """As Store. It has its name from the start, and no manifest."""
        return final

    def begin(self, final: URL) -> URL:
        """As Store."""
        self.remove(final)
        self.make(final)
        return final

    def commit(self, aside: URL, final: URL) -> None:
        """As Store. The manifest has said it."""

    def rename(self, folder: URL, name: str) -> None:
        """As Store. The store copies file by file, and the manifest last."""
        target, names = folder.with_name(name), self.names(folder)
        self.make(target)
        for file in sorted(names, key=lambda file: file == MANIFEST):
            self.files.copy(str(folder / file), str(target / file))
        self.remove(folder)

    def remove(self, folder: URL) -> None:
        """As Store. The manifest goes first, so that nothing half deleted looks whole."""
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(str(folder / MANIFEST))
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(str(folder), recursive=True)


def store_of(where: Place) -> Store:
    """The store that a place lies in."""
    return ObjectStore(where) if isinstance(where, URL) else Disk()


def read_text(file: Place) -> str:
    """The text of a file. Raises UnicodeDecodeError where it is none."""
    with store_of(file).open(file) as stream:
        return io.TextIOWrapper(stream, encoding="utf-8").read()
