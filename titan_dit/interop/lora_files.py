"""LoRA adapters in the files of others: a folder of peft, or the file of diffusers' pipelines.

Both name the modules of diffusers' networks: MODULE.lora_A.weight [rank, inputs] and
.lora_B.weight [outputs, rank], after a prefix. Where our layer is several there (qkv), each of them
gets its A, and some rows of its B. Where several of ours are one there (FLUX.2's single blocks), it
gets their A and B in blocks, of a rank that is the sum of theirs, unless they share one factor.
Imported, it is the other way around.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.interop import hugging_face, tensor_file
from titan_dit.interop.diffusers_network import Counterpart
from titan_dit.interop.tensor_layouts import Copies, FilledTable, Part, Same, SplitGate, SplitQKV
from titan_dit.models import lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder of peft."""
PICKLED = "adapter_model.bin"
"""Weight file of old versions of peft, in place of WEIGHTS."""
PIPELINE_WEIGHTS = "pytorch_lora_weights.safetensors"
"""The file that `load_lora_weights` of diffusers' pipelines reads."""
METADATA = "lora_adapter_metadata"
"""Key of its metadata: a peft config as JSON, whose keys have PIPELINE_PREFIX."""
PREFIX, PIPELINE_PREFIX = "base_model.model.", "transformer."
PREFIXES = (PREFIX, PIPELINE_PREFIX)
"""Prefixes of names: peft's, and that of a diffusers pipeline."""
KINDS = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
REQUIRED = {"bias": "none", "peft_type": "LORA"}
"""Keys of the config and the only values that [lora] supports."""
UNSUPPORTED = (
    *("use_dora", "use_qalora", "lora_bias", "layer_replication", "modules_to_save"),
    "target_parameters",
)
"""Keys that must be empty or false."""
INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the adapted weights unchanged. Others, such as pissa,
change them: their adapters do not fit the base."""
FOREIGN = {
    "lora_unet_": "kohya's names",
    "lora_down": "kohya's names",
    "diffusion_model.": "ComfyUI's names",
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    ".alpha": "kohya's alphas",
}
"""Parts of names of other kinds of adapters."""

Pair = tuple[Tensor, Tensor]
"""The (A, B) of an adapter."""


@dataclass(frozen=True)
class Adapters:
    """Adapters under our names, all of one rank."""

    tensors: Mapping[str, Tensor]
    rank: int
    alpha: float


def is_directory(path: Path) -> bool:
    """True if a path is a folder of peft's."""
    return (path / CONFIG).is_file()


def pipeline_file(path: Path) -> Path | None:
    """The file of adapters that a path names, or that its folder holds; None if there is none."""
    if path.is_dir():
        inside = path / PIPELINE_WEIGHTS
        return inside if inside.is_file() and not is_directory(path) else None
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    try:
        tensors, _ = tensor_file.open_safetensors(path)
    except (OSError, SafetensorError):
        return None  # Its reader says what is wrong.
    return path if any("lora" in name.lower() for name in tensors) else None


