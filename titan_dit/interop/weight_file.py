"""Weights of other projects: .pt and .safetensors, read one tensor at a time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.interop.on_demand import OnDemand
from titan_dit.interop.tensor_reader import Pickled, open_safetensors
from titan_dit.system.files import reason_of

SUFFIXES = (".pt", ".pth", ".safetensors")
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Names of wrapper modules that may occur anywhere in a parameter's name."""
REPLICA = "module."
"""Prefix that DistributedDataParallel adds, once for each wrapper."""
ADAM_KEYS = ("step", "exp_avg", "exp_avg_sq")
Getter: TypeAlias = Callable[..., Tensor]
"""(*keys) -> the tensor under nested keys of a file."""


@dataclass(frozen=True)
class Weights:
    """Contents of a weight file."""

    ema: OnDemand
    model: OnDemand
    """Non-averaged weights; the same mapping as `ema` if the file has only one."""
    adam: dict[str, Mapping[str, Tensor]] | None
    """AdamW state by parameter; None if missing or not of `model`."""
    metadata: dict[str, str]
    arguments: dict[str, Any]
    """Arguments of the script that wrote a .pt file; empty if unknown."""


def read(path: Path) -> Weights:
    """Read a state dict, or a dict with "ema", "model" and "opt".

    Raises UserError for any other file, and for one that would execute code when loaded.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: its name must end in {', '.join(SUFFIXES)}.")
    content, metadata, get = open_file(path)
    parts = [name for name in ("ema", "model") if name in content]
    found = {name: unwrap(content[name], f"{path}: {name}", get, (name,)) for name in parts}
    if not found:
        found = {"model": unwrap(content, str(path), get)}
    ema, model = found.get("ema"), found.get("model")
    if ema is None or model is None:
        ema = model = ema or model
    assert ema is not None
    assert model is not None
    adam = adam_of(content.get("opt"), model, get)
    return Weights(ema, model, adam, metadata, arguments_of(content.get("args")))


def open_file(path: Path) -> tuple[Mapping[str, Any], dict[str, str], Getter]:
    """A file's content by its keys, its metadata, and a function that reads one tensor.

    Names "ema.x" and "model.x" in a .safetensors file become nested dicts.
    """
    if path.suffix != ".safetensors":
        file = Pickled(path)
        return file.whole(), {}, file.get
    try:
        tensors, metadata = open_safetensors(path)
    except (SafetensorError, OSError) as error:
        reason = reason_of(error)
        raise UserError(f"{path}: not a readable safetensors file ({reason}).") from None
    content: dict[str, Any] = {}
    for name, tensor in tensors.outline.items():
        head, _, rest = name.partition(".")
        if head in ("ema", "model"):
            content.setdefault(head, {})[rest] = tensor
        else:
            content[name] = tensor
    return content, metadata, lambda *keys: tensors[".".join(keys)]


def unwrap(state: Any, where: str, get: Getter, keys: tuple[str, ...] = ()) -> OnDemand:
    """A state dict without the name prefixes of DistributedDataParallel and torch.compile.

    `get(*keys, name)` reads a tensor.
    """
    if not isinstance(state, Mapping):
        raise UserError(f"{where} is a {type(state).__name__}, not a state dict.")
    if not state:
        raise UserError(f"{where} is empty.")
    outline: dict[str, Tensor] = {}
    named: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            raise UserError(
                f"{where}: {name} is a dict. If it holds the weights, save only those: "
                f'torch.save(content["{name}"], FILE).'
            )
        if not isinstance(value, Tensor) or not is_dense(value):
            raise UserError(f"{where}: {name} is no dense tensor, so this is no state dict.")
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
