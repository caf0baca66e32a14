"""Files of tensors, read and written one tensor at a time, without executing code from them."""

from __future__ import annotations

import argparse
import glob
import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from titan_dit.checkpoint.store import Location
from titan_dit.config.section import UserError, few
from titan_dit.data.files import check_unpacked
from titan_dit.ranks import disk_errors
from titan_dit.system.files import PARTIAL, reason_of, replacing, write_json
from titan_dit.system.progress import ProgressLine, count, following


class OnDemand(Mapping[str, Tensor]):
    """Tensors by name; each access reads or computes the tensor again, and none is kept."""

    def __init__(self, outline: Mapping[str, Tensor], get: Callable[[str], Tensor]) -> None:
        self.outline = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in outline.items()
        }
        """Shapes and dtypes, as tensors on the meta device."""
        self.get_tensor = get

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.outline:
            raise KeyError(name)
        return self.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self.outline  # Mapping's own would read the tensor.

    def __iter__(self) -> Iterator[str]:
        return iter(self.outline)

    def __len__(self) -> int:
        return len(self.outline)


def outline_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors with the same shapes and dtypes, without reading any values."""
    return tensors.outline if isinstance(tensors, OnDemand) else tensors


def numel(tensors: Mapping[str, Tensor]) -> int:
    """Number of elements of all tensors."""
    return sum(tensor.numel() for tensor in outline_of(tensors).values())


def dtypes(tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of the floating dtypes, such as "float32"."""
    kinds = {tensor.dtype for tensor in outline_of(tensors).values()}
    return {str(kind)[6:] for kind in kinds if kind.is_floating_point}


def writing(target: Path, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Show how much of `target`, a file or a folder of these tensors, has been written."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    progress = ProgressLine(total, "B", what=f"writing {target.name}", form=count)
    return following(partial(bytes_aside, target.resolve()), progress)


def bytes_aside(target: Path) -> int:
    """Bytes of the temporary file or folder that becomes `target`."""
    size = 0
    for aside in target.parent.glob(f"{glob.escape(target.name)}*{PARTIAL}"):
        # os.walk passes over folders that are renamed in between; Path.rglob raises.
        inside = (Path(folder, name) for folder, _, names in os.walk(aside) for name in names)
        for path in (aside, *inside):
            with suppress(OSError):
                size += path.stat().st_size if path.is_file() else 0
    return size


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAPPED = 128 * 2**20
"""Bytes that are read of a .pt file before its pages are released."""


def open_safetensors(path: Path) -> tuple[OnDemand, dict[str, str]]:
    """The tensors and the metadata of a file. Raises SafetensorError or OSError on failure."""
    outline = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            kind = DTYPES.get(part.get_dtype())
            # A dtype that none of our networks has: its outline is the tensor itself.
            known = file.get_tensor(name) if kind is None else None
            outline[name] = (
                torch.empty(part.get_shape(), dtype=kind, device="meta") if known is None else known
            )
        metadata = dict(file.metadata() or {})

    def get(name: str) -> Tensor:
        # Opened anew: the pages of a file that stays mapped count as this process's memory.
        with reading(path), safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return OnDemand(outline, get), metadata


@contextmanager
def reading(path: Location) -> Iterator[None]:
    """Turn an error of reading tensors into a UserError that names their file or checkpoint."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {reason_of(error)}. Restore it.") from None


class Pickled:
    """A .pt file, memory-mapped. A file of torch before 1.6 cannot be mapped and is held whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.read, self.is_mapped = path, 0, True
        self.content: Mapping[str, Any] | None = None

    def whole(self) -> Mapping[str, Any]:
        """The content. Raises UserError for code, a damaged file, or anything but a dict."""
        if self.content is None:
            self.content = self.load()
        return self.content

    def load(self) -> Mapping[str, Any]:
        """Call torch.load with weights_only=True, which executes no code.

        Raises UserError for damage and other objects.
        """
        try:
            content = self.torch_load()
        except pickle.UnpicklingError as error:
            asked = re.search(r"GLOBAL ([\w.]+)", str(error))
            why = f"it imports {asked[1]}" if asked else "it is not a plain pickle"
            raise UserError(
                f"{self.path}: not a file of plain weights: {why}. Loading it can execute code, so "
                "it was not loaded. Save only the state dict: torch.save(model.state_dict(), FILE)."
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read: {reason_of(error)}. Restore it."
            ) from None
        except Exception as error:  # torch.load raises any exception on a damaged file.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"{self.path}: damaged, or not written by torch.save ({reason}). Restore it."
            ) from None
        if not isinstance(content, Mapping):
            raise UserError(
                f"{self.path}: holds a {type(content).__name__}, not a state dict. {SAVE_STATE}"
            )
        return content

    def torch_load(self) -> Any:
        """Call torch.load, memory-mapped unless the file's format is older than torch 1.6."""
        check_unpacked(self.path, self.path.stat().st_size)
        # DiT's train.py stores its argparse.Namespace with the weights; it holds plain values.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickle protocols.
            if self.is_mapped:
                try:
                    return torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
                except RuntimeError as error:
                    if "mmap" not in str(error):
                        raise
                    self.is_mapped = False
            return torch.load(self.path, map_location="cpu", weights_only=True)

    def get(self, *keys: Any) -> Tensor:
        """A copy of a tensor of the content."""
        found: Any = self.whole()
        for key in keys:
            found = found[key]
        with reading(self.path):
            tensor = torch.as_tensor(found).clone()
        self.read += tensor.nbytes
        del found
        if self.is_mapped and self.read > MAPPED:
            # The pages of a file that stays mapped count as this process's memory.
            self.content, self.read = None, 0
        return tensor


