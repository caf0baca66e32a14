"""Storage back ends of checkpoints: a local or shared disk, or an object store through fsspec.

They differ in how a save is committed. On a disk a `.partial` folder is renamed atomically. An
object store cannot rename; there the manifest, written last, commits the save.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from titan_dit.config.section import UserError
from titan_dit.ranks.torch_range import pip_install
from titan_dit.system.files import PARTIAL, sync_folder

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class URL:
    """A location in an object store, such as s3://bucket/run; joined with / like a Path."""

    text: str

    def __truediv__(self, name: str) -> URL:
        return URL(f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """The last component."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> URL:
        """The containing folder."""
        return URL(self.text.rpartition("/")[0])

    def with_name(self, name: str) -> URL:
        """Replace the last component."""
        return self.parent / name

    def resolve(self) -> URL:
        """Return itself: URLs are already absolute."""
        return self


Location: TypeAlias = Path | URL


def location(text: str | Path | URL) -> Location:
    """Parse text as a URL if it has a protocol, otherwise as a path."""
    if isinstance(text, str):
        return URL(text.rstrip("/")) if "://" in text else Path(text)
    return text


class Store(Protocol):
    """Operations of a storage back end; each raises its own errors."""

    renames: bool
    """True if folders can be renamed atomically."""

    def names(self, folder: Any) -> list[str]:
        """Sorted entries of a folder; empty if it does not exist."""

    def has(self, file: Any) -> bool:
        """Return True if the file exists."""

    def size(self, file: Any) -> int:
        """Size of a file in bytes."""

    def open(self, file: Any) -> IO[bytes]:
        """Open a file for reading."""

    def write(self, file: Any, text: str) -> None:
        """Write a file durably."""

    def make(self, folder: Any) -> None:
        """Create a folder if missing."""

    def modified(self, file: Any) -> float:
        """Modification time in seconds, by the store's clock."""

    def renew(self, file: Any) -> None:
        """Set the modification time to now."""

    def delete(self, file: Any) -> None:
        """Delete a file if it exists."""

    def aside(self, final: Any) -> Any:
        """The folder to which an uncommitted `final` is written."""

    def begin(self, final: Any) -> Any:
        """Create `aside(final)` empty and return it."""

    def commit(self, aside: Any, final: Any) -> None:
        """Turn the folder from `begin`, manifest included, into `final`."""

    def rename(self, folder: Any, name: str) -> None:
        """Rename a folder."""

    def remove(self, folder: Any) -> None:
        """Delete a folder if it exists."""


class Disk:
    """A file system that all ranks share; files are fsynced before the rename."""

    renames = True

    def names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def has(self, file: Path) -> bool:
        return file.is_file()

    def size(self, file: Path) -> int:
        return file.stat().st_size

    def open(self, file: Path) -> IO[bytes]:
        return file.open("rb")

    def write(self, file: Path, text: str) -> None:
        with file.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())

    def make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def modified(self, file: Path) -> float:
        return file.stat().st_mtime

    def renew(self, file: Path) -> None:
        os.utime(file)

    def delete(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def aside(self, final: Path) -> Path:
        """`final` with the suffix `.partial`."""
        return final.with_name(final.name + PARTIAL)

    def begin(self, final: Path) -> Path:
        aside = self.aside(final)
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        return aside

    def commit(self, aside: Path, final: Path) -> None:
        """An existing `final` is renamed first, so it is never half deleted."""
        sync_folder(aside)
        before = final.with_name(f"{final.name}.before{PARTIAL}")
        shutil.rmtree(before, ignore_errors=True)
        if final.exists():
            final.rename(before)
        aside.rename(final)
        sync_folder(final.parent)
        shutil.rmtree(before, ignore_errors=True)

    def rename(self, folder: Path, name: str) -> None:
        folder.rename(folder.with_name(name))

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)


class ObjectStore:
    """An object store: s3://, gs://, memory://, or file:// for tests on a disk."""

    renames = False

    def __init__(self, url: URL) -> None:
        try:
            import fsspec

            # No listing cache: other ranks write to the same folders.
            self.files, _ = fsspec.url_to_fs(str(url), use_listings_cache=False)
        except ImportError as error:
            fix = (
                f": {sys.executable} -m {pip_install('s3fs')}"
                if str(url).startswith("s3://")
                else ""
            )
            raise UserError(f"[checkpoint] {url}: {error}{fix}") from None
        except ValueError as error:
            raise UserError(
                f"[checkpoint] {url}: {error}. Give a path, or an address such as s3://BUCKET/RUN."
            ) from None

    def names(self, folder: URL) -> list[str]:
        try:
            found = self.files.ls(str(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:  # Each store raises its own: no credentials, no network.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"[checkpoint] {folder} cannot be read: {reason}. Check the address, the network "
                "and the credentials."
            ) from None
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
        # Some stores list the folder itself as an empty object.
        return sorted(names - {"", folder.name})

    def has(self, file: URL) -> bool:
        return bool(self.files.isfile(str(file)))

    def size(self, file: URL) -> int:
        return int(self.files.size(str(file)))

    def open(self, file: URL) -> IO[bytes]:
        stream: IO[bytes] = self.files.open(str(file), "rb")
        return stream

    def write(self, file: URL, text: str) -> None:
        with self.files.open(str(file), "wb") as stream:
            stream.write(text.encode())

    def make(self, folder: URL) -> None:
        self.files.makedirs(str(folder), exist_ok=True)

    def modified(self, file: URL) -> float:
        return float(self.files.modified(str(file)).timestamp())

    def renew(self, file: URL) -> None:
        with self.files.open(str(file), "rb") as stream:
            data = stream.read()
        with self.files.open(str(file), "wb") as stream:
            stream.write(data)

    def delete(self, file: URL) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(str(file))

    def aside(self, final: URL) -> URL:
        """`final` itself, which has no manifest yet."""
        return final

    def begin(self, final: URL) -> URL:
        self.remove(final)
        self.make(final)
        return final

    def commit(self, aside: URL, final: URL) -> None:
        """No action: the manifest commits the save."""

    def rename(self, folder: URL, name: str) -> None:
        """Copies file by file, the manifest last."""
        target, names = folder.with_name(name), self.names(folder)
        self.make(target)
        for file in sorted(names, key=lambda file: file == MANIFEST):
            self.files.copy(str(folder / file), str(target / file))
        self.remove(folder)

    def remove(self, folder: URL) -> None:
        """Deletes the manifest first, so a half-deleted folder is no checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(str(folder / MANIFEST))
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(str(folder), recursive=True)


def store_of(where: Location) -> Store:
    """The back end of a path or URL."""
    return ObjectStore(where) if isinstance(where, URL) else Disk()


def read_text(file: Location, most: int = -1) -> str:
    """Read a UTF-8 file, or its first `most` characters. Raises UnicodeDecodeError."""
    with store_of(file).open(file) as stream:
        return io.TextIOWrapper(stream, encoding="utf-8").read(most)
