"""Adapters in the files of others: peft's, of diffusers' pipelines, kohya's, ComfyUI's.

The first two name the modules of diffusers' networks: MODULE.lora_A.weight [rank, inputs] and
.lora_B.weight [outputs, rank], after a prefix. Where our layer is several there (qkv), each of them
gets its A, and some rows of its B. Where several of ours are one there (FLUX.2's single blocks), it
gets their A and B in blocks, of a rank that is the sum of theirs, unless they share one factor.
Imported, it is the other way around.

The last two name the layers of the network's first release (`Counterpart.originals`), in which
several of diffusers' may be one again. kohya's names have "_" for ".", .lora_down and .lora_up for
A and B, and an .alpha for each layer. ComfyUI's have the scale in B.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.interop import adapter_kinds, hugging_face, tensor_file, tensor_layouts
from titan_dit.interop.adapter_kinds import MISFIT, LayerAdapter, Pair, stacked
from titan_dit.interop.diffusers_network import Counterpart, Rows
from titan_dit.interop.tensor_file import OnDemand
from titan_dit.interop.tensor_layouts import (
    Copies,
    FilledTable,
    Part,
    Same,
    SplitGate,
    SplitQKV,
)
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
KOHYA_PREFIX, COMFYUI_PREFIX = "lora_unet_", "diffusion_model."
DOTTED = (PREFIX, PIPELINE_PREFIX, COMFYUI_PREFIX)
"""Prefixes of layers' names."""
UNDERSCORED = (KOHYA_PREFIX, "lycoris_", "lora_transformer_")
"""Prefixes of names with "_" for "."."""
TEXT_ENCODERS = ("lora_te", "text_encoder", "text_encoders.")
"""Prefixes of adapters of a text encoder."""
WORDS = ("lora", "lokr_", "hada_", "lycoris")
"""Parts of names by which a file is one of adapters."""
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


class AdapterFile(NamedTuple):
    """Tensors of adapters, and their config."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """peft's config; {} without one."""
    where: str
    """Its name, for messages."""


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
    return path if any(word in name.lower() for name in tensors for word in WORDS) else None


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
    """(A, B) of diffusers' weight `theirs`, joined from our adapters of its ranges.

    0 in ranges without one.
    """
    parts = parts_of(layouts, theirs)
    sizes = [part.size for part in parts.values()]
    if next(iter(parts.values())).dim == 0:
        given = [
            (pairs[name][0], part.inner.to_theirs(pairs[name][1])[0]) if name in pairs else None
            for name, part in parts.items()
        ]
        return stacked(given, sizes)
    # Ranges of columns: the same of the transposed weight B A.
    turned = [(pairs[name][1].t(), pairs[name][0].t()) if name in pairs else None for name in parts]
    b, a = stacked(turned, sizes)
    return a.t(), b.t()


