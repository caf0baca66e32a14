"""LoRA adapters in peft's format, for the modules of diffusers' DiTTransformer2DModel.

Names are `base_model.model.MODULE.lora_A.weight` [rank, inputs] and `.lora_B.weight` [outputs,
rank]. Our qkv is one layer. Exported, it becomes three: each has its A, and a third of the rows of
its B. Imported, three layers with an A each become one of three times the rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.interop import hugging_face
from titan_dit.interop.diffusers_dit import DiffusersDiT
from titan_dit.interop.tensor_layouts import ConvKernel, Copies, FilledTable, Same, SplitQKV
from titan_dit.models import lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
"""Weight file of old versions of peft, in place of WEIGHTS."""
PREFIX = "base_model.model."
PREFIXES = (PREFIX, "transformer.")
"""Prefixes of names: peft's, and that of a diffusers pipeline."""
KINDS = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
REQUIRED = {"bias": "none", "peft_type": "LORA"}
"""Keys of the config and the only values that [lora] supports."""
UNSUPPORTED = (
    *("use_dora", "use_qalora", "lora_bias", "alpha_pattern", "rank_pattern"),
    *("layer_replication", "modules_to_save", "target_parameters"),
)
"""Keys that must be empty or false."""
INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the adapted weights unchanged. Others, such as pissa,
change them: their adapters do not fit the base."""

Pair = tuple[Tensor, Tensor]
"""The (A, B) of an adapter."""


def is_directory(path: Path) -> bool:
    """True if a path is a folder of peft's."""
    return (path / CONFIG).is_file()


def to_theirs(found: DiffusersDiT, pairs: Mapping[str, Pair]) -> Iterator[tuple[str, Tensor]]:
    """Yield peft's names and tensors. `pairs`: A and B by the names of our weights."""
    layouts = found.layouts()
    for name, (a, b) in pairs.items():
        layout = layouts[name]
        if isinstance(layout, ConvKernel):
            raise UserError(f"[lora] targets: {name} is a convolution in diffusers: not supported.")
        for part, rows in zip(layout.names, layout.to_theirs(b), strict=True):
            module = f"{PREFIX}{part.removesuffix('.weight')}"
            yield module + KINDS["A"], a
            yield module + KINDS["B"], rows


def config_json(names: Mapping[str, object], rank: int, alpha: float, base: str) -> dict[str, Any]:
    """adapter_config.json. `names`: names of tensors. `base`: path of the base weights, or ""."""
    modules = [name.removeprefix(PREFIX).removesuffix(KINDS["A"]) for name in names]
    return {
        "base_model_name_or_path": base or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": [m for m in modules if not m.endswith(KINDS["B"])],
        "task_type": None,
        "use_dora": False,
        "use_rslora": False,
    }


@dataclass(frozen=True)
class Adapters:
    """Adapters under our names, all of one rank."""

    tensors: Mapping[str, Tensor]
    rank: int
    alpha: float


def read(folder: Path, found: DiffusersDiT) -> Adapters:
    """The adapters of a folder, fp32. UserError for settings that [lora] does not support."""
    config = hugging_face.read_json(folder / CONFIG)
    other = [key for key, value in REQUIRED.items() if config.get(key, value) != value]
    other += [key for key in UNSUPPORTED if config.get(key)]
    for key in other:
        raise UserError(f"{CONFIG}: {key}={json.dumps(config[key])} is not supported.")
    if (initial := config.get("init_lora_weights")) not in INITIAL:
        raise UserError(
            f"{CONFIG}: init_lora_weights={json.dumps(initial)} changes the base, too: not "
            "supported. Save the adapters as plain ones, see path_initial_model_for_weight_"
            "conversion of peft's save_pretrained."
        )
    tensors = hugging_face.read_weights(folder, (WEIGHTS, PICKLED))
    pairs = dict(pairs_of({name: tensors[name].float() for name in tensors}))
    sizes = {a.shape[0] for a, _ in pairs.values()}
    rank, alpha = (config.get(key) for key in ("r", "lora_alpha"))
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or not alpha > 0:
        raise UserError(
            f"{CONFIG}: r={json.dumps(rank)}, lora_alpha={json.dumps(alpha)}: r must be a whole "
            "number and both above 0."
        )
    if sizes != {rank}:
        raise UserError(f"{CONFIG}: r={rank}, but the adapters have rank {sorted(sizes)}.")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    ours = to_ours(found, pairs)
    rank = max(len(a) for a, _ in ours.values())
    return Adapters(padded(ours, rank), rank, scale * rank)


