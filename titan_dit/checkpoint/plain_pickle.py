"""Reads the `.metadata` of checkpoints that have no tensors.json, without running code from it.

A pickle is a program: it imports names, calls what it has imported, and changes what is on its
stack. Here a name becomes an inert `Name`, a call becomes an `Instance` of its arguments, and only
an `Instance` takes a state. Nothing is imported or called, so there is nothing to change.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from titan_dit.checkpoint.contents import DTYPES, FORMAT
from titan_dit.config.schema import brief

DCP = "torch.distributed.checkpoint.metadata"
CLASSES = {
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
    """An imported name, which stands for a class or a dtype."""

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
    """The `Instance` of a call."""
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
        if (module, name) in CLASSES:
            return Name(name, is_class=True)
        raise pickle.UnpicklingError(f"it imports {brief(f'{module}.{name}')[1:-1]}")

    def load_call(self) -> None:
        """REDUCE and NEWOBJ: call a class."""
        arguments = self.stack.pop()
        self.stack[-1] = called(self.stack[-1], arguments)

    def load_state(self) -> None:
        """BUILD: give an instance its state, once."""
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


def load(data: bytes) -> Any:
    """Load a pickle as plain values and `Instance`s. Raises UnpicklingError."""
    try:
        return Plain(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception:  # Raised by Python's unpickler: an unknown opcode, an empty stack.
        what = "it is cut off, or has opcodes that DCP never writes"
        raise pickle.UnpicklingError(what) from None


def read(data: bytes) -> dict[str, Any]:
    """Convert a `.metadata` to the values of tensors.json.

    Raises UnpicklingError if it imports another name, and any exception if it is damaged.
    """
    found = state_of(load(data), "Metadata")
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
    return {"format": FORMAT, "files": list(files), "tensors": tensors}


def places_of(
    storage: Mapping[Instance, Instance],
) -> Iterator[tuple[str, tuple[int, ...], Mapping[str, Any]]]:
    """Yield each chunk's tensor, its offsets there, and where it is."""
    for key, value in storage.items():
        index, place = state_of(key, "MetadataIndex"), state_of(value, "_StorageInfo")
        if place.get("transform_descriptors"):
            raise pickle.UnpicklingError("its tensors are compressed")
        if not type(index["fqn"]) is type(place["relative_path"]) is str:
            raise pickle.UnpicklingError("it has a chunk without a tensor or a file")
        yield index["fqn"], size_of(index["offset"]), place


def state_of(value: Any, name: str) -> Any:
    """The state of an instance of a class."""
    if type(value) is not Instance or value.name != name:
        raise pickle.UnpicklingError(f"it has no {name} where DCP's metadata have one")
    return value.state


def size_of(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    if type(value) is not Instance or value.name != "Size":
        raise pickle.UnpicklingError("it has no Size where DCP's metadata have one")
    (numbers,) = value.arguments
    if type(numbers) is not tuple or not {*map(type, numbers)} <= {int}:
        raise pickle.UnpicklingError("it has a Size that is not of numbers")
    return numbers
