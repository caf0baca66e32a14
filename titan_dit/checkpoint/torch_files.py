"""torch's reader and writer of checkpoint files, made safe to read and checked as they are written.

Checkpoints are passed on from hand to hand. torch loads their tensors with weights_only, but
unpickles `.metadata` as it is. All that DCP does not promise to keep is touched here.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as RemoteFiles
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from titan_dit.checkpoint.store import URL, Place, store_of
from titan_dit.config.section import UserError

METADATA = ".metadata"
COPIED_AHEAD = 10_000_000
"""Bytes that are on their way from a device while others are written; torch's own choice."""
PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
"""What torch's metadata is made of, beside its own classes and the names of dtypes."""


class PlainUnpickler(pickle.Unpickler):
    """Builds the metadata's own classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for everything that the file wants to import."""
        own = module == "torch.distributed.checkpoint.metadata" and "." not in name
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if own or is_dtype or (module, name) in PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class Reader(filesystem.FileSystemReader):
    """torch's reader of a folder, with metadata that cannot run code."""

    def __init__(self, folder: Place) -> None:
        super().__init__(str(folder))
        self.folder = folder
        if isinstance(folder, URL):
            self.use(RemoteFiles(), str(folder))

    def use(self, files: Any, path: str) -> None:
        """Read with fsspec; no listing is kept, as other ranks write there, too."""
        self.path = files.init_path(path, use_listings_cache=False)
        self.fs = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which tensors there are, and where."""
        path = self.folder / METADATA
        try:
            with store_of(self.folder).open(path) as file:
                metadata = PlainUnpickler(file).load()
        except Exception as error:  # Unpickling raises whatever the damage leads to.
            raise UserError(
                f"[checkpoint] {path} is damaged, or no plain metadata: {error}. Nothing of it was "
                "loaded. Use another checkpoint."
            ) from None
        if not isinstance(metadata, Metadata):
            raise UserError(f"[checkpoint] {path} is no metadata.")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Writer(filesystem.FileSystemWriter):
    """torch's writer of a folder; `written` has the bytes and SHA-256 of this rank's files.

    They are taken of what was to be written, not of what the disk gives back: a disk that lies is
    found out when the checkpoint is loaded, and an object store need not send it all back.
    """

    def __init__(self, folder: Place, *, on_cpu: bool) -> None:
        remote = isinstance(folder, URL)
        super().__init__(
            str(folder),
            # An object store has no fsync, and torch would sync every disk of the machine instead.
            sync_files=not remote,
            # Tensors on the CPU need no copying ahead, for which a thread would open the first GPU.
            per_thread_copy_ahead=0 if on_cpu else COPIED_AHEAD,
        )
        files: Any = DigestedRemote() if remote else DigestedDisk()
        kept = {"use_listings_cache": False} if remote else {}
        self.path = files.init_path(str(folder), **kept)
        self.fs = files
        self.written: dict[str, dict[str, Any]] = files.written
        """What this rank has written, by the file's name."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, but what the disk says is raised, not what torch.save makes of it."""
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


class Digesting:
    """A stream to write to that counts and digests what goes through it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.size, self.sha256 = 0, hashlib.sha256()

    def write(self, data: Any) -> Any:
        """Write all of it, and remember it."""
        done = self.stream.write(data)
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        return done

    def fileno(self) -> int:
        """Asked for before an fsync, which knows nothing of what Python still holds back."""
        self.stream.flush()
        number: int = self.stream.fileno()
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Digested:
    """Keeps what is known of each file that was written through it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """As torch's."""
        with super().create_stream(path, mode) as stream:  # type: ignore[misc]
            if mode != "wb":
                yield stream
                return
            digesting = Digesting(stream)
            yield digesting
        entry = {"bytes": digesting.size, "sha256": digesting.sha256.hexdigest()}
        self.written[PurePosixPath(path).name] = entry

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """As torch's: the metadata gets its name last."""
        super().rename(path, new_path)  # type: ignore[misc]
        self.written[PurePosixPath(new_path).name] = self.written.pop(PurePosixPath(path).name)


class DigestedDisk(Digested, filesystem.FileSystem):
    """Files of a disk."""


class DigestedRemote(Digested, RemoteFiles):
    """Files of an object store."""
