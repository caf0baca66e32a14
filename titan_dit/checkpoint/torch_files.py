"""DCP's storage reader and writer, with SHA-256 digests and without torch's unpickling.

tensors.json says what tensors there are, and where. The `.metadata` of checkpoints without
tensors.json is read by a table of classes: nothing in it is imported or called.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, ClassVar, TypeAlias

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

from titan_dit.checkpoint.staging import allocate, placed, power_of_two
from titan_dit.checkpoint.store import URL, Location, store_of
from titan_dit.config import schema, user_text
from titan_dit.config.schema import brief
from titan_dit.config.section import UserError

CONTENTS = "tensors.json"
CONTENTS_FORMAT = "titan_dit.tensors/1"
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.bool, torch.complex64, torch.complex128),
    )
}
"""Dtypes of a checkpoint's tensors, by name."""
LARGEST = 2**63 - 1
"""Maximum bytes of a tensor."""
DIMS = 64
"""Maximum dims of a tensor, the limit of torch's kernels."""
AROUND = 1 << 16
"""Maximum bytes that torch.save adds to a tensor's bytes."""
SCHEMA = {
    "format": str,
    "files": tuple[str, ...],
    "tensors": schema.Each({"dtype": str, "shape": tuple[schema.COUNT, ...], "chunks": schema.ANY}),
}
ContentsRow: TypeAlias = list[int]
"""A chunk, as in tensors.json."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: Sequence[ContentsRow]


@dataclass(frozen=True)
class Contents:
    """All tensors of a checkpoint."""

    files: Sequence[str]
    """Names of the files with tensors."""
    tensors: Mapping[str, Entry]

    def placed(self) -> dict[str, Any]:
        """Name -> (dtype, shape, sorted chunks), equal for equal tables in any order."""
        return {
            name: (
                entry.dtype,
                entry.shape,
                sorted((self.files[file], *rest) for file, *rest in entry.chunks),
            )
            for name, entry in self.tensors.items()
        }


def contents_json(metadata: Any, places: Mapping[Any, Any]) -> bytes:
    """The contents of tensors.json, given DCP's metadata and where each chunk was written."""
    files: dict[str, int] = {}
    found: dict[str, dict[str, Any]] = {
        name: {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "chunks": [],
        }
        for name, entry in metadata.state_dict_metadata.items()
    }
    sizes = {
        (name, tuple(chunk.offsets)): chunk.sizes
        for name, entry in metadata.state_dict_metadata.items()
        for chunk in entry.chunks
    }
    for index, place in places.items():
        number = files.setdefault(place.relative_path, len(files))
        offsets = tuple(index.offset)
        row = [number, place.offset, place.length, *offsets, *sizes[index.fqn, offsets]]
        found[index.fqn]["chunks"].append(row)
    whole = {"format": CONTENTS_FORMAT, "files": list(files), "tensors": found}
    return json.dumps(whole, separators=(",", ":")).encode()


