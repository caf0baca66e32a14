"""Weights of the original DiT (facebookresearch/DiT) to ours and back, bit for bit.

Three tensors differ by more than their names: the patch convolution's kernel [hidden, c, p, p] is
our linear layer's (p, p, c); the rows of qkv are [3, heads, head_dim] there and [heads, 3,
head_dim] here; `pos_embed` is a constant that we compute and do not keep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.models.dit import SIZES, DiTConfig

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
ROUNDING = 1e-4
"""How far positions may be from ours, as other libraries' sines round differently."""

Moments: TypeAlias = dict[str, dict[str, Tensor]]
"""AdamW's `exp_avg`, `exp_avg_sq` and `step` of every parameter."""


@dataclass(frozen=True)
class Original:
    """What a state dict of the original DiT is a network of."""

    config: DiTConfig
    output_channels: int

    @property
    def learn_sigma(self) -> bool:
        """Whether the network predicts a variance behind the noise."""
        return self.output_channels == 2 * self.config.channels

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the original, by its original name."""
        with torch.device("meta"):
            ours = dict(self.config.build(self.output_channels).named_parameters())
        shapes = {theirs: tuple(ours[name].shape) for name, theirs in self.names().items()}
        hidden, _, _, patch = self.config.shape
        shapes[PATCH] = (hidden, self.config.channels, patch, patch)
        return shapes | {POSITIONS: (1, self.config.token_shape[0], hidden)}

    def names(self) -> dict[str, str]:
        """Our name of every parameter -> the original's."""
        pairs = dict(OUTER)
        for layer in range(self.config.shape[1]):
            pairs |= {f"blocks.{layer}.{k}": f"blocks.{layer}.{v}" for k, v in INNER.items()}
        kinds = ("weight", "bias")
        return TABLE | {f"{k}.{kind}": f"{v}.{kind}" for k, v in pairs.items() for kind in kinds}

    def to_ours(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The original's tensors as our parameters, fp32; UserError where they do not fit."""
        check(tensors, self.shapes())
        check_positions(tensors[POSITIONS], self.config)
        return self.moved(tensors)

    def moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the original's shapes under our names and in our layout, fp32."""
        ours = {}
        for name, theirs in self.names().items():
            tensor = tensors[theirs].float()
            if theirs == PATCH:
                tensor = tensor.permute(0, 2, 3, 1).flatten(1)
            elif ".attn.qkv." in name:
                tensor = exchange(tensor, 3, self.config.shape[2])
            ours[name] = tensor.contiguous()
        return ours

    def adam_to_ours(self, moments: Moments) -> Moments:
        """The original's AdamW state as ours; raises UserError where it does not fit."""
        shapes = {name: shape for name, shape in self.shapes().items() if name != POSITIONS}
        ours: Moments = {name: {} for name in self.names()}
        for key in ("exp_avg", "exp_avg_sq"):
            tensors = {name: state[key] for name, state in moments.items()}
            check(tensors, shapes, f"AdamW's {key} does")
            for name, tensor in self.moved(tensors).items():
                ours[name][key] = tensor
        for name, theirs in self.names().items():
            ours[name]["step"] = moments[theirs]["step"].float().reshape(())
        return ours

    def to_original(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our parameters under the original's names and in its layout, `pos_embed` included."""
        if self.config.qk_norm:
            raise UserError("[model] qk_norm=true: the original DiT has no such layers.")
        originals = {}
        for name, theirs in self.names().items():
            tensor = tensors[name]
            if theirs == PATCH:
                _, channels, patch, _ = self.shapes()[PATCH]
                grid = tensor.view(-1, patch, patch, channels)
                tensor = grid.permute(0, 3, 1, 2)
            elif ".attn.qkv." in name:
                tensor = exchange(tensor, self.config.shape[2], 3)
            originals[theirs] = tensor.contiguous()
        return originals | {POSITIONS: positions(self.config)}


def exchange(rows: Float[Tensor, "r ..."], first: int, second: int) -> Float[Tensor, "r ..."]:
    """Rows [first, second, head_dim] as [second, first, head_dim]."""
    apart = rows.view(first, second, -1, *rows.shape[1:])
    return apart.transpose(0, 1).reshape(rows.shape)


def infer(tensors: Mapping[str, Tensor], heads: int | None) -> Original:
    """The sizes of the network that a state dict belongs to.

    `heads` is not in the tensors: None looks it up for S, B, L and XL.
    """
    kernel, grid = of_rank(tensors, PATCH, 4), of_rank(tensors, POSITIONS, 3)
    table = of_rank(tensors, TABLE["embed.label.table.weight"], 2)
    final, fc1 = (
        of_rank(tensors, name, 2)
        for name in ("final_layer.linear.weight", "blocks.0.mlp.fc1.weight")
    )
    hidden, channels, patch, _ = kernel.shape
    side = math.isqrt(grid.shape[1])
    if side * side != grid.shape[1]:
        raise UserError(f"{POSITIONS} is {list(grid.shape)}: {grid.shape[1]} tokens are no square.")
    outputs = final.shape[0] // patch**2
    if outputs not in (channels, 2 * channels):
        raise UserError(
            f"final_layer.linear.weight is {list(final.shape)}: {outputs} output channels for "
            f"{channels} of a latent; a DiT has {channels}, or {2 * channels} with learned sigma."
        )
    layers = len({match[1] for name in tensors if (match := BLOCK.match(name))})
    model = DiTConfig(
        hidden=hidden,
        layers=layers,
        heads=heads or heads_of(hidden, layers),
        patch=patch,
        mlp_ratio=fc1.shape[0] / hidden,
        latent_size=side * patch,
        channels=channels,
        num_classes=table.shape[0] - 1,
    )
    return Original(model, outputs)


def of_rank(tensors: Mapping[str, Tensor], name: str, ndim: int) -> Tensor:
    """A tensor that tells sizes, or an error that names it."""
    if name not in tensors:
        if prefixed := next((other for other in tensors if other.endswith(f".{name}")), None):
            prefix = prefixed.removesuffix(name)
            raise UserError(f"all names begin with {prefix}: save the weights without it.")
        raise UserError(
            f"{name} is missing, so this is no DiT of facebookresearch/DiT.{some(tensors)}"
        )
    if tensors[name].ndim != ndim or not tensors[name].numel():
        shape = list(tensors[name].shape)
        raise UserError(f"{name} is {shape}; a DiT's has {ndim} dims, none of them 0.")
    return tensors[name]


def name_of(config: DiTConfig) -> str | None:
    """The name of the published size that a network has, if it has one."""
    for name, sizes in SIZES.items():
        if sizes == config.shape[:3]:
            return f"{name}/{config.shape[3]}"
    return None


def heads_of(hidden: int, layers: int) -> int:
    """The heads of the named size with this width and depth."""
    for width, depth, heads in SIZES.values():
        if (width, depth) == (hidden, layers):
            return heads
    raise UserError(
        f"hidden={hidden}, layers={layers} is none of {', '.join(SIZES)}, and the number of heads "
        "is not in the tensors. Give it: --heads N"
    )


def check(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    what: str = "the weights do",
) -> None:
    """Every tensor there, none left over, each of its shape, all of them numbers."""
    problems = [f"missing: {name}" for name in shapes if name not in tensors]
    problems += [f"left over: {name}" for name in tensors if name not in shapes]
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            problems.append(f"wrong shape: {name} is {list(tensor.shape)}, not {list(shape)}")
        elif not tensor.is_floating_point():
            problems.append(f"no floating-point numbers: {name} is {tensor.dtype}")
        elif not tensor.isfinite().all():
            problems.append(f"NaN or infinity in {name}")
    if problems:
        raise UserError(f"{what} not fit a DiT:\n  " + "\n  ".join(first(problems, 12)))


def check_positions(found: Float[Tensor, "1 n d"], model: DiTConfig) -> None:
    """Other positions than the fixed ones would be lost."""
    difference = (found.float() - positions(model)).abs().max().item()
    # Weights in half precision have their positions rounded too.
    if difference > max(ROUNDING, torch.finfo(found.dtype).eps):
        raise UserError(
            f"{POSITIONS} differs from the fixed sin-cos table by {difference:.2g}: learned "
            "positions are not supported."
        )


def positions(model: DiTConfig) -> Float[Tensor, "1 n d"]:
    """`pos_embed` as the original computes it, in fp64, so that its bits come back."""
    hidden, _, _, patch = model.shape
    side = model.latent_size // patch
    omega = np.arange(hidden // 4, dtype=np.float64) / (hidden / 4)
    angles = np.outer(np.arange(side, dtype=np.float64), 1 / 10000**omega)
    line = torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles)), 1)).float()
    column = line.expand(side, side, -1)
    return torch.cat((column, column.transpose(0, 1)), -1).reshape(1, side * side, hidden)


def some(names: Iterable[str]) -> str:
    """A few of the names that there are instead."""
    listed = first(list(names), 4)
    return f" It holds {', '.join(listed)}." if listed else " It holds no tensors."


def first(lines: list[str], most: int) -> list[str]:
    """The first lines, and how many more there are."""
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]