def to_theirs(found: Counterpart, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Their weights that are adapted, with A and B. `pairs`: A and B by the names of our weights.

    Raises UserError for a layer whose inputs are in another order there.
    """
    made: dict[str, Pair] = {}
    layouts = found.layouts()
    for name, (a, b) in pairs.items():
        layout = layouts[name]
        if layout.moves_inputs:
            raise UserError(
                f"[lora] targets: {name} is another kind of layer in diffusers "
                f"({layout.names[0]}): its adapter cannot be exported. Export the whole network."
            )
        if not isinstance(layout, Part):
            made |= {
                part: (a, rows)
                for part, rows in zip(layout.names, layout.to_theirs(b), strict=True)
            }
        elif layout.names[0] not in made:
            made[layout.names[0]] = whole(layouts, layout.names[0], pairs)
    return made


def parts_of(layouts: Mapping[str, Same], theirs: str) -> dict[str, Part]:
    """Our weights that are ranges of one of theirs, in its order."""
    return {
        name: layout
        for name, layout in layouts.items()
        if isinstance(layout, Part) and layout.names == (theirs,)
    }


def whole(layouts: Mapping[str, Same], theirs: str, pairs: Mapping[str, Pair]) -> Pair:
    """A and B of their weight, of which several of ours are ranges; 0 in those not adapted."""
    parts = parts_of(layouts, theirs)
    given = [pairs[name] for name in parts if name in pairs]
    dim = next(iter(parts.values())).dim
    # Of ranges of rows all A have the same inputs, of columns all B the same outputs.
    common = [pair[dim] for pair in given]
    shared = all(torch.equal(each, common[0]) for each in common)
    rank = len(given[0][0]) if shared else sum(len(a) for a, _ in given)
    blocks, place = [], 0
    for name, part in parts.items():
        if name not in pairs:
            size = (part.size, rank) if dim == 0 else (rank, part.size)
            blocks.append(common[0].new_zeros(size))
            continue
        a, b = pairs[name]
        own = part.inner.to_theirs(b)[0] if dim == 0 else a
        if not shared:
            more = (place, rank - place - len(a))
            pads = more if dim == 0 else (0, 0, *more)
            own = torch.nn.functional.pad(own, pads)
            place += len(a)
        blocks.append(own)
    joined = torch.cat(blocks, dim)
    one = common[0] if shared else torch.cat(common, 1 if dim else 0)
    return (one, joined) if dim == 0 else (joined, one)


def config_json(
    pairs: Mapping[str, Pair], rank: int, scale: float, base: str = ""
) -> dict[str, Any]:
    """adapter_config.json. `rank`: of most adapters. `base`: path of the base weights, or ""."""
    modules = {name.removesuffix(".weight"): len(a) for name, (a, _) in pairs.items()}
    others = {name: own for name, own in modules.items() if own != rank}
    config: dict[str, Any] = {
        "base_model_name_or_path": base or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(modules),
        "task_type": None,
        "use_dora": False,
        "use_rslora": False,
    }
    if others:
        config["rank_pattern"] = others
        config["alpha_pattern"] = {name: scale * own for name, own in others.items()}
    return config


def named(pairs: Mapping[str, Pair], prefix: str) -> dict[str, Tensor]:
    """Names and tensors of a file."""
    return {
        f"{prefix}{name.removesuffix('.weight')}{KINDS[key]}": tensor
        for name, pair in pairs.items()
        for key, tensor in zip("AB", pair, strict=True)
    }


def metadata(config: Mapping[str, Any]) -> dict[str, str]:
    """Metadata of PIPELINE_WEIGHTS, from adapter_config.json."""
    values = {f"{PIPELINE_PREFIX}{key}": value for key, value in config.items()}
    return {"format": "pt", METADATA: json.dumps(values, sort_keys=True)}


def read(folder: Path, found: Counterpart) -> Adapters:
    """The adapters of a folder of peft, fp32. UserError for settings that [lora] lacks."""
    config = hugging_face.read_json(folder / CONFIG)
    return made(hugging_face.read_weights(folder, (WEIGHTS, PICKLED)), config, found, CONFIG)


def read_file(path: Path, found: Counterpart) -> Adapters:
    """The adapters of a file of a pipeline, fp32. UserError for other kinds of adapters."""
    with tensor_file.reading(path):
        tensors, about = tensor_file.open_safetensors(path)
    return made(tensors, config_of(about.get(METADATA)), found, "its metadata")


def config_of(given: str | None) -> dict[str, Any]:
    """The peft config in the metadata of a file; {} without one."""
    try:
        values = json.loads(given or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{METADATA} in its metadata is no JSON object. Save it again.")
    return {
        key.removeprefix(PIPELINE_PREFIX): value
        for key, value in values.items()
        if key.startswith(PIPELINE_PREFIX)
    }


def made(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], found: Counterpart, where: str
) -> Adapters:
    """Adapters under our names. `config`: of peft, or {}: alpha is then the rank of each."""
    check_config(config, where)
    for name in tensors:
        for word, kind in FOREIGN.items():
            if word in name:
                raise UserError(
                    f"{name} is of {kind}, which is not read. Save adapters of diffusers' names: "
                    "transformer.MODULE.lora_A.weight and .lora_B.weight."
                )
    pairs = dict(pairs_of({name: tensors[name].float() for name in tensors}))
    scales = {name: scale_of(name, len(a), config, where) for name, (a, _) in pairs.items()}
    common = next(iter(scales.values()))
    if any(scale != common for scale in scales.values()):
        # One scale for all: the others go into B.
        pairs = {name: (a, b * (scales[name] / common)) for name, (a, b) in pairs.items()}
    ours = to_ours(found, pairs)
    rank = max(len(a) for a, _ in ours.values())
    return Adapters(padded(ours, rank), rank, common * rank)


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError for settings of peft that [lora] does not have."""
    other = [key for key, value in REQUIRED.items() if config.get(key, value) != value]
    other += [key for key in UNSUPPORTED if config.get(key)]
    for key in other:
        raise UserError(
            f"{where}: {key}={json.dumps(config[key])} is not supported. Train plain LoRA adapters."
        )
    if (initial := config.get("init_lora_weights")) not in INITIAL:
        raise UserError(
            f"{where}: init_lora_weights={json.dumps(initial)} changes the base, too: not "
            "supported. Save the adapters as plain ones, see path_initial_model_for_weight_"
            "conversion of peft's save_pretrained."
        )
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise UserError(f"{where}: {key} must be a table of modules. Save the adapters again.")


def scale_of(name: str, rank: int, config: Mapping[str, Any], where: str) -> float:
    """Alpha / rank of an adapter. UserError if the config contradicts its tensors."""
    if not config:
        return 1.0
    stated = of_module("r", "rank_pattern", name, config)
    alpha = of_module("lora_alpha", "alpha_pattern", name, config)
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not isinstance(stated, int) or not is_number or stated < 1 or not 0 < alpha < 1e30:
        raise UserError(
            f"{where}: r={json.dumps(stated)}, lora_alpha={json.dumps(alpha)}: r must be a whole "
            "number and both above 0. Save the adapters again."
        )
    if stated != rank:
        raise UserError(
            f"{where}: r={stated}, but the adapter of {name.removesuffix('.weight')} has rank "
            f"{rank}. Save the adapters again."
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def of_module(key: str, pattern: str, name: str, config: Mapping[str, Any]) -> Any:
    """A value of the config for a module: of the pattern that ends its name, or of all modules."""
    module = name.removesuffix(".weight")
    table = config.get(pattern) or {}
    ends = [end for end in table if module == end or module.endswith(f".{end}")]
    return table[max(ends, key=len)] if ends else config.get(key)


def pairs_of(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Pair]]:
    """Yield the weights of diffusers that are adapted, with their A and B."""
    for name in tensors:
        ends = [end for end in KINDS.values() if name.endswith(end)]
        if not ends:
            raise UserError(
                f"{name} is no part of an adapter: no name ends in {' or '.join(KINDS.values())}. "
                "Give a file with LoRA adapters alone."
            )
        layer = name.removesuffix(ends[0])
        if missing := [layer + end for end in KINDS.values() if layer + end not in tensors]:
            raise UserError(f"it has {name}, but not {missing[0]}. Save the adapters again.")
        if ends[0] == KINDS["A"]:
            module = layer
            for prefix in PREFIXES:
                module = module.removeprefix(prefix)
            yield f"{module}.weight", (tensors[name], tensors[layer + KINDS["B"]])
    if not tensors:
        raise UserError("it has no adapters. Save them again.")


def to_ours(found: Counterpart, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """A and B by the names of our weights; their ranks may differ."""
    layouts = {name: kind for name, kind in found.layouts().items() if name.endswith(".weight")}
    known = {part for layout in layouts.values() for part in layout.names}
    if unknown := [part for part in pairs if part not in known]:
        raise UserError(
            f"a {found.kind} has no {unknown[0].removesuffix('.weight')}. Give --base a run of the "
            "network that the adapters were trained on."
        )
    outline = found.outline()
    ours: dict[str, Pair] = {}
    for name, layout in layouts.items():
        own = [part for part in layout.names if part in pairs]
        if not own:
            continue
        if layout.moves_inputs or isinstance(layout, FilledTable):
            raise UserError(
                f"an adapter of {layout.names[0]} is not supported. Train adapters of linear "
                "layers in blocks."
            )
        for part in own:
            check_shapes(part, pairs[part], outline[part].shape)
        if isinstance(layout, Part):
            ours |= range_of(name, layout, *pairs[own[0]])
        else:
            ours[name] = joined(layout, pairs, outline)
    return ours


def range_of(name: str, part: Part, a: Tensor, b: Tensor) -> dict[str, Pair]:
    """The adapter of one of our weights, which is a range of theirs; {} if it is 0 there."""
    own = (b if part.dim == 0 else a).narrow(part.dim, part.first, part.size)
    if not own.any():
        return {}
    return {name: (a, part.inner.to_ours(own)) if part.dim == 0 else (own, b)}


def check_shapes(name: str, pair: Pair, shape: torch.Size) -> None:
    """Refuse an adapter of a weight of another shape."""
    a, b = pair
    shapes = f"A {list(a.shape)} and B {list(b.shape)}"
    if a.ndim != 2 or b.ndim != 2 or (len(b), a.shape[1]) != tuple(shape) or b.shape[1] != len(a):
        raise UserError(
            f"{shapes} do not fit {name} {list(shape)}. Give --base a run of the network that the "
            "adapters were trained on."
        )


def joined(layout: Same, pairs: Mapping[str, Pair], outline: Mapping[str, Tensor]) -> Pair:
    """The A and B of one of our weights."""
    own = [pairs[part] for part in layout.names if part in pairs]
    if isinstance(layout, Copies):
        if len(own) < len(layout.names) or any(not same(pair, own[0]) for pair in own):
            raise UserError(
                f"adapters of {layout.names[0]} and its copies differ. Train equal ones, or none."
            )
        return own[0]
    if not isinstance(layout, SplitQKV | SplitGate):
        a, b = own[0]
        return a, layout.to_ours(b)
    first = own[0][0]
    shared = all(torch.equal(a, first) for a, _ in own)
    stacked = first if shared else torch.cat([a for a, _ in own])
    rows, place = [], 0
    for part in layout.names:
        columns = torch.zeros(len(outline[part]), len(stacked))
        if part in pairs:
            a, b = pairs[part]
            columns[:, place : place + len(a)] = b
            place += 0 if shared else len(a)
        rows.append(columns)
    return stacked, layout.to_ours(*rows)


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