def parse_contents(data: bytes, files: Mapping[str, Mapping[str, Any]]) -> Contents:
    """Read tensors.json; `files`: the manifest's. Raises UserError for a wrong value."""
    try:
        # Not `parse_json`, which walks through all values: 1,024 ranks have a million chunks.
        values = json.loads(data, object_pairs_hook=user_text.once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not valid JSON: {error}") from None
    return checked_contents(values, files)


def checked_contents(values: Any, files: Mapping[str, Mapping[str, Any]]) -> Contents:
    """Build the contents. Raises UserError unless every chunk lies in its tensor and its file."""
    schema.check(values, SCHEMA, "its table")
    if values["format"] != CONTENTS_FORMAT:
        raise UserError(f"its format is {schema.brief(values['format'])}, not {CONTENTS_FORMAT}")
    names = values["files"]
    if unknown := [name for name in names if name not in files]:
        raise UserError(
            f"it refers to {schema.brief(unknown[0])}, which the manifest does not list"
        )
    if len(set(names)) < len(names):
        raise UserError("it lists a file twice")
    left = [files[name]["bytes"] for name in names]
    ends = list(left)
    found = {}
    for name, table in values["tensors"].items():
        entry = entry_of(name, table)
        check_chunks(name, entry, ends, left)
        found[name] = entry
    if lost := [name for name, size in zip(names, left, strict=True) if size < 0]:
        raise UserError(f"its tensors take more bytes of {lost[0]} than it has")
    return Contents(names, found)


def entry_of(name: str, table: Mapping[str, Any]) -> Entry:
    """A tensor's entry, whose chunks are still to be checked.

    Raises UserError for a wrong dtype, shape or list of chunks.
    """
    where = f"its tensor {schema.brief(name)}"
    if table["dtype"] not in DTYPES:
        raise UserError(f"{where} has the dtype {schema.brief(table['dtype'])}")
    dtype, shape = DTYPES[table["dtype"]], table["shape"]
    if len(shape) > DIMS:
        raise UserError(f"{where} has {len(shape):,} dims, more than {DIMS}")
    if math.prod(shape) * dtype.itemsize > LARGEST or math.prod(filter(None, shape)) > LARGEST:
        raise UserError(f"{where} has more than 2^63 bytes")
    if not isinstance(table["chunks"], list):
        raise UserError(f"{where} has no list of chunks")
    return Entry(dtype, torch.Size(shape), table["chunks"])


def check_chunks(name: str, entry: Entry, ends: Sequence[int], left: list[int]) -> None:
    """Raise UserError unless the chunks make up the tensor and lie in their files.

    `ends`: bytes of each file. `left`: bytes of each file not yet taken by a chunk; updated here.
    """
    num_dims, shape, size = len(entry.shape), entry.shape, entry.dtype.itemsize
    elements, starts = 0, set()
    for row in entry.chunks:
        # 1,024 ranks have a million chunks: plain comparisons, not a schema.
        if type(row) is not list or len(row) != 3 + 2 * num_dims or {*map(type, row)} != {int}:
            raise UserError(f"its tensor {schema.brief(name)} has a chunk that is not of numbers")
        file, first, length = row[:3]
        offsets, sizes = row[3 : 3 + num_dims], row[3 + num_dims :]
        held = math.prod(sizes)
        dims = zip(offsets, sizes, shape, strict=True)
        if not all(start >= 0 and part >= 0 and start + part <= dim for start, part, dim in dims):
            raise UserError(f"its tensor {schema.brief(name)} has a chunk outside of its shape")
        if not (0 <= file < len(ends) and first >= 0 and first + length <= ends[file]):
            raise UserError(f"its tensor {schema.brief(name)} has a chunk outside of its file")
        if not held * size <= length <= held * size + AROUND:
            raise UserError(
                f"its tensor {schema.brief(name)} has a chunk of {held * size:,} bytes in "
                f"{length:,} of its file"
            )
        left[file] -= length
        elements += held
        starts.add(tuple(offsets))
    if elements != math.prod(shape) or len(starts) < len(entry.chunks):
        raise UserError(f"the chunks of its tensor {schema.brief(name)} do not make up its shape")


DCP = "torch.distributed.checkpoint.metadata"
PLAIN_CLASSES = {
    (DCP, "Metadata"),
    (DCP, "MetadataIndex"),
    (DCP, "TensorStorageMetadata"),
    (DCP, "ChunkStorageMetadata"),
    (DCP, "TensorProperties"),
    (DCP, "StorageMeta"),
    (DCP, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
"""(module, name) of all classes in DCP's checkpoint metadata; dtypes are allowed, too."""


OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL"),
)
"""Opcodes of plain values, run as by Python. `Plain` overrides calls, states and dict entries."""


class Name:
    """Stand-in for an allowed global of a pickle (a class or a dtype); nothing is imported."""

    __slots__ = ("is_class", "name")

    def __init__(self, name: str, *, is_class: bool) -> None:
        self.name, self.is_class = name, is_class


class Instance:
    """A recorded call of a class: the arguments, and the state that the pickle sets."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


def called(function: Any, arguments: Any) -> Instance:
    """The `Instance` of a call.

    Raises UnpicklingError unless it is of a class of DCP's metadata.
    """
    if not (type(function) is Name and function.is_class and type(arguments) is tuple):
        raise pickle.UnpicklingError("it calls what is no class of DCP's metadata")
    return Instance(function.name, arguments)


def check_keys(keys: Sequence[Any]) -> None:
    """Raise UnpicklingError unless these can be keys.

    The hash of a tuple that holds a tuple twice, sixty levels deep, would take years.
    """
    if not all(type(key) in (str, Instance) for key in keys):
        raise pickle.UnpicklingError("it has a dict whose keys are neither text nor an instance")


PYTHONS: Mapping[int, Callable[[Any], None]] = pickle._Unpickler.dispatch
"""Opcode -> method of Python's own unpickler."""


def code(name: str) -> int:
    """The byte of an opcode."""
    opcode: bytes = getattr(pickle, name)
    return opcode[0]


class Plain(pickle._Unpickler):
    """Python's own unpickler, restricted to the opcodes of DCP's metadata.

    The unpickler in C would apply a state to any object on its stack, and a large memo index would
    fill the memory.
    """

    stack: list[Any]
    """The values that the program has made."""

    def find_class(self, module: Any, name: Any) -> Name:
        """Return an allowed name, never the object; raise UnpicklingError for any other."""
        if module == "torch" and name in DTYPES:
            return Name(name, is_class=False)
        if (module, name) in PLAIN_CLASSES:
            return Name(name, is_class=True)
        raise pickle.UnpicklingError(f"it imports {brief(f'{module}.{name}')[1:-1]}")

    def load_call(self) -> None:
        """REDUCE and NEWOBJ: call a class."""
        arguments = self.stack.pop()
        self.stack[-1] = called(self.stack[-1], arguments)

    def load_state(self) -> None:
        """BUILD: give an instance its state, once.

        Raises UnpicklingError for anything else, or twice.
        """
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not Instance or target.state is not None:
            raise pickle.UnpicklingError("it changes what is no instance of DCP's metadata")
        target.state = state

    def load_entry(self) -> None:
        """SETITEM: add an entry to a dict."""
        check_keys(self.stack[-2:-1])
        PYTHONS[code("SETITEM")](self)

    def load_entries(self) -> None:
        """SETITEMS: add the entries above the mark to a dict."""
        check_keys(self.stack[::2])
        PYTHONS[code("SETITEMS")](self)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code(name): PYTHONS[code(name)] for name in OPCODES},
        **dict.fromkeys((code("REDUCE"), code("NEWOBJ")), load_call),
        code("BUILD"): load_state,
        code("SETITEM"): load_entry,
        code("SETITEMS"): load_entries,
    }


