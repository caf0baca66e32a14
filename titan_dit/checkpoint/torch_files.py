"""DCP's storage reader and writer, with SHA-256 digests and without torch's unpickling.

Checkpoints are shared between people. torch loads tensors with weights_only but unpickles
`.metadata` without restrictions. All uses of DCP's private interfaces are in this file.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult

from titan_dit.checkpoint import contents, plain_pickle
from titan_dit.checkpoint.contents import Contents
from titan_dit.checkpoint.staging import allocate, placed, power_of_two
from titan_dit.checkpoint.store import URL, Location, store_of
from titan_dit.config.section import UserError

try:  # New in torch 2.15, which warns about the module below.
    from torch.distributed.checkpoint.fsspec_filesystem import (  # type: ignore[import-not-found]
        _FileSystem as RemoteFiles,
    )
except ImportError:
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as RemoteFiles

METADATA = ".metadata"
TABLE, TENSOR_PER_TABLE = 4 << 20, 4
"""A table of tensors has at most TABLE bytes, or 1 / TENSOR_PER_TABLE of all other files' bytes.
torch.save alone writes 1,000 bytes per chunk; a table has at most 190 per chunk."""


class WrongTable(UserError):
    """A table of a checkpoint's tensors that cannot be used; `what` names the file and why."""

    def __init__(self, path: Location, why: str) -> None:
        self.what = f"{path.name}: {why}"
        super().__init__(
            f"[checkpoint] {path} is damaged or not plain DCP metadata: {why}. Nothing was loaded. "
            "Use another checkpoint."
        )


