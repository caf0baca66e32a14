"""Weights of the original DiT and of SiT (arXiv:2212.09748, arXiv:2401.08740)."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.config.section import UserError, show
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.interop import tensor_layouts
from titan_dit.interop.tensor_file import MAPPED, OnDemand, outline_of
from titan_dit.interop.tensor_layouts import ConvKernel, RowsOfQKV, Same
from titan_dit.models.dit_config import SIZES, DiTConfig


def write_pickled(target: Path, source: Path, outline: Mapping[str, Tensor]) -> None:
    """Durably write the tensors of a safetensors file as a state dict.

    `outline`: their shapes and dtypes, in the order of the file.
    """
    with source.open("rb") as stream:
        # Private: torch takes writable memory only.
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    with target.open("wb") as stream:
        # To a stream: to a path, torch would put the path's name into the file.
        releasing: Any = Releasing(stream, pages)
        torch.save(dict(mapped(pages, outline)), releasing)
        stream.flush()
        os.fsync(stream.fileno())


def mapped(pages: mmap.mmap, outline: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors at the end of mapped pages."""
    place = len(pages) - sum(tensor.nbytes for tensor in outline.values())
    for name, tensor in outline.items():
        flat = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=place)
        yield name, flat.view(tensor.shape)
        place += tensor.nbytes


class Releasing:
    """A stream that releases mapped pages whenever it has written more than MAPPED bytes."""

    def __init__(self, stream: Any, pages: mmap.mmap) -> None:
        self.stream, self.pages, self.bytes = stream, pages, 0

    def write(self, data: Any) -> int:
        """Write; the file is read again if released pages are needed again."""
        written: int = self.stream.write(data)
        self.bytes += written
        if self.bytes > MAPPED:
            self.pages.madvise(mmap.MADV_DONTNEED)
            self.bytes = 0
        return written

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()


FIXED: Mapping[str, Any] = {"direction": "to_data", "time_scale": 1.0}
"""Keys of [objective] that define SiT's time and velocity -> SiT's values."""
SIT_OBJECTIVE: Mapping[str, Any] = {"name": "rectified_flow", "timesteps": "uniform", **FIXED}
"""[objective] of the released weights."""
ARGUMENTS: Mapping[str, Any] = {"path_type": "Linear", "prediction": "velocity"}
"""Arguments of SiT's train.py -> values that correspond to `SIT_OBJECTIVE`."""


def are_sit_arguments(arguments: Mapping[str, Any]) -> bool:
    """True if SiT's train.py wrote the arguments of a file."""
    return "path_type" in arguments or str(arguments.get("model", "")).startswith("SiT-")


def has_sit_name(path: str) -> bool:
    """True if the file name contains SiT, such as SiT-XL-2-256.pt."""
    return re.search(r"(?<![a-z])sit(?![a-z])", Path(path).name, re.IGNORECASE) is not None


def check_sit_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise UserError for weights with another path or prediction."""
    for key, value in ARGUMENTS.items():
        if (given := arguments.get(key, value)) != value:
            flag = key.replace("_", "-")
            raise UserError(
                f"SiT's --{flag} {given}: titan_dit has {flag} {value} only. Give weights that "
                "were trained with it."
            )


def fits_sit(objective: Mapping[str, Any]) -> bool:
    """True if SiT's code uses a network of an [objective] as it was trained."""
    return not misfits(objective)


def misfits(objective: Mapping[str, Any]) -> list[str]:
    """Keys of an [objective] whose values differ from SiT's, as "key=value, not value"."""
    wanted = {"name": SIT_OBJECTIVE["name"], **FIXED}
    if objective["name"] != wanted["name"]:
        wanted = {"name": wanted["name"]}
    # A key that did not exist yet had its default.
    given = {key: objective.get(key, getattr(RectifiedFlowConfig, key)) for key in wanted}
    return [
        f"{key}={show(given[key])}, not {show(value)}"
        for key, value in wanted.items()
        if given[key] != value
    ]