INDEX = ".index.json"
"""Suffix of the index of a file in shards."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def write_safetensors(
    folder: Path,
    whole: str,
    outline: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    largest_shard: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file `whole`, or shards of at most `largest_shard` bytes and their index.

    `outline`: shapes and dtypes, in the order in which `tensors` yields.
    """
    shards = list(sharded(outline, largest_shard))
    stem, count = whole.removesuffix(".safetensors"), len(shards)
    names = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    names = [whole] if len(shards) == 1 else names
    source = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        write_tensor_file(folder / name, shard, source, metadata or {"format": "pt"})
    if len(shards) > 1:
        table = {k: name for name, shard in zip(names, shards, strict=True) for k in shard}
        size = sum(tensor.nbytes for tensor in outline.values())
        index = {"metadata": {"total_size": size}, "weight_map": table}
        write_json(folder / (whole + INDEX), index)


def write_tensor_file(
    file: Path,
    outline: Mapping[str, Tensor],
    source: Iterator[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Durably write the next tensors of `source`, which must match `outline`."""
    with file.open("wb") as stream:
        stream.write(header(outline, metadata))
        for name, expected in outline.items():
            found, tensor = next(source)
            given = (found, tensor.shape, tensor.dtype)
            assert given == (name, expected.shape, expected.dtype), given
            flat = tensor.detach().cpu().contiguous().flatten()
            stream.write(flat.view(torch.uint8).numpy().data)
            del found, tensor, flat  # Before the next one is made.
        stream.flush()
        os.fsync(stream.fileno())


def header(outline: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header's length and the header, padded so that the tensors are aligned."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in outline.items():
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sharded(
    tensors: Mapping[str, Tensor], largest: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Cut tensors, in their order, into shards of at most `largest` bytes, or one tensor."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and largest is not None and size + tensor.nbytes > largest:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


WEIGHT_SUFFIXES = (".pt", ".pth", ".safetensors")
SAVE_STATE = "Save the state dict: torch.save(model.state_dict(), FILE)."
"""The fix for a file of anything else."""
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Names of wrapper modules that may occur anywhere in a parameter's name."""
REPLICA = "module."
"""Prefix that DistributedDataParallel adds, once for each wrapper."""
ADAM_KEYS = ("step", "exp_avg", "exp_avg_sq")
Getter: TypeAlias = Callable[..., Tensor]
"""(*keys) -> the tensor under nested keys of a file."""


@dataclass(frozen=True)
class WeightFile:
    """Contents of a weight file."""

    ema: OnDemand
    model: OnDemand
    """Non-averaged weights; the same mapping as `ema` if the file has only one."""
    adam: dict[str, Mapping[str, Tensor]] | None
    """AdamW state by parameter; None if missing or not of `model`."""
    metadata: dict[str, str]
    arguments: dict[str, Any]
    """Arguments of the script that wrote a .pt file; empty if unknown."""


def read_weight_file(path: Path) -> WeightFile:
    """Read a state dict, or a dict with "ema", "model" and "opt".

    Raises UserError for any other file, and for one that would execute code when loaded.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. Correct the path.")
    if path.suffix not in WEIGHT_SUFFIXES:
        raise UserError(f"{path}: its name must end in {', '.join(WEIGHT_SUFFIXES)}. Rename it.")
    content, metadata, get = open_file(path)
    parts = [name for name in ("ema", "model") if name in content]
    found = {name: unwrap_weights(content[name], f"{path}: {name}", get, (name,)) for name in parts}
    if not found:
        found = {"model": unwrap_weights(content, str(path), get)}
    ema, model = found.get("ema"), found.get("model")
    if ema is None or model is None:
        ema = model = ema or model
    assert ema is not None
    assert model is not None
    adam = adam_of(content.get("opt"), model, get)
    return WeightFile(ema, model, adam, metadata, arguments_of(content.get("args")))


def open_file(path: Path) -> tuple[Mapping[str, Any], dict[str, str], Getter]:
    """A file's content by its keys, its metadata, and a function that reads one tensor.

    Names "ema.x" and "model.x" in a .safetensors file become nested dicts. Raises UserError if it
    is damaged.
    """
    if path.suffix != ".safetensors":
        file = Pickled(path)
        return file.whole(), {}, file.get
    try:
        tensors, metadata = open_safetensors(path)
    except (SafetensorError, OSError) as error:
        reason = reason_of(error)
        raise UserError(
            f"{path}: not a readable safetensors file ({reason}). Restore it."
        ) from None
    content: dict[str, Any] = {}
    for name, tensor in tensors.outline.items():
        head, _, rest = name.partition(".")
        if head in ("ema", "model"):
            content.setdefault(head, {})[rest] = tensor
        else:
            content[name] = tensor
    return content, metadata, lambda *keys: tensors[".".join(keys)]


def unwrap_weights(state: Any, where: str, get: Getter, keys: tuple[str, ...] = ()) -> OnDemand:
    """A state dict without the name prefixes of DistributedDataParallel and torch.compile.

    `get(*keys, name)` reads a tensor. Raises UserError for anything else.
    """
    if not isinstance(state, Mapping):
        raise UserError(f"{where} is a {type(state).__name__}, not a state dict. {SAVE_STATE}")
    if not state:
        raise UserError(f"{where} is empty. {SAVE_STATE}")
    outline: dict[str, Tensor] = {}
    named: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            raise UserError(
                f"{where}: {name} is a dict. If it holds the weights, save only those: "
                f'torch.save(content["{name}"], FILE).'
            )
        if not isinstance(value, Tensor) or not is_dense(value):
            raise UserError(
                f"{where}: {name} is no dense tensor, so this is no state dict. {SAVE_STATE}"
            )
        bare = without_wrappers(str(name))
        if bare in named:
            raise UserError(f"{where} holds {named[bare]} and {name}: keep one of them.")
        outline[bare], named[bare] = value, name
    return OnDemand(outline, lambda bare: get(*keys, named[bare]))


def is_dense(value: Tensor) -> bool:
    """True for a strided tensor whose storage holds all its elements.

    False for an expanded view: a copy of it could take any amount of memory.
    """
    if value.layout != torch.strided or value.is_quantized:
        return False
    return value.is_meta or value.nbytes <= value.untyped_storage().nbytes()


def without_wrappers(name: str) -> str:
    """A parameter's name without the wrappers of torch.compile, FSDP and DDP, in any order."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    while name.startswith(REPLICA):
        name = name.removeprefix(REPLICA)
    return name


def adam_of(
    state: Any, model: Mapping[str, Tensor], get: Getter
) -> dict[str, Mapping[str, Tensor]] | None:
    """Map an AdamW state dict to parameter names; its indices follow the model's name order.

    None for any other state, such as another optimizer's or one of fewer parameters.
    """
    try:
        (group,) = state["param_groups"]
        named = dict(zip(group["params"], model, strict=True))
        return {
            named[number]: OnDemand(
                {key: torch.as_tensor(entry[key]) for key in ADAM_KEYS},
                partial(get, "opt", "state", number),
            )
            for number, entry in state["state"].items()
        } or None
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None


def arguments_of(stored: Any) -> dict[str, Any]:
    """The arguments of the script that wrote the file; empty if there are none."""
    values = vars(stored) if isinstance(stored, argparse.Namespace) else stored
    return dict(values) if isinstance(values, Mapping) else {}


def read_tensors(path: Path, flag: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Read all tensors of a .safetensors file.

    Raises UserError if it is damaged, or a tensor in `names` is missing or empty.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{flag} {path}: not a readable safetensors file ({error}). Restore it."
        ) from None
    if missing := [name for name in names if name not in tensors]:
        raise UserError(
            f"{flag} {path}: {', '.join(missing)} missing; it must hold {', '.join(names)}. Add "
            "what is missing."
        )
    if empty := [name for name in names if not tensors[name].numel()]:
        raise UserError(f"{flag} {path}: {', '.join(empty)} is empty. Give at least one sample.")
    return tensors


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write --out, a .safetensors file with metadata, or a .pt file by its suffix; atomically."""
    then, also = "Then repeat the command.", (RuntimeError, SafetensorError)
    with disk_errors.writing(f"--out {path}", then, also), replacing(path) as aside:
        if path.suffix == ".safetensors":
            save_file(dict(tensors), aside, metadata=dict(metadata or {}))
        else:
            torch.save(dict(tensors), aside)


def not_finite(rows: Tensor, first: int = 0) -> str:
    """The rows [b, ...] that hold NaN or infinity, as text, counted from `first`; "" if none."""
    if not rows.is_floating_point():
        return ""
    lost = (~rows.isfinite().unsqueeze(-1).flatten(1).all(1)).nonzero()[:, 0] + first
    return few(lost.tolist())


def check_finite(path: Path, flag: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for NaN and infinity in the inputs of a network, [b, ...] by name."""
    for name, tensor in tensors.items():
        if lost := not_finite(tensor):
            raise UserError(
                f"{flag} {path}: {name} of samples {lost} is NaN or infinite. Remove them."
            )


def check_labels(path: Path, flag: str, labels: Tensor, num_classes: int) -> None:
    """Raise UserError for labels that are no integers, or above num_classes.

    num_classes or a negative is no label.
    """
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.max() > num_classes:
        raise UserError(
            f"{flag} {path}: labels must be integers up to {num_classes}; {num_classes} means no "
            "label. Correct them."
        )
