"""Files of weights as other projects write them: .pt and .safetensors. Nothing in them is run."""

from __future__ import annotations

import argparse
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_dit.section import UserError

SUFFIXES = (".pt", ".pth", ".safetensors")
WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""
ADAM_KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Weights:
    """What a file holds."""

    ema: dict[str, Tensor]
    model: dict[str, Tensor]
    """Last weights; the same dict as `ema` where the file has but one."""
    adam: dict[str, dict[str, Tensor]] | None
    """AdamW's state by parameter, where the file has one that belongs to `model`."""
    metadata: dict[str, str]


def read(path: Path) -> Weights:
    """The weights of a file: a state dict, or some under "ema" and "model", and "opt".

    Raises UserError for what is no such file, or would execute code when loaded.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: its name must end in {', '.join(SUFFIXES)}.")
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    is_safetensors = path.suffix == ".safetensors"
    content, metadata = read_safetensors(path) if is_safetensors else (read_pickle(path), {})
    parts = {name: content[name] for name in ("ema", "model") if name in content}
    found = {name: unwrap(part, f"{path}: {name}") for name, part in parts.items()}
    if not found:
        found = {"model": unwrap(content, str(path))}
    either = found.get("ema") or found["model"]
    model = found.get("model") or either
    return Weights(either, model, adam_of(content.get("opt"), model), metadata)


def adam_of(state: Any, model: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]] | None:
    """A state dict of AdamW, which numbers the parameters in the order of the model's names.

    None for any other: it may be of another optimizer, or of a part of the parameters.
    """
    try:
        (group,) = state["param_groups"]
        named = dict(zip(group["params"], model, strict=True))
        return {
            named[number]: {key: torch.as_tensor(entry[key]) for key in ADAM_KEYS}
            for number, entry in state["state"].items()
        } or None
    except (KeyError, TypeError, ValueError):
        return None


def read_safetensors(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Tensors and metadata; names such as "ema.x" and "model.x" become state dicts."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}).") from None
    content: dict[str, Any] = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        if head in ("ema", "model"):
            content.setdefault(head, {})[rest] = tensor
        else:
            content[name] = tensor
    return content, metadata


def read_pickle(path: Path) -> Mapping[str, Any]:
    """What torch.load gives with weights_only: tensors and plain values, nothing is executed."""
    try:
        # DiT's own train.py keeps its argparse.Namespace beside the weights: plain values as well.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{path}: not a file of plain weights. Loading it could execute code, so it was not "
            f"loaded. Save a state dict alone: torch.save(model.state_dict(), FILE). ({reason})"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path}: damaged, or not written by torch.save ({error}).") from None
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__}, not a state dict.")
    return content


def unwrap(state: Any, where: str) -> dict[str, Tensor]:
    """A state dict without wrappers' prefixes; everything in it must be a tensor."""
    if not isinstance(state, Mapping):
        raise UserError(f"{where} is a {type(state).__name__}, not a state dict.")
    tensors = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{where}: {name} is a {type(value).__name__}, so it is no state dict.")
        for wrapper in WRAPPERS:
            name = str(name).removeprefix(wrapper)
        tensors[name] = value
    return tensors


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a state dict; the file appears whole or not at all."""
    aside = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(dict(tensors), aside, metadata=dict(metadata))
        aside.chmod(0o644)  # safetensors writes 0600, which locks out the rest of the team.
    else:
        torch.save(dict(tensors), aside)
    aside.replace(path)