def load_plain_pickle(data: bytes) -> Any:
    """Load a pickle as plain values and `Instance`s. Raises UnpicklingError."""
    try:
        return Plain(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception:  # Raised by Python's unpickler: an unknown opcode, an empty stack.
        what = "it is cut off, or has opcodes that DCP never writes"
        raise pickle.UnpicklingError(what) from None


def read_plain_pickle(data: bytes) -> dict[str, Any]:
    """Convert a `.metadata` to the values of tensors.json.

    Raises UnpicklingError if it imports another name, and any exception if it is damaged.
    """
    found = state_of(load_plain_pickle(data), "Metadata")
    files: dict[str, int] = {}
    sizes: dict[tuple[Any, ...], tuple[int, ...]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for name, kind in found["state_dict_metadata"].items():
        entry = state_of(kind, "TensorStorageMetadata")
        dtype = state_of(entry["properties"], "TensorProperties")[0]
        if type(name) is not str or type(dtype) is not Name:
            raise pickle.UnpicklingError("it has a tensor without a name or a dtype")
        tensors[name] = {"dtype": dtype.name, "shape": size_of(entry["size"]), "chunks": []}
        for each in entry["chunks"]:
            chunk = state_of(each, "ChunkStorageMetadata")
            sizes[name, *size_of(chunk["offsets"])] = size_of(chunk["sizes"])
    for name, offsets, place in places_of(found["storage_data"]):
        number = files.setdefault(place["relative_path"], len(files))
        row = [number, place["offset"], place["length"], *offsets, *sizes[name, *offsets]]
        tensors[name]["chunks"].append(row)
    return {"format": CONTENTS_FORMAT, "files": list(files), "tensors": tensors}


def places_of(
    storage: Mapping[Instance, Instance],
) -> Iterator[tuple[str, tuple[int, ...], Mapping[str, Any]]]:
    """Yield each chunk's tensor, its offsets there, and where it is.

    Raises UnpicklingError for compressed tensors, or a chunk without tensor or file.
    """
    for key, value in storage.items():
        index, place = state_of(key, "MetadataIndex"), state_of(value, "_StorageInfo")
        if place.get("transform_descriptors"):
            raise pickle.UnpicklingError("its tensors are compressed")
        if not type(index["fqn"]) is type(place["relative_path"]) is str:
            raise pickle.UnpicklingError("it has a chunk without a tensor or a file")
        yield index["fqn"], size_of(index["offset"]), place


def state_of(value: Any, name: str) -> Any:
    """The state of an instance of a class. Raises UnpicklingError for any other object."""
    if type(value) is not Instance or value.name != name:
        raise pickle.UnpicklingError(f"it has no {name} where DCP's metadata have one")
    return value.state


def size_of(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size. Raises UnpicklingError for any other object."""
    if type(value) is not Instance or value.name != "Size":
        raise pickle.UnpicklingError("it has no Size where DCP's metadata have one")
    (numbers,) = value.arguments
    if type(numbers) is not tuple or not {*map(type, numbers)} <= {int}:
        raise pickle.UnpicklingError("it has a Size that is not of numbers")
    return numbers


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

    `files` are those of the manifest, with their sizes and SHA-256. The table of tensors is read
    once, however often tensors are read.
    """

    def __init__(self, folder: Location, files: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(str(folder))
        self.folder, self.files = folder, files
        self.wanted: Collection[str] | None = None
        """Names of the tensors that `read_metadata` returns; None: all."""
        if isinstance(folder, URL):
            self.use(RemoteFiles(), str(folder))

    def use(self, files: Any, path: str) -> None:
        """Read with fsspec, without a listing cache: other ranks write to the same folder."""
        self.path = files.init_path(path, use_listings_cache=False)
        self.fs = files

    @cached_property
    def contents(self) -> Contents:
        """The tensors.

        Raises UserError if their table is damaged or imports a disallowed name, OSError if it
        cannot be read.
        """
        name = self.table
        try:
            data = self.whole(name)
            if name == CONTENTS:
                return parse_contents(data, self.files)
            return checked_contents(read_plain_pickle(data), self.files)
        except OSError:
            raise
        except Exception as error:  # A damaged pickle can raise anything.
            reason = str(error).rstrip(".") or type(error).__name__
            raise WrongTable(self.folder / name, reason) from None

    @property
    def table(self) -> str:
        """Name of the file with the table of tensors."""
        return CONTENTS if CONTENTS in self.files else METADATA

    @property
    def table_bytes(self) -> int:
        """Size of the table of tensors."""
        return int(self.files[self.table]["bytes"])

    def check_metadata(self) -> None:
        """Raise UserError unless `.metadata`, which torch's own tools read, has the same table."""
        own = self.contents
        theirs = Reader(self.folder, {n: f for n, f in self.files.items() if n != CONTENTS})
        if theirs.contents.placed() != own.placed():
            raise WrongTable(self.folder / METADATA, f"it differs from {CONTENTS}")

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
        """The wanted contents as DCP's `Metadata`. Raises UserError or OSError, see `contents`."""
        found = self.contents
        places: dict[MetadataIndex, filesystem._StorageInfo] = {}
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in found.tensors.items():
            if self.wanted is not None and name not in self.wanted:
                continue
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
        """Load a plan's tensors in place. Raises UserError if one cannot be read from its file."""
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
        """Move to an offset within the part, as a file's `seek`.

        Raises OSError for an offset before the part.
        """
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.length}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.place = start + offset
        return self.place

    def tell(self) -> int:
        """Position within the part, in bytes."""
        return self.place

    def readable(self) -> bool:
        """True: the part can be read."""
        return True

    def seekable(self) -> bool:
        """True: `seek` works."""
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
        """Write a plan's tensors; raises the OSError itself, not torch.save's RuntimeError."""
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
        """Open a file; when opened to write, it gets a digest."""
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
