"""Folders of transformers: config.json, model.safetensors whole or in shards, tokenizer files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.interop import weight_file
from titan_dit.system.files import PARTIAL, sync_folder

CONFIG = "config.json"
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
"""Added to the name of a file that is in shards."""
LARGEST_SHARD = 5 * 10**9
"""Bytes of a file, as transformers' own limit once was."""
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


def is_directory(path: Path) -> bool:
    """True if a path is a folder of transformers."""
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict with one entry in `architectures`."""
    config = read_json(folder / CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise UserError(
            f"{CONFIG} names no architecture: its architectures are {names!r}, not a list of one."
        )
    return config


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; UserError if the file holds another thing."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file.name} cannot be read: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{file.name} holds a {type(content).__name__}, not an object.")
    return content


def read_weights(folder: Path, names: Sequence[str] = (WEIGHTS, PICKLED)) -> dict[str, Tensor]:
    """All tensors of a folder; a .bin is read as plain weights, and executes nothing."""
    for name in names:
        if (folder / name).is_file():
            return read_file(folder / name)
        if (folder / (name + INDEX)).is_file():
            return read_shards(folder, name + INDEX)
    raise UserError(f"it holds neither {' nor '.join(names)}, whole or in shards.")


def read_shards(folder: Path, index: str) -> dict[str, Tensor]:
    """The tensors of the files that an index names."""
    table = read_json(folder / index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise UserError(f"{index} has no weight_map from names to files.")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(table.values())):
        if Path(name).name != name:
            raise UserError(f"{index} names {name}, which is outside the folder.")
        if not (folder / name).is_file():
            raise UserError(f"{index} names {name}, which is missing.")
        tensors |= read_file(folder / name)
    if missing := [name for name in table if name not in tensors]:
        raise UserError(f"{index} names {missing[0]}, which {table[missing[0]]} does not hold.")
    return tensors


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one file."""
    if file.suffix == ".bin":
        return weight_file.unwrap(weight_file.read_pickle(file), file.name)
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file.name}: not a readable safetensors file ({error}).") from None
    return tensors


def write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    more: Mapping[str, Path],
) -> None:
    """Write a folder, with copies of the files `more`, by name; it appears whole or not at all."""
    aside = folder.with_name(f"{folder.resolve().name}.{os.getpid()}{PARTIAL}")
    try:
        aside.mkdir(parents=True)
        (aside / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_weights(aside, tensors)
        for name, file in more.items():
            shutil.copyfile(file, aside / name)
        aside.rename(folder)
        sync_folder(folder.resolve().parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"--to {folder} cannot be written: {reason}.") from None


def write_weights(folder: Path, tensors: Mapping[str, Tensor], whole: str = WEIGHTS) -> None:
    """One file `whole`, or shards and their index."""
    shards = list(sharded(tensors))
    stem, count = whole.removesuffix(".safetensors"), len(shards)
    names = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    names = [whole] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        (folder / name).touch()
        mode = (folder / name).stat().st_mode  # The umask's; safetensors writes 0600.
        save_file({k: v.contiguous() for k, v in shard.items()}, folder / name, {"format": "pt"})
        (folder / name).chmod(mode)
    if len(shards) > 1:
        table = {k: name for name, shard in zip(names, shards, strict=True) for k in shard}
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": table}
        (folder / (whole + INDEX)).write_text(json.dumps(index, indent=2) + "\n")


def sharded(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Cut tensors, in their order, into shards of at most `LARGEST_SHARD` bytes, or one tensor."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > LARGEST_SHARD:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that make its tokenizer, by name."""
    return {name: folder / name for name in TOKENIZER if (folder / name).is_file()}