def check_sit_objective(objective: Mapping[str, Any]) -> None:
    """Raise UserError for an objective that SiT's code would misinterpret; name its keys."""
    if found := misfits(objective):
        raise UserError(
            f"[objective] {'; '.join(found)}: SiT's time runs from noise (0) to data (1), and its "
            "network predicts the velocity data - noise. The weights cannot be converted; train "
            "with SiT's values."
        )


PATCH, POSITIONS = "x_embedder.proj.weight", "pos_embed"
OUTER = {
    "embed.patch": "x_embedder.proj",
    "embed.timestep.up": "t_embedder.mlp.0",
    "embed.timestep.down": "t_embedder.mlp.2",
    "head.modulation": "final_layer.adaLN_modulation.1",
    "head.out": "final_layer.linear",
}
TABLE = {"embed.label.table.weight": "y_embedder.embedding_table.weight"}
INNER = {
    "modulation": "adaLN_modulation.1",
    "attn.qkv": "attn.qkv",
    "attn.out": "attn.proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
BLOCK = re.compile(r"blocks\.(\d+)\.")
ROUNDING = 3e-4
"""Tolerance of `pos_embed`. Libraries round sines differently, and train.py averages the table with
the weights: rounding alone makes its average drift, but by no more than 1.7e-4."""
SCALE = 0.18215
"""Scale of latents of Stable Diffusion's autoencoder, on which the released weights are trained."""

AdamState: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""AdamW's `exp_avg`, `exp_avg_sq` and `step` by parameter."""


@dataclass(frozen=True)
class Original:
    """Config and output channels, inferred from a state dict of facebookresearch/DiT."""

    config: DiTConfig
    output_channels: int

    @property
    def learn_sigma(self) -> bool:
        """True if the network also predicts a variance."""
        return self.output_channels == 2 * self.config.in_channels

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Our parameters on the meta device."""
        with torch.device("meta"):
            return dict(self.config.build(self.output_channels).named_parameters())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the original tensors' shapes, by original name."""
        return {name: tuple(tensor.shape) for name, tensor in self.outline().items()}

    def outline(self) -> dict[str, Tensor]:
        """The original's tensors on the meta device, in the order of a file."""
        hidden = self.config.shape[0]
        fixed = torch.empty(1, self.config.token_shape[0], hidden, device="meta")
        return dict(tensor_layouts.to_theirs(self.layouts(), self.parameters)) | {POSITIONS: fixed}

    def names(self) -> dict[str, str]:
        """Map our parameter names to the original's."""
        pairs = dict(OUTER)
        for layer in range(self.config.shape[1]):
            pairs |= {f"blocks.{layer}.{k}": f"blocks.{layer}.{v}" for k, v in INNER.items()}
        kinds = ("weight", "bias")
        return TABLE | {f"{k}.{kind}": f"{v}.{kind}" for k, v in pairs.items() for kind in kinds}

    def layouts(self) -> dict[str, Same]:
        """Name of our parameter -> its layout in the original's tensors."""
        _, _, heads, patch = self.config.shape
        found: dict[str, Same] = {}
        for name, theirs in self.names().items():
            if theirs == PATCH:
                found[name] = ConvKernel((theirs,), patch)
            elif ".attn.qkv." in name:
                found[name] = RowsOfQKV((theirs,), heads)
            else:
                found[name] = Same((theirs,))
        return found

    def to_ours(self, tensors: Mapping[str, Tensor]) -> OnDemand:
        """Convert original tensors to our fp32 parameters; raises UserError on a mismatch."""
        check_tensors(tensors, self.shapes())
        check_positions(tensors[POSITIONS], self.config)
        return self.converted(tensors)

    def converted(self, tensors: Mapping[str, Tensor]) -> OnDemand:
        """Convert tensors of the original's shapes to our names and layout, fp32."""
        return tensor_layouts.to_ours(self.layouts(), tensors, self.parameters)

    def adam_to_ours(self, moments: AdamState) -> AdamState:
        """Convert the original's AdamW state to ours; raises UserError on a mismatch."""
        shapes = {name: shape for name, shape in self.shapes().items() if name != POSITIONS}
        halves = {}
        for key in ("exp_avg", "exp_avg_sq"):
            tensors = OnDemand(
                {name: outline_of(state)[key] for name, state in moments.items()},
                partial(entry, moments, key),
            )
            check_tensors(tensors, shapes, f"AdamW's {key} does")
            halves[key] = self.converted(tensors)
        ours: dict[str, Mapping[str, Tensor]] = {}
        for name, theirs in self.names().items():
            count = moments[theirs]["step"].float().reshape(())
            parts = {key: half.outline[name] for key, half in halves.items()}
            get = partial(moment, halves, count, name)
            ours[name] = OnDemand({**parts, "step": count}, get)
        return ours

    def to_original(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the original's names and tensors, including `pos_embed`, from our parameters.

        Raises UserError for settings that the original lacks.
        """
        if given := self.config.condition_channels:
            raise UserError(
                f"[model] condition_channels={given}: the original DiT is given no further "
                "channels. Keep the run's checkpoint."
            )
        if self.config.qk_norm:
            raise UserError(
                "[model] qk_norm=true: the original DiT has no QK norm layers. Train with qk_norm "
                "= false."
            )
        if self.config.timestep_frequencies != "dit":
            raise UserError(
                f"[model] timestep_frequencies={show(self.config.timestep_frequencies)}: the "
                "original DiT divides by 128 in the exponents of the frequencies, so the same "
                'weights predict something else there. Train with timestep_frequencies = "dit".'
            )
        theirs = tensor_layouts.to_theirs(self.layouts(), tensors)
        return itertools.chain(theirs, [(POSITIONS, positions(self.config))])


def entry(moments: AdamState, key: str, name: str) -> Tensor:
    """One of AdamW's tensors, by the original's parameter name."""
    return moments[name][key]


def moment(halves: Mapping[str, OnDemand], count: Tensor, name: str, key: str) -> Tensor:
    """One of AdamW's tensors, by our parameter name."""
    return count if key == "step" else halves[key][name]


def infer(tensors: Mapping[str, Tensor], heads: int | None) -> Original:
    """Infer the network's sizes from the tensor shapes of a state dict.

    `heads` cannot be inferred; None looks it up for S, B, L and XL. Raises UserError for shapes of
    no DiT.
    """
    kernel, grid = with_ndim(tensors, PATCH, 4), with_ndim(tensors, POSITIONS, 3)
    table = with_ndim(tensors, TABLE["embed.label.table.weight"], 2)
    final, fc1 = (
        with_ndim(tensors, name, 2)
        for name in ("final_layer.linear.weight", "blocks.0.mlp.fc1.weight")
    )
    hidden, channels, patch, _ = kernel.shape
    side = math.isqrt(grid.shape[1])
    if side * side != grid.shape[1]:
        raise UserError(
            f"{POSITIONS} is {list(grid.shape)}: {grid.shape[1]} is not a square. Give a DiT for "
            "square pictures."
        )
    outputs = final.shape[0] // patch**2
    if outputs not in (channels, 2 * channels):
        raise UserError(
            f"final_layer.linear.weight is {list(final.shape)}: {outputs} output channels, but a "
            f"DiT with {channels} latent channels has {channels}, or {2 * channels} with learned "
            "sigma. Give the weights of one of these."
        )
    layers = len({match[1] for name in tensors if (match := BLOCK.match(name))})
    model = DiTConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads or heads_of(hidden, layers),
        patch_size=patch,
        mlp_ratio=fc1.shape[0] / hidden,
        latent_size=side * patch,
        in_channels=channels,
        num_classes=table.shape[0] - 1,
    )
    return Original(model, outputs)


def with_ndim(tensors: Mapping[str, Tensor], name: str, ndim: int) -> Tensor:
    """Return a tensor of the state dict; raises UserError unless it has `ndim` dims."""
    if name not in tensors:
        if prefixed := next((other for other in tensors if other.endswith(f".{name}")), None):
            prefix = prefixed.removesuffix(name)
            raise UserError(f"all names have the prefix {prefix}: save the weights without it.")
        raise UserError(
            f"{name} is missing, so this is no DiT of facebookresearch/DiT.{listed(tensors)}"
        )
    if tensors[name].ndim != ndim or not tensors[name].numel():
        shape = list(tensors[name].shape)
        raise UserError(
            f"{name} is {shape}; a DiT's has {ndim} dims, none of them 0. Give a DiT's weights."
        )
    return tensors[name]


def name_of(config: DiTConfig) -> str | None:
    """Return the name of a published size, such as "XL/2"; None for any other."""
    for name, sizes in SIZES.items():
        if sizes == config.shape[:3]:
            return f"{name}/{config.shape[3]}"
    return None


def heads_of(hidden: int, layers: int) -> int:
    """Look up the heads of the published size with this width and depth.

    Raises UserError if it is none of those.
    """
    for width, depth, heads in SIZES.values():
        if (width, depth) == (hidden, layers):
            return heads
    raise UserError(
        f"hidden_size={hidden}, num_layers={layers} is none of {', '.join(SIZES)}, so the "
        "number of heads is unknown. Set it with --heads N."
    )


def check_tensors(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    what: str = "the weights do",
    network: str = "a DiT",
) -> None:
    """Raise UserError for missing or unexpected tensors, wrong shapes or dtypes, NaN or inf."""
    problems = [f"missing: {name}" for name in shapes if name not in tensors]
    problems += [f"unexpected: {name}" for name in tensors if name not in shapes]
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            problems.append(f"wrong shape: {name} is {list(tensor.shape)}, not {list(shape)}")
        elif not tensor.is_floating_point():
            problems.append(f"not floating point: {name} is {tensor.dtype}")
        elif not tensor.float().isfinite().all():  # In fp32, as it will be loaded.
            problems.append(f"NaN or infinity in {name}")
    if problems:
        raise UserError(f"{what} not match {network}:\n  " + "\n  ".join(first(problems, 12)))


def check_positions(found: Float[Tensor, "1 n d"], model: DiTConfig) -> None:
    """Raise UserError for a `pos_embed` that differs from the fixed table.

    Our models compute the table.
    """
    difference = (found.float() - positions(model)).abs().max().item()
    # In half-precision files, the positions are rounded too.
    if difference > max(ROUNDING, torch.finfo(found.dtype).eps):
        raise UserError(
            f"{POSITIONS} differs from the fixed sin-cos table by {difference:.2g}: learned "
            "position embeddings are not supported. Give a DiT with the fixed table."
        )


def positions(model: DiTConfig) -> Float[Tensor, "1 n d"]:
    """Compute `pos_embed` in fp64 like the original, for bitwise equality."""
    hidden, _, _, patch = model.shape
    side = model.latent_size // patch
    omega = np.arange(hidden // 4, dtype=np.float64) / (hidden / 4)
    angles = np.outer(np.arange(side, dtype=np.float64), 1 / 10000**omega)
    line = torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles)), 1)).float()
    column = line.expand(side, side, -1)
    return torch.cat((column, column.transpose(0, 1)), -1).reshape(1, side * side, hidden)


def listed(names: Iterable[str]) -> str:
    """Return a sentence that lists a few tensor names of a file."""
    few = first(list(names), 4)
    return f" It holds {', '.join(few)}." if few else " It holds no tensors."


def first(lines: list[str], most: int) -> list[str]:
    """Return at most `most` lines, and one more that counts the rest."""
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]