class Reader(filesystem.FileSystemReader):
    """DCP's file-system reader, which reads tensors.json in place of `.metadata`; takes URLs.

    `files` are those of the manifest, with their sizes and SHA-256.
    """

    def __init__(self, folder: Location, files: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(str(folder))
        self.folder, self.files = folder, files
        if isinstance(folder, URL):
            self.use(RemoteFiles(), str(folder))

    def use(self, files: Any, path: str) -> None:
        """Read with fsspec, without a listing cache: other ranks write to the same folder."""
        self.path = files.init_path(path, use_listings_cache=False)
        self.fs = files

    def contents(self) -> Contents:
        """The tensors. Raises UserError if their table is damaged, or imports a disallowed name."""
        name = contents.NAME if contents.NAME in self.files else METADATA
        try:
            data = self.whole(name)
            if name == contents.NAME:
                return contents.parse(data, self.files)
            return contents.checked(plain_pickle.read(data), self.files)
        except OSError:
            raise
        except Exception as error:  # A damaged pickle can raise anything.
            reason = str(error).rstrip(".") or type(error).__name__
            raise WrongTable(self.folder / name, reason) from None

    def check_metadata(self) -> None:
        """Raise UserError unless `.metadata`, which torch's own tools read, has the same table."""
        own = self.contents()
        theirs = Reader(self.folder, {n: f for n, f in self.files.items() if n != contents.NAME})
        if theirs.contents().placed() != own.placed():
            raise WrongTable(self.folder / METADATA, f"it differs from {contents.NAME}")

    def whole(self, name: str) -> bytes:
        """A file's bytes. Raises ValueError unless size and SHA-256 are those of the manifest."""
        expected, store = self.files[name], store_of(self.folder)
        path = self.folder / name
        if not store.has(path):
            raise ValueError("it is missing")
        size = expected["bytes"]
        if size > TABLE:
            others = sum(store.size(self.folder / file) for file in self.files if file != name)
            if size > others // TENSOR_PER_TABLE:
                raise ValueError("it is too large for the tensors that it describes")
        with store.open(path) as file:
            data = file.read(size + 1) if store.size(path) == size else b""
        if len(data) != size or hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise ValueError("its size or SHA-256 differs")
        return data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The contents as DCP's `Metadata`."""
        found = self.contents()
        places: dict[MetadataIndex, filesystem._StorageInfo] = {}
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in found.tensors.items():
            chunks, num_dims = [], len(entry.shape)
            for number, (file, first, length, *rest) in enumerate(entry.chunks):
                offsets, sizes = torch.Size(rest[:num_dims]), torch.Size(rest[num_dims:])
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                place = filesystem._StorageInfo(found.files[file], first, length)
                places[MetadataIndex(name, offsets, number)] = place
            properties = TensorProperties(dtype=entry.dtype)
            tensors[name] = TensorStorageMetadata(properties, entry.shape, chunks)
        about = StorageMeta(load_id=self.load_id)
        return Metadata(tensors, storage_data=places, storage_meta=about)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """As torch's. Raises UserError if a tensor cannot be read from its file."""
        try:
            self.check_stored(plan)
            return super().read_data(plan, planner)
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # torch.load raises any exception on a damaged file.
            raise UserError(
                f"[checkpoint] {self.folder} is damaged: a tensor cannot be read: "
                f"{reason_of(error)}. Use another checkpoint."
            ) from None

    def check_stored(self, plan: LoadPlan) -> None:
        """Raise ValueError if a tensor is compressed: then nothing bounds its size in memory."""
        parts = defaultdict[str, set[tuple[int, int]]](set)
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            parts[place.relative_path].add((place.offset, place.length))
        for name, places in parts.items():
            with store_of(self.folder).open(self.folder / name) as file:
                for first, length in sorted(places):
                    with zipfile.ZipFile(Slice(file, first, length)) as archive:
                        if sum(part.file_size for part in archive.infolist()) > length:
                            raise ValueError("it is compressed")


def reason_of(error: Exception) -> str:
    """Why a tensor could not be read, as one line; torch would advise to run the code in it."""
    if isinstance(error, pickle.UnpicklingError):
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        return f"it imports {asked[1]}" if asked else "it is not a plain tensor"
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__


class Slice(io.RawIOBase):
    """A read-only part of a file. torch's own class seeks wrongly relative to the end."""

    def __init__(self, file: Any, first: int, length: int) -> None:
        super().__init__()
        self.file, self.first, self.length, self.place = file, first, length, 0

    def readinto(self, buffer: Any) -> int:
        """Read at most as many bytes as are left."""
        left = max(self.length - self.place, 0)
        self.file.seek(self.first + self.place)
        read: int = self.file.readinto(memoryview(buffer)[:left]) if left else 0
        self.place += read
        return read

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset within the part, as a file's `seek`."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.length}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.place = start + offset
        return self.place

    def tell(self) -> int:
        """Position within the part, in bytes."""
        return self.place

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True


class OneByOne:
    """A planner that gives the writer plain tensors in host memory, in one reused buffer.

    torch's writer makes copies of GPU tensors, and of shards that share a storage, and keeps them
    until the file is closed: a second copy of the state in host memory. Here each tensor is valid
    until the next call.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self.planner = planner
        self.memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def resolve_data(self, item: WriteItem) -> Any:
        """The data of an item of the plan."""
        data = self.planner.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            return data
        # A float8 weight is of a class of torchao, which a reader may not have.
        is_plain = type(data) in (torch.Tensor, torch.nn.Parameter)
        if is_plain and data.is_cpu and data.untyped_storage().nbytes() == data.nbytes:
            return data
        if self.memory.nbytes < data.nbytes:
            self.memory = allocate(power_of_two(data.nbytes), pinned=data.is_cuda)
        copy = placed(self.memory.untyped_storage(), 0, data)
        copy.copy_(data)  # Not returned: for a float8 weight its result is of another class.
        return copy


class Writer(filesystem.FileSystemWriter):
    """DCP's file-system writer that records size and SHA-256 of this rank's files.

    The digest covers the bytes passed to the stream, so nothing is read back. Corruption on the
    disk is found when the checkpoint is loaded.
    """

    def __init__(self, folder: Location) -> None:
        remote = isinstance(folder, URL)
        super().__init__(
            str(folder),
            # Object stores have no fsync; torch would call os.sync() on the whole machine instead.
            sync_files=not remote,
            # `OneByOne` copies. Copying ahead would also initialise the first GPU of a CPU run.
            per_thread_copy_ahead=0,
        )
        files: Any = DigestedRemote() if remote else DigestedDisk()
        kept = {"use_listings_cache": False} if remote else {}
        self.path = files.init_path(str(folder), **kept)
        self.fs = files
        self.written: dict[str, dict[str, Any]] = files.written
        """File name -> bytes and SHA-256."""

    def write_plan(self, plan: SavePlan, planner: SavePlanner, rank: int) -> list[WriteResult]:
        """Write this rank's part of a plan; return where each item was written."""
        # Without collectives torch puts the rank into the names of the files by itself.
        self.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
        own = self.prepare_local_plan(plan)
        results: list[WriteResult] = self.write_data(own, OneByOne(planner)).value()
        return results

    def write_whole(self, name: str, data: bytes) -> None:
        """Write a file that holds no rank's shards, such as the metadata."""
        path = self.fs.concat_path(self.path, name)
        with self.fs.create_stream(path, "wb") as stream:
            stream.write(data)
            if self.sync_files:
                os.fsync(stream.fileno())

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, but raises the underlying OSError instead of torch.save's RuntimeError."""
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


class Digesting:
    """A write stream that counts bytes and updates a SHA-256."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.size, self.sha256 = 0, hashlib.sha256()

    def write(self, data: Any) -> Any:
        """Write `data` and update the digest."""
        done = self.stream.write(data)
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        return done

    def fileno(self) -> int:
        """Flush first: torch calls this before os.fsync, which skips Python's buffer."""
        self.stream.flush()
        number: int = self.stream.fileno()
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Digested:
    """Mixin of torch's file systems that records every written file."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """As torch's, with a digest for files opened to write."""
        with super().create_stream(path, mode) as stream:  # type: ignore[misc]
            if mode != "wb":
                yield stream
                return
            digesting = Digesting(stream)
            yield digesting
        entry = {"bytes": digesting.size, "sha256": digesting.sha256.hexdigest()}
        self.written[PurePosixPath(path).name] = entry


class DigestedDisk(Digested, filesystem.FileSystem):
    """torch's local files, with the SHA-256 of each written file."""


class DigestedRemote(Digested, RemoteFiles):  # type: ignore[misc]
    """torch's fsspec files, with the SHA-256 of each written file."""
