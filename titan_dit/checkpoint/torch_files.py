"""DCP's storage reader and writer, with safe unpickling and SHA-256 digests.

Checkpoints are shared between people. torch loads tensors with weights_only but unpickles
`.metadata` without restrictions. All uses of DCP's private interfaces are in this file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

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
PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
"""Globals allowed in DCP metadata, besides its own classes and dtypes."""


class Properties(TensorProperties):
    """A tensor's properties, as any supported torch pickles them."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Leave out the fields of a later torch: 2.15 added strides, which no load reads."""
        known = len(dataclasses.fields(TensorProperties))
        super().__setstate__(state[:known])  # type: ignore[no-untyped-call]


class PlainUnpickler(pickle.Unpickler):
    """An unpickler restricted to the classes of DCP metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed global; raise UnpicklingError for any other."""
        own = module == "torch.distributed.checkpoint.metadata" and "." not in name
        if own and name == "TensorProperties":
            return Properties
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if own or is_dtype or (module, name) in PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it imports {module}.{name}")


class Reader(filesystem.FileSystemReader):
    """DCP's file-system reader with restricted unpickling and URL support."""

    def __init__(self, folder: Location) -> None:
        super().__init__(str(folder))
        self.folder = folder
        if isinstance(folder, URL):
            self.use(RemoteFiles(), str(folder))

    def use(self, files: Any, path: str) -> None:
        """Read with fsspec, without a listing cache: other ranks write to the same folder."""
        self.path = files.init_path(path, use_listings_cache=False)
        self.fs = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`. Raises UserError if it is damaged or imports a disallowed global."""
        path = self.folder / METADATA
        try:
            with store_of(self.folder).open(path) as file:
                metadata = PlainUnpickler(file).load()
        except Exception as error:  # A damaged pickle can raise anything.
            raise UserError(
                f"[checkpoint] {path} is damaged or not plain DCP metadata: {error}. Nothing was "
                "loaded. Use another checkpoint."
            ) from None
        if not isinstance(metadata, Metadata):
            raise UserError(f"[checkpoint] {path} is not DCP metadata. Use another checkpoint.")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class OneByOne:
    """A planner for the writer, which gets plain tensors in host memory.

    torch's writer keeps what it has written until the file is closed. Its own copies of tensors of
    a GPU, and of shards that share a storage, would be a second state in host memory. These all lie
    in the same memory: one is valid until the next one is asked for.
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
        copy.copy_(data)  # It would return a float8 weight as another type of tensor.
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
        """Write this rank's part of a plan; return where each item is."""
        # Without collectives torch puts the rank into the names of the files by itself.
        self.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
        own = self.prepare_local_plan(plan)
        results: list[WriteResult] = self.write_data(own, OneByOne(planner)).value()
        return results

    def write_metadata(self, metadata: bytes) -> None:
        """Write `.metadata`."""
        path = self.fs.concat_path(self.path, METADATA)
        with self.fs.create_stream(path, "wb") as stream:
            stream.write(metadata)
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
