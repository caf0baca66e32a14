"""Folders of transformers: config.json, model.safetensors whole or in shards, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.interop import tensor_writer, weight_file
from titan_dit.interop.on_demand import OnDemand
from titan_dit.interop.tensor_reader import Pickled, open_safetensors
from titan_dit.interop.tensor_writer import INDEX
from titan_dit.system.files import sync_folder

CONFIG = "config.json"
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
LARGEST_SHARD = 5 * 10**9
"""Maximum bytes of a weight file, a former default of transformers."""
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
    """A JSON object; UserError if the file holds anything else."""
    content = user_text.read_json(file, file.name)
    if not isinstance(content, dict):
        raise UserError(f"{file.name} holds a {type(content).__name__}, not an object.")
    return content


def read_weights(folder: Path, names: Sequence[str] = (WEIGHTS, PICKLED)) -> OnDemand:
    """All tensors of a folder; a .bin is read as plain weights, without executing code."""
    for name in names:
        if (folder / name).is_file():
            return read_file(folder / name)
        if (folder / (name + INDEX)).is_file():
            return read_shards(folder, name + INDEX)
    raise UserError(f"it holds neither {' nor '.join(names)}, whole or in shards.")


def read_shards(folder: Path, index: str) -> OnDemand:
    """The tensors of the files that an index names."""
    table = read_json(folder / index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise UserError(f"{index} has no weight_map from names to files.")
    parts: dict[str, OnDemand] = {}
    for name in sorted(set(table.values())):
        if Path(name).name != name:
            raise UserError(f"{index} names {name}, which is outside the folder.")
        if not (folder / name).is_file():
            raise UserError(f"{index} names {name}, which is missing.")
        shard = read_file(folder / name)
        parts |= dict.fromkeys(shard, shard)
    if missing := [name for name in table if name not in parts]:
        raise UserError(f"{index} names {missing[0]}, which {table[missing[0]]} does not hold.")
    outline = {name: shard.outline[name] for name, shard in parts.items()}
    return OnDemand(outline, lambda name: parts[name][name])


def read_file(file: Path) -> OnDemand:
    """The tensors of one file."""
    if file.suffix == ".bin":
        pickled = Pickled(file)
        return weight_file.unwrap(pickled.whole(), file.name, pickled.get)
    try:
        tensors, _ = open_safetensors(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file.name}: not a readable safetensors file ({error}).") from None
    return weight_file.unwrap(tensors.outline, file.name, tensors.__getitem__)


def write(
    folder: Path,
    config: Mapping[str, Any],
    outline: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    whole: str = WEIGHTS,
) -> None:
    """Write config.json and the weights to a new folder. `outline`: see `tensor_writer.write`."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensor_writer.write(folder, whole, outline, tensors, LARGEST_SHARD)
    sync_folder(folder)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that make its tokenizer, by name."""
    return {name: folder / name for name in TOKENIZER if (folder / name).is_file()}