def to_originals(found: Counterpart, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Name in the network's first release -> (A, B), from pairs by diffusers' names.

    Raises UserError for a network without such names, and for a layer that has none.
    """
    outline, made, left = found.outline(), dict[str, Pair](), dict(pairs)
    if not (originals := found.originals()):
        raise UserError(
            f"a {found.kind} has no names of kohya's tools or of ComfyUI. Give --format peft or "
            "lora."
        )
    for name, rows in originals.items():
        weights = [f"{layer}.weight" for layer in rows.layers]
        given = [left.pop(weight, None) for weight in weights]
        if any(given):
            a, b = stacked(given, [len(outline[weight]) for weight in weights])
            made[name] = a, rows.join(b)
    if left:
        raise UserError(
            f"[lora] targets: {next(iter(left))} has no name in the network's first release. Give "
            "--format peft or lora."
        )
    return made


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


def kohya(pairs: Mapping[str, Pair], scale: float) -> dict[str, Tensor]:
    """Names and tensors of a file of kohya's tools. `pairs`: see `to_originals`."""
    found: dict[str, Tensor] = {}
    for name, (a, b) in pairs.items():
        layer = KOHYA_PREFIX + name.replace(".", "_")
        found[f"{layer}.alpha"] = torch.tensor(scale * len(a))
        found[f"{layer}.lora_down.weight"], found[f"{layer}.lora_up.weight"] = a, b
    return found


def comfyui(pairs: Mapping[str, Pair], scale: float) -> dict[str, Tensor]:
    """Names and tensors of a file of ComfyUI. `pairs`: see `to_originals`."""
    scaled = {f"{name}.weight": (a, b * scale) for name, (a, b) in pairs.items()}
    return named(scaled, COMFYUI_PREFIX)


def metadata(config: Mapping[str, Any]) -> dict[str, str]:
    """Metadata of PIPELINE_WEIGHTS, from adapter_config.json."""
    values = {f"{PIPELINE_PREFIX}{key}": value for key, value in config.items()}
    return {"format": "pt", METADATA: json.dumps(values, sort_keys=True)}


def opened(source: Path) -> AdapterFile:
    """The content of a folder of peft, or of a file of any other tool."""
    file = pipeline_file(source)
    if file is None:
        config = hugging_face.read_json(source / CONFIG)
        return AdapterFile(hugging_face.read_weights(source, (WEIGHTS, PICKLED)), config, CONFIG)
    with tensor_file.reading(file):
        tensors, about = tensor_file.open_safetensors(file)
    return AdapterFile(tensors, config_of(about.get(METADATA)), "its metadata")


def config_of(given: str | None) -> dict[str, Any]:
    """The peft config in the metadata of a file; {} without one.

    Raises UserError if it is no JSON object.
    """
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


def made(file: AdapterFile, found: Counterpart) -> Adapters:
    """Adapters under our names, fp32. Without a config and alphas the scale is 1.

    Raises UserError for what is no LoRA, and for settings that [lora] lacks.
    """
    check_config(file, UNSUPPORTED)
    pairs, scales = dict[str, Pair](), dict[str, float]()
    for rows, adapter, scale in layers_of(file, found):
        a, b = adapter.low_rank()
        weights = [f"{layer}.weight" for layer in rows.layers]
        parts = rows.split(b, [len(found.outline()[weight]) for weight in weights])
        pairs |= {weight: (a, part) for weight, part in zip(weights, parts, strict=True)}
        scales |= dict.fromkeys(weights, scale)
    common = next(iter(scales.values()))
    if any(scale != common for scale in scales.values()):
        # One scale for all: the others go into B.
        pairs = {name: (a, b * (scales[name] / common)) for name, (a, b) in pairs.items()}
    ours = to_ours(found, pairs)
    if not ours:
        raise UserError("all of its adapters are 0: they add nothing. Train them first.")
    rank = max(len(a) for a, _ in ours.values())
    return Adapters(padded(ours, rank), rank, common * rank)


def merged(file: AdapterFile, found: Counterpart, ours: OnDemand) -> tuple[OnDemand, int]:
    """Our weights with adapters of any kind, one at a time, and how many layers have one.

    Raises UserError as `made`, but for what is no LoRA.
    """
    check_config(file, [key for key in UNSUPPORTED if key != "use_dora"])
    adapters = list(layers_of(file, found))
    by_weight = {f"{layer}.weight": each for each in adapters for layer in each[0].layers}
    layouts, changed = found.layouts(), set[str]()
    for name, layout in layouts.items():
        if own := by_weight.keys() & set(layout.names):
            if isinstance(layout, Copies):
                refuse_layer(min(own).removesuffix(".weight"))
            changed.add(name)

    def before(weight: str) -> Tensor:
        """A weight of diffusers, without its adapter."""
        own = {name: layout for name, layout in layouts.items() if weight in layout.names}
        return dict(tensor_layouts.to_theirs(own, ours))[weight]

    def after(weight: str) -> Tensor:
        """A weight of diffusers, with its adapter."""
        if weight not in by_weight:
            return before(weight)
        rows, adapter, scale = by_weight[weight]
        parts = [before(f"{layer}.weight") for layer in rows.layers]
        whole = adapter.merged(rows.join(torch.cat(parts)), scale)
        own = rows.split(whole, [len(part) for part in parts])
        return own[rows.layers.index(weight.removesuffix(".weight"))].float()

    def get(name: str) -> Tensor:
        if name not in changed:
            return ours[name]
        layout = layouts[name]
        return layout.to_ours(*map(after, layout.names)).contiguous()

    return OnDemand(ours.outline, get), len(adapters)


def check_config(file: AdapterFile, unsupported: Sequence[str]) -> None:
    """Raise UserError for settings of peft that [lora] does not have."""
    config, where = file.config, file.where
    other = [key for key, value in REQUIRED.items() if config.get(key, value) != value]
    other += [key for key in unsupported if config.get(key)]
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
    """The scale in a peft config: lora_alpha / r, with use_rslora lora_alpha / sqrt(r).

    1 without a config. Raises UserError for a bad r or alpha, or an r that is not the tensors'
    rank.
    """
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
            f"{where}: r={stated}, but the adapter of {name} has rank {rank}. Save the adapters "
            "again."
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def of_module(key: str, pattern: str, name: str, config: Mapping[str, Any]) -> Any:
    """A value of the config for a layer: of the pattern that ends its name, or of all layers."""
    table = config.get(pattern) or {}
    ends = [end for end in table if name == end or name.endswith(f".{end}")]
    return table[max(ends, key=len)] if ends else config.get(key)


def layers_of(file: AdapterFile, found: Counterpart) -> Iterator[tuple[Rows, LayerAdapter, float]]:
    """Yield (diffusers' layers that an adapter changes, the adapter, its scale).

    Raises UserError for text-encoder adapters, duplicates, layers that are not linear, or no
    adapter.
    """
    by_layer: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        layer, part = adapter_kinds.part_of(name)
        if layer.startswith(TEXT_ENCODERS):
            raise UserError(
                f"it has adapters of a text encoder ({layer}), which is not trained here. Save "
                "those of the network alone."
            )
        if part in by_layer.setdefault(layer, {}):
            raise UserError(
                f"it has {by_layer[layer][part]} and {name}, which are the same. Save one of them."
            )
        by_layer[layer][part] = name
    if not by_layer:
        raise UserError("it has no adapters. Save them again.")
    names, outline = names_of(found), found.outline()
    taken: dict[str, str] = {}
    for layer, parts in by_layer.items():
        adapter_kinds.check_parts(layer, parts)
        bare, rows = resolved(layer, names, found)
        shapes = [outline[f"{own}.weight"].shape for own in rows.layers]
        if any(len(shape) != 2 for shape in shapes):
            refuse_layer(rows.layers[0])
        for own in rows.layers:
            if own in taken:
                raise UserError(
                    f"it has adapters of {taken[own]} and of {layer}, which hold the same weights. "
                    "Save one of them."
                )
            taken[own] = layer
        shape = sum(outputs for outputs, _ in shapes), shapes[0][1]
        own_parts = {part: read_part(name, file.tensors) for part, name in parts.items()}
        adapter = LayerAdapter(bare, own_parts, shape)
        is_lora = adapter_kinds.A in own_parts
        stated = scale_of(bare, adapter.rank or 0, file.config, file.where) if is_lora else 1.0
        yield rows, adapter, adapter.scale(stated)


def read_part(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor in fp32. Raises UserError for one of another kind than floating."""
    tensor = tensors[name]
    if not tensor.is_floating_point() and not name.endswith(".alpha"):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{name} is {kind}, no floating numbers. Save the adapters again.")
    return tensor.float()


def names_of(found: Counterpart) -> dict[str, Rows]:
    """Names of layers, of diffusers and of the network's first release -> diffusers' layers."""
    theirs = (name for layout in found.layouts().values() for name in layout.names)
    layers = (name.removesuffix(".weight") for name in theirs if name.endswith(".weight"))
    return {layer: Rows((layer,)) for layer in layers} | dict(found.originals())


def resolved(layer: str, names: Mapping[str, Rows], found: Counterpart) -> tuple[str, Rows]:
    """(a layer's name without its prefix, diffusers' layers that it stands for).

    Raises UserError if the network has none of that name.
    """
    bare = layer
    for prefix in DOTTED:
        bare = bare.removeprefix(prefix)
    if bare in names:
        return bare, names[bare]
    flat = {name.replace(".", "_"): name for name in names}
    for prefix in UNDERSCORED:
        if layer.startswith(prefix) and (name := flat.get(layer.removeprefix(prefix))):
            return name, names[name]
    raise UserError(f"a {found.kind} has no {bare}. {MISFIT}")


def refuse_layer(name: str) -> NoReturn:
    """Raise UserError for an adapter of a layer that is no linear one here."""
    raise UserError(
        f"an adapter of {name} is not supported. Train adapters of linear layers in blocks."
    )


def to_ours(found: Counterpart, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Name of our weight -> (A, B), from pairs by diffusers' names; their ranks may differ."""
    outline = found.outline()
    ours: dict[str, Pair] = {}
    for name, layout in found.layouts().items():
        own = [part for part in layout.names if part in pairs]
        if not own:
            continue
        if layout.moves_inputs or isinstance(layout, FilledTable):
            refuse_layer(layout.names[0])
        if isinstance(layout, Part):
            ours |= range_of(name, layout, *pairs[own[0]])
        else:
            ours[name] = joined(layout, pairs, outline)
    return ours


def range_of(name: str, part: Part, a: Tensor, b: Tensor) -> dict[str, Pair]:
    """The adapter of our weight that is a range of diffusers' one; {} if it is 0 there."""
    own = (b if part.dim == 0 else a).narrow(part.dim, part.first, part.size)
    if not own.any():
        return {}
    return {name: (a, part.inner.to_ours(own)) if part.dim == 0 else (own, b)}


def joined(layout: Same, pairs: Mapping[str, Pair], outline: Mapping[str, Tensor]) -> Pair:
    """The A and B of one of our weights. Raises UserError for copies that differ."""
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
    sizes = [len(outline[part]) for part in layout.names]
    a, b = stacked([pairs.get(part) for part in layout.names], sizes)
    return a, layout.to_ours(*torch.split(b, sizes))


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