def pairs_of(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Pair]]:
    """Yield the weights of diffusers that are adapted, with their A and B."""
    for name in tensors:
        ends = [end for end in KINDS.values() if name.endswith(end)]
        if not ends:
            raise UserError(f"{WEIGHTS}: {name} is no part of an adapter.")
        layer = name.removesuffix(ends[0])
        if missing := [layer + end for end in KINDS.values() if layer + end not in tensors]:
            raise UserError(f"{WEIGHTS} has {name}, but not {missing[0]}.")
        if ends[0] == KINDS["A"]:
            module = layer
            for prefix in PREFIXES:
                module = module.removeprefix(prefix)
            yield f"{module}.weight", (tensors[name], tensors[layer + KINDS["B"]])


def to_ours(found: DiffusersDiT, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """A and B by the names of our weights; their ranks may differ."""
    layouts = {name: kind for name, kind in found.layouts().items() if name.endswith(".weight")}
    owners = {part: name for name, layout in layouts.items() for part in layout.names}
    if unknown := [part for part in pairs if part not in owners]:
        raise UserError(f"{WEIGHTS}: this DiT has no {unknown[0].removesuffix('.weight')}.")
    outline = found.outline()
    made: dict[str, Pair] = {}
    for name in dict.fromkeys(owners[part] for part in pairs):
        layout = layouts[name]
        if isinstance(layout, (ConvKernel, FilledTable)):
            raise UserError(f"{WEIGHTS}: an adapter of {layout.names[0]} is not supported.")
        for part in layout.names:
            if part in pairs:
                check_shapes(part, pairs[part], outline[part].shape)
        made[name] = joined(layout, pairs, outline)
    return made


def check_shapes(name: str, pair: Pair, shape: torch.Size) -> None:
    """Refuse an adapter of a weight of another shape."""
    a, b = pair
    if (len(b), a.shape[1]) != tuple(shape) or b.shape[1] != len(a):
        raise UserError(
            f"{WEIGHTS}: A {list(a.shape)} and B {list(b.shape)} do not fit {name} {list(shape)}."
        )


def joined(layout: Same, pairs: Mapping[str, Pair], outline: Mapping[str, Tensor]) -> Pair:
    """The A and B of one of our weights."""
    own = [pairs[part] for part in layout.names if part in pairs]
    if isinstance(layout, Copies):
        if len(own) < len(layout.names) or any(not same(pair, own[0]) for pair in own):
            raise UserError(f"{WEIGHTS}: adapters of {layout.names[0]} and its copies differ.")
        return own[0]
    if not isinstance(layout, SplitQKV):
        return own[0]
    first, rank = own[0][0], len(own[0][0])
    shared = all(torch.equal(a, first) for a, _ in own)
    whole = first if shared else torch.cat([a for a, _ in own])
    rows, place = [], 0
    for part in layout.names:
        columns = torch.zeros(len(outline[part]), len(whole))
        if part in pairs:
            columns[:, place : place + rank] = pairs[part][1]
            place += 0 if shared else rank
        rows.append(columns)
    return whole, layout.to_ours(*rows)


def same(one: Pair, other: Pair) -> bool:
    """True if two adapters are equal."""
    return all(torch.equal(*both) for both in zip(one, other, strict=True))


def padded(pairs: Mapping[str, Pair], rank: int) -> dict[str, Tensor]:
    """Our tensors by name, all of one rank: added rows of A have columns of 0 in B."""
    found: dict[str, Tensor] = {}
    for name, (a, b) in pairs.items():
        more = torch.Size([rank - len(a), a.shape[1]])
        layer = name.removesuffix(".weight")
        drawn = lora.UNIFORM(more, torch.Generator().manual_seed(0))
        found[f"{layer}.{lora.A}"] = torch.cat((a, drawn))
        found[f"{layer}.{lora.B}"] = torch.cat((b, b.new_zeros(len(b), len(drawn))), 1)
    return found
