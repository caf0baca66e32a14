"""Read weights of other projects: .pt and .safetensors, without executing code from them."""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_dit.config.section import UserError

SUFFIXES = (".pt", ".pth", ".safetensors")
ADAM_KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Weights:
    """Contents of a weight file."""

    ema: dict[str, Tensor]
    model: dict[str, Tensor]
    """Non-averaged weights; the same dict as `ema` if the file has only one."""
    adam: dict[str, dict[str, Tensor]] | None
    """AdamW state by parameter; None if missing or not of `model`."""
    metadata: dict[str, str]


def read(path: Path) -> Weights:
    """Read a state dict, or a dict with "ema", "model" and "opt".

    Raises UserError for any other file, and for one that would execute code when loaded.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: its name must end in {', '.join(SUFFIXES)}.")
    is_safetensors = path.suffix == ".safetensors"
    content, metadata = read_safetensors(path) if is_safetensors else (read_pickle(path), {})
    parts = {name: content[name] for name in ("ema", "model") if name in content}
    found = {name: unwrap(part, f"{path}: {name}") for name, part in parts.items()}
    if not found:
        found = {"model": unwrap(content, str(path))}
    ema, model = found.get("ema"), found.get("model")
    if ema is None or model is None:
        ema = model = ema or model
    assert ema is not None
    assert model is not None
    return Weights(ema, model, adam_of(content.get("opt"), model), metadata)


def read_safetensors(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Read tensors and metadata; names "ema.x" and "model.x" become nested state dicts."""
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
    """Call torch.load with weights_only=True, which executes no code."""
    try:
        # DiT's train.py stores its argparse.Namespace with the weights; it holds plain values.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickle protocols.
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = f"it imports {asked[1]}" if asked else "it is not a plain pickle"
        raise UserError(
            f"{path}: not a file of plain weights: {why}. Loading it can execute code, so it was "
            "not loaded. Save only the state dict: torch.save(model.state_dict(), FILE)."
        ) from None
    except Exception as error:  # torch.load raises any exception on a damaged file.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path}: damaged, or not written by torch.save ({reason}).") from None
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__}, not a state dict.")
    return content


def unwrap(state: Any, where: str) -> dict[str, Tensor]:
    """Return a state dict without DistributedDataParallel's and torch.compile's name prefixes."""
    if not isinstance(state, Mapping):
        raise UserError(f"{where} is a {type(state).__name__}, not a state dict.")
    if not state:
        raise UserError(f"{where} is empty.")
    tensors = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            raise UserError(
                f"{where}: {name} is a dict. If it holds the weights, save only those: "
                f'torch.save(content["{name}"], FILE).'
            )
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            raise UserError(f"{where}: {name} is no dense tensor, so this is no state dict.")
        tensors[str(name).removeprefix("module.").replace("_orig_mod.", "")] = value
    return tensors


def adam_of(state: Any, model: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]] | None:
    """Map an AdamW state dict to parameter names; its indices follow the model's name order.

    None for any other state, such as another optimizer's or one of fewer parameters.
    """
    try:
        (group,) = state["param_groups"]
        named = dict(zip(group["params"], model, strict=True))
        return {
            named[number]: {key: torch.as_tensor(entry[key]) for key in ADAM_KEYS}
            for number, entry in state["state"].items()
        } or None
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None
